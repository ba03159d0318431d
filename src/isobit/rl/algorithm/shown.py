"""Text that is shown to a teacher with the prompt, and not to the policy: with it the policy can be
its own teacher (self-distillation).

Both minimize the reverse KL of each token, KL(π(· | prompt) ‖ π(· | prompt, shown)), where the second
is a constant. A demonstration of the row: SDFT, Shenfeld et al. 2026, arXiv 2601.19897. Another
completion of the group that succeeded, or feedback on this one: SDPO, Hübotter et al. 2026, arXiv
2601.20802; which of them is chosen as in its authors' code (lasgroup/SDPO,
`_maybe_build_self_distillation_batch`) and in TRL's `SuccessfulRolloutTeacherContextBuilder`
(tests/rl/test_shown.py). Left out: tokens (`training/rollouts/teaching.py`), and a teacher that
averages past weights.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from isobit.data.dataset import Prompt
from isobit.errors import IsobitError
from isobit.options.declare import Pattern
from isobit.rl.algorithm.objective import Function
from isobit.rl.algorithm.samples import Group
from isobit.tasks.workers.loading import find_function, last_line

_PLACES = re.compile(r"\{(prompt|shown)\}")
Feedback = Callable[..., object]


def _has_both(text: str) -> bool:
    return {match[1] for match in _PLACES.finditer(text)} == {"prompt", "shown"}


Template = Annotated[str, Pattern("a text with {prompt} and {shown}", _has_both)]


@dataclass(frozen=True)
class Shown:
    """The text that the teacher of a distillation reads with the prompt: a demonstration of the
    row, or a completion of the group that succeeded, or else feedback."""

    demonstration: Annotated[
        str | None, "a column of the data: what shows how the prompt is answered (SDFT)"
    ] = None
    success: Annotated[
        float | None,
        "the first other completion of the group with at least this reward (SDPO). A completion "
        "whose teacher is shown nothing is not learned from",
    ] = None
    feedback: Annotated[
        Function | None,
        "a function of your own, path/to/file.py:function, called with prompt, completion, reward and "
        "columns of one completion: returns text, or None. Where there is no success",
    ] = None
    template: Annotated[Template, "the teacher's prompt, or the last message of its chat"] = (
        "{prompt}\n\n{shown}"
    )
    feedback_template: Annotated[Template, "the same where feedback is shown"] = (
        "{prompt}\n\n{shown}"
    )

    def __post_init__(self) -> None:
        if (self.demonstration is None) == (self.success is None and self.feedback is None):
            raise IsobitError(
                "give either demonstration (a column of the data), or success (a reward), feedback "
                "(a function) or both of these"
            )

    def prompts(
        self, group: Group, prompt: Prompt, columns: Mapping[str, Any], feedback: Feedback | None
    ) -> list[Prompt | None]:
        """Return for each completion of a group the prompt that its teacher reads, None where it is
        shown nothing. Raises IsobitError for a column or a prompt that cannot be shown."""
        if self.demonstration is not None:
            text = demonstration_of(columns, self.demonstration)
            return [composed(prompt, text, self.template)] * len(group)
        solved = [] if self.success is None else self._solved(group, self.success)
        shown: list[Prompt | None] = []
        for index, sample in enumerate(group):
            successes = [i for i in solved if i != index]
            if successes:
                text = group[successes[0]].completion
                shown.append(composed(prompt, text, self.template))
                continue
            comment = None if feedback is None else self._said(feedback, prompt, sample, columns)
            shown.append(
                None if comment is None else composed(prompt, comment, self.feedback_template)
            )
        return shown

    @staticmethod
    def _solved(group: Group, least: float) -> list[int]:
        return [i for i, s in enumerate(group) if s.reward is not None and s.reward >= least]

    def _said(
        self, feedback: Feedback, prompt: Prompt, sample: Any, columns: Mapping[str, Any]
    ) -> str | None:
        text = feedback(
            prompt=prompt,
            completion=sample.completion,
            reward=sample.reward,
            columns=dict(columns),
        )
        if text is None or (isinstance(text, str) and not text.strip()):
            return None
        if not isinstance(text, str):
            raise IsobitError(
                f"reference.shown.feedback {self.feedback!r}: expected text or None, got "
                f"{text!r:.60}"
            )
        return text


def feedback_function(shown: Shown) -> Feedback | None:
    """Return the user's function, which raises IsobitError for whatever it raises; None without
    one."""
    if shown.feedback is None:
        return None
    key = "reference.shown.feedback"
    function, file = find_function(shown.feedback, key)

    def call(**arguments: Any) -> object:
        try:
            return function(**arguments)
        except Exception as error:  # the user's function may raise anything
            raise IsobitError(f"{key} {shown.feedback!r}: {last_line(error, file)}") from None

    return call


def demonstration_of(columns: Mapping[str, Any], column: str) -> str:
    """Return the text of a row's demonstration: of messages their contents, a line each, as TRL's
    `_stringify_privileged_context` has it. Raises IsobitError for anything else."""
    if column not in columns:
        have = ", ".join(sorted(columns)) or "none"
        raise IsobitError(f"reference.shown.demonstration: no column {column!r}; there are: {have}")
    value = columns[column]
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts = [m.get("content") if isinstance(m, Mapping) else None for m in value]
        value = "\n".join(p for p in texts if p) if all(isinstance(p, str) for p in texts) else None
    if not isinstance(value, str) or not value.strip():
        raise IsobitError(
            f"reference.shown.demonstration: column {column!r} must be text or messages, got "
            f"{columns[column]!r:.60}"
        )
    return value


def composed(prompt: Prompt, shown: str, template: str) -> Prompt:
    """Return the prompt inside the template with the text to show; of a chat its last message,
    which must be the user's. A placeholder that either text spells is not replaced."""
    if isinstance(prompt, str):
        return _filled(template, prompt, shown)
    last = prompt[-1]
    if last.get("role") != "user":
        raise IsobitError(
            f"reference.shown: the prompt's last message must be the user's, got role "
            f"{last.get('role')!r:.40}"
        )
    return [*prompt[:-1], {**last, "content": _filled(template, last["content"], shown)}]


def _filled(template: str, prompt: str, shown: str) -> str:
    texts = {"prompt": prompt, "shown": shown}
    return _PLACES.sub(lambda match: texts[match[1]], template)

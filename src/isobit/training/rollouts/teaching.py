"""The tokens that a teacher reads before a completion, where it is shown more than the policy was
(`rl/algorithm/shown.py`).

The completion's tokens stay as they were sampled; only what stands before them differs. A prompt
with a demonstration is measured before a run begins. One with a completion or with feedback is
known only once they are there: where it leaves no room in the teacher's context, the completion is
not learned from, as if nothing had been shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isobit.data.dataset import Dataset, Example, Prompt
from isobit.distributed import Ranks
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.rl import Group
from isobit.rl.algorithm.shown import Feedback, Shown, composed, demonstration_of, feedback_function
from isobit.tasks.builtin import Task
from isobit.training.rollouts.lengths import encode_prompt

TeacherPrompts = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True, eq=False)
class Teaching:
    """Makes the prompts of a `teacher` for the completions of `train`."""

    shown: Shown
    train: Dataset
    teacher: Model
    ranks: Ranks
    feedback: Feedback | None

    @staticmethod
    def of(shown: Shown, task: Task, teacher: Model, ranks: Ranks, most_tokens: int) -> "Teaching":
        """Build the teaching of a run whose completions have at most `most_tokens`. Raises
        IsobitError for a demonstration that is missing or does not fit the teacher's context, and
        for a template that cannot be encoded."""
        made = Teaching(shown, task.train, teacher, ranks, feedback_function(shown))
        if shown.demonstration is None:
            made._check_templates()
            return made
        room = teacher.config.max_positions - most_tokens
        for example in task.train.examples:
            tokens = len(made._encoded(example, made._demonstrated(example)))
            if tokens > room:
                raise IsobitError(
                    f"{example.place}: reference.shown: with the demonstration the prompt has "
                    f"{tokens} tokens: the teacher's context of {teacher.config.max_positions} "
                    f"leaves {room} beside completions of {most_tokens}"
                )
        return made

    def prompts(self, groups: Sequence[Group]) -> TeacherPrompts:
        """Return the teacher's prompt tokens for each completion, group by group; None where the
        teacher is shown nothing, or more than fits. The first rank makes them for all."""
        return [
            None if ids is None else tuple(ids)
            for ids in self.ranks.broadcast_result(lambda: self._prompts(groups))
        ]

    def _prompts(self, groups: Sequence[Group]) -> list[list[int] | None]:
        context, token_ids = self.teacher.config.max_positions, list[list[int] | None]()
        for group in groups:
            example = self.train.at(group[0].prompt_index)
            made = self.shown.prompts(group, example.prompt, example.columns, self.feedback)
            known: dict[str, list[int]] = {}
            for sample, prompt in zip(group, made, strict=True):
                if prompt is None:
                    token_ids.append(None)
                    continue
                key = str(prompt)
                if key not in known:
                    known[key] = self._encoded(example, prompt)
                fits = len(known[key]) + len(sample.completion_ids) <= context
                token_ids.append(known[key] if fits else None)
        return token_ids

    def _check_templates(self) -> None:
        """Raise IsobitError for a prompt that no template takes, or a template that cannot be
        encoded."""
        shown, examples = self.shown, self.train.examples
        for template, used in (
            (shown.template, shown.success is not None),
            (shown.feedback_template, shown.feedback is not None),
        ):
            prompts = [self._with(example, "", template) for example in examples if used]
            if prompts:
                self._encoded(examples[0], prompts[0])

    def _with(self, example: Example, text: str, template: str) -> Prompt:
        try:
            return composed(example.prompt, text, template)
        except IsobitError as error:
            raise IsobitError(f"{example.place}: {error}") from None

    def _demonstrated(self, example: Example) -> Prompt:
        shown = self.shown
        assert shown.demonstration is not None
        try:
            text = demonstration_of(example.columns, shown.demonstration)
        except IsobitError as error:
            raise IsobitError(f"{example.place}: {error}") from None
        return self._with(example, text, shown.template)

    def _encoded(self, example: Example, prompt: Prompt) -> list[int]:
        return encode_prompt(replace(example, prompt=prompt), self.teacher)

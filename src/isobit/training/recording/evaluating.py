"""An evaluation of the held-out prompts, when one is due, and what of it is kept."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from isobit.config import Config, SftConfig
from isobit.evaluation.best import Best
from isobit.evaluation.early_stop import STOPPED, EarlyStop
from isobit.evaluation.result import Question
from isobit.rl.learner.learner import Learner
from isobit.training.measuring.meter import Meter
from isobit.training.policy import Policy
from isobit.training.saving.saver import Saver
from isobit.training.saving.snapshot import State


def evaluated_only_as_the_last(config: Config | SftConfig, step: int) -> bool:
    """Whether a step is evaluated because it is the last, where a run of more steps would not: also
    without `evaluation.every` if the run is supervised."""
    every = config.evaluation.every
    asked = bool(every) or isinstance(config, SftConfig)
    return asked and step == config.steps and not _due(step, every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def rows_of(step: int, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Rows of held_out.jsonl.gz: of each prompt the greedy completion, whose `sample_index` is 0,
    and its samples."""
    for number, question in enumerate(questions):
        prompt = question.prompt
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{each['role']}: {_said(each)}" for each in prompt)
        for sample, graded in enumerate((question.greedy, *question.samples)):
            yield {
                "step": step,
                "prompt_index": number,
                "sample_index": sample,
                "prompt": prompt,
                "tag": question.tag,
                **asdict(graded),
            }


def _said(message: Mapping[str, Any]) -> str:
    """What a message says; as JSON where it is no text, such as parts, or none beside calls."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


class HeldOut(Protocol):
    """What is held out, and how it is evaluated."""

    def evaluate(
        self, trainer_state: Mapping[str, float]
    ) -> tuple[dict[str, float], str, Sequence[Question]]:
        """(metrics, a line for the reader, what was answered) of the present weights."""


class Evaluating:
    """`held_out`: None where a run evaluates nothing. `prompts`: how many it trains on, `steps`: of
    the whole run; `write` takes the rows of what was answered."""

    def __init__(
        self,
        held_out: HeldOut | None,
        policy: Policy,
        learner: Learner,
        state: State,
        meter: Meter,
        saver: Saver,
        best: Best,
        stop: EarlyStop,
        note: Callable[[str], None],
        write: Callable[[Iterable[Mapping[str, Any]]], None],
        *,
        every: int,
        steps: int,
        prompts: int,
    ) -> None:
        self._held_out, self._every, self._steps = held_out, every, steps
        self._prompts, self._policy, self._learner, self._state = prompts, policy, learner, state
        self._meter, self._saver, self._best, self._note = meter, saver, best, note
        self._stop, self._write = stop, write

    def metrics(self, last: bool) -> dict[str, float]:
        """Of the present step, if it is due or the `last`; else none."""
        step = self._state.step
        if self._held_out is None or not (_due(step, self._every) or last):
            return {}
        self._policy.refresh()
        self._meter.phase("evaluate")
        with self._saver.broken_weights_end_the_run():
            progress = self._state.progress(self._steps, self._prompts)
            found, line, answered = self._held_out.evaluate(progress)
        self._learner.check_memory()
        self._note(f"step {step}: {line}")
        self._write(rows_of(step, answered))
        self._best.consider(step, found)
        if self._stop.consider(step, found):
            found[STOPPED] = 1.0
        return found

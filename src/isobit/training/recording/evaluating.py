"""An evaluation of the held-out prompts, when one is due."""

from collections.abc import Callable, Mapping
from typing import Protocol

from isobit.config import Config, SftConfig
from isobit.evaluation.best import Best
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


class HeldOut(Protocol):
    """What is held out, and how it is evaluated."""

    def evaluate(self, trainer_state: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """(metrics, a line for the reader) of the present weights."""


class Evaluating:
    """`held_out`: None where a run evaluates nothing. `prompts`: how many it trains on, `steps`: of
    the whole run."""

    def __init__(
        self,
        held_out: HeldOut | None,
        policy: Policy,
        learner: Learner,
        state: State,
        meter: Meter,
        saver: Saver,
        best: Best,
        note: Callable[[str], None],
        *,
        every: int,
        steps: int,
        prompts: int,
    ) -> None:
        self._held_out, self._every, self._steps = held_out, every, steps
        self._prompts, self._policy, self._learner, self._state = prompts, policy, learner, state
        self._meter, self._saver, self._best, self._note = meter, saver, best, note

    def metrics(self, last: bool) -> dict[str, float]:
        """Of the present step, if it is due or the `last`; else none."""
        step = self._state.step
        if self._held_out is None or not (_due(step, self._every) or last):
            return {}
        self._policy.refresh()
        self._meter.phase("evaluate")
        with self._saver.broken_weights_end_the_run():
            found, line = self._held_out.evaluate(self._state.progress(self._steps, self._prompts))
        self._learner.check_memory()
        self._note(f"step {step}: {line}")
        self._best.consider(step, found)
        return found

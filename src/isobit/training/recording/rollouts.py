"""What a step records of the batch that it has learned from: of rollouts the rewards, lengths and
staleness, the completions, and those for the screen; of given answers the loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from typing import Any

from isobit.monitor.screen import Shown
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.given import PAIR_LOSSES
from isobit.rl.algorithm.replay import ReplayBuffer
from isobit.training.learning import Lesson
from isobit.training.measuring.statistics import batch_metrics, partial_metrics, staleness_metrics
from isobit.training.recording.rows import CompletionRows
from isobit.training.saving.snapshot import State

_UNSAID = ("loss/kl", "clip_fraction", "mismatch/comparable_tokens")
"""What the learner measures of sampled completions, which given answers are not."""


@dataclass(frozen=True, eq=False)
class LearnedRollouts:
    """The metrics and rows of a step of RL that is counted already: `state.step` is its number."""

    completions: CompletionRows
    state: State
    replay: ReplayBuffer

    def metrics(self, batch: StepBatch, lesson: Lesson) -> dict[str, float]:
        """Return the metrics of the batch, its samples' age in steps, and the lesson."""
        learned_step = self.state.step - 1
        staleness = [learned_step - s.oldest_step for group in batch.learned_from for s in group]
        staled = staleness_metrics(staleness, len(batch.replayed), len(self.replay.groups))
        partial = partial_metrics([s for group in batch.learned_from for s in group])
        return batch_metrics(batch) | staled | partial | dict(lesson.metrics)

    def rows(self, step: int, batch: StepBatch, lesson: Lesson) -> Iterator[dict[str, Any]]:
        """Yield a row for each completion that was sampled for the step."""
        return self.completions.of(step, batch.groups, lesson.compared)

    def shown(self, batch: StepBatch) -> Iterator[Shown]:
        """Return each completion of the batch with its prompt, to be shown on the screen."""
        decode = self.completions.tokenizer.decode
        for group in batch.groups:
            for sample in group:
                yield Shown(sample.reward, decode(sample.prompt_ids), sample.completion)


_OF_LABELS = ("chosen_reward", "rejected_reward", "desirable", "kl_baseline")


def _of_labels(
    chosen_reward: float, rejected_reward: float, desirable: float, kl_baseline: float
) -> dict[str, float]:
    """Return means over the desirable answers and over the others from means over all, NaN without
    any."""
    chosen = chosen_reward / desirable if desirable else nan
    rejected = rejected_reward / (1 - desirable) if desirable < 1 else nan
    return {
        "preference/chosen_reward": chosen,
        "preference/rejected_reward": rejected,
        "preference/margin": chosen - rejected,
        "preference/kl": kl_baseline,
    }


_OF_PAIRS = ("chosen_reward", "rejected_reward", "margin", "accuracy")


@dataclass(frozen=True)
class LearnedAnswers:
    """The record of a supervised run's steps, by its `loss`."""

    loss: str

    def metrics(self, batch: StepBatch, lesson: Lesson) -> dict[str, float]:
        """Return the loss, the length of the answers, and what else the learner measured."""
        measured = dict(lesson.metrics)
        lengths = [sample.num_trained for group in batch.groups for sample in group]
        values = {
            f"loss/{self.loss}": measured.pop("loss/policy"),
            "length/mean": sum(lengths) / len(lengths),
        }
        if self.loss in PAIR_LOSSES:  # shared out over the tokens of both answers
            scale = sum(lengths) / len(lengths)
            values |= {f"preference/{n}": measured.pop(f"loss/{n}", nan) * scale for n in _OF_PAIRS}
        if self.loss == "kto":
            scale = sum(lengths) / len(lengths)
            means = {n: measured.pop(f"loss/{n}", nan) * scale for n in _OF_LABELS}
            values |= _of_labels(**means)
        return values | {name: value for name, value in measured.items() if name not in _UNSAID}

    def rows(self, step: int, batch: StepBatch, lesson: Lesson) -> Iterator[dict[str, Any]]:
        """Return an empty iterator: the answers are in the data."""
        return iter(())

    def shown(self, batch: StepBatch) -> Iterator[Shown]:
        """Return an empty iterator: nothing was sampled."""
        return iter(())

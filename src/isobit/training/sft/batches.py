"""Where the batches of a supervised run come from: the answers of the next examples, in the order
of the data; and what the run says of a batch that it has learned from.

The only state is the cursor, so a run that goes on sees what it would have seen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from isobit.data.dataset import Dataset
from isobit.monitor.screen import Shown
from isobit.rl import Group, Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.given import PAIR_LOSSES
from isobit.training.learning import Lesson
from isobit.training.loop import Rollout
from isobit.training.saving.snapshot import State
from isobit.training.sft.taught import SupervisedSample

_UNSAID = ("loss/kl", "clip_fraction", "mismatch/comparable_tokens")
"""What the learner measures of sampled completions, which these are not."""


@dataclass(frozen=True, eq=False)
class SupervisedBatches:
    """Batches of the answers of `batch_size` examples of `train`; `taught`: what is learned of
    each, by its index."""

    train: Dataset
    taught: Mapping[int, Sequence[SupervisedSample]]
    state: State
    batch_size: int

    def next(self) -> Rollout:
        """The answers of the next examples, each with its reward."""
        first = self.state.cursor
        groups = [self._group(cursor) for cursor in range(first, first + self.batch_size)]
        self.state.cursor += self.batch_size
        return Rollout(StepBatch(self.batch_size, groups=groups, scored=groups, rounds_left=0), {})

    def _group(self, cursor: int) -> Group:
        return given(self.taught[self.train.at(cursor).index], cursor)


def given(taught: Sequence[SupervisedSample], cursor: int) -> list[Sample]:
    """The answers of an example as the learner takes samples: of no weights of the run, and with no
    log-probabilities of a rollout."""
    return [
        Sample(
            prompt_index=cursor,
            sample_index=number,
            prompt_ids=each.prompt_ids,
            completion_ids=each.completion_ids,
            rollout_logprobs=(0.0,) * len(each.completion_ids),
            completion="",
            truncated=False,
            weights_version=-1,
            reward=each.reward,
            completion_mask=each.completion_mask,
        )
        for number, each in enumerate(taught)
    ]


_OF_LABELS = ("chosen_reward", "rejected_reward", "desirable", "kl_baseline")


def _of_labels(
    chosen_reward: float, rejected_reward: float, desirable: float, kl_baseline: float
) -> dict[str, float]:
    """Of means over all answers those over the desirable and over the others, NaN without any."""
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
    """What a supervised run says of a step, by its `loss`."""

    loss: str

    def metrics(self, batch: StepBatch, lesson: Lesson) -> dict[str, float]:
        """The loss, the length of the answers, and what else the learner measured."""
        found = dict(lesson.metrics)
        lengths = [sample.num_trained for group in batch.groups for sample in group]
        said = {
            f"loss/{self.loss}": found.pop("loss/policy"),
            "length/mean": sum(lengths) / len(lengths),
        }
        if self.loss in PAIR_LOSSES:  # shared out over the tokens of both answers
            scale = sum(lengths) / len(lengths)
            said |= {f"preference/{n}": found.pop(f"loss/{n}", nan) * scale for n in _OF_PAIRS}
        if self.loss == "kto":
            scale = sum(lengths) / len(lengths)
            means = {n: found.pop(f"loss/{n}", nan) * scale for n in _OF_LABELS}
            said |= _of_labels(**means)
        return said | {name: value for name, value in found.items() if name not in _UNSAID}

    def rows(self, step: int, batch: StepBatch, lesson: Lesson) -> Iterator[dict[str, Any]]:
        """None: the answers are in the data."""
        return iter(())

    def shown(self, batch: StepBatch) -> Iterator[Shown]:
        """None: nothing was sampled."""
        return iter(())

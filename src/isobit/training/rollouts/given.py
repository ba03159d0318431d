"""The source of given answers, of a supervised run: those of the next examples, in the order of the
data.

The only state is the cursor, so a run that goes on sees what it would have seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isobit.data.dataset import Dataset
from isobit.rl import Group, Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.training.loop import Rollout
from isobit.training.rollouts.taught import SupervisedSample
from isobit.training.saving.snapshot import State


@dataclass(frozen=True, eq=False)
class GivenAnswers:
    """Batches of the answers of `batch_size` examples of `train`; `taught`: what is learned of
    each, by its index."""

    train: Dataset
    taught: Mapping[int, Sequence[SupervisedSample]]
    state: State
    batch_size: int

    def next(self) -> Rollout:
        """Return the answers of the next examples, each with its reward."""
        first = self.state.cursor
        groups = [self._group(cursor) for cursor in range(first, first + self.batch_size)]
        self.state.cursor += self.batch_size
        return Rollout(StepBatch(self.batch_size, groups=groups, scored=groups, rounds_left=0), {})

    def _group(self, cursor: int) -> Group:
        return given(self.taught[self.train.at(cursor).index], cursor)


def given(taught: Sequence[SupervisedSample], cursor: int) -> list[Sample]:
    """Return the answers of an example as the learner takes samples: of no weights of the run, and
    with no log-probabilities of a rollout."""
    return [
        Sample(
            prompt_index=cursor,
            sample_index=number,
            prompt_ids=answer.prompt_ids,
            completion_ids=answer.completion_ids,
            rollout_logprobs=(0.0,) * len(answer.completion_ids),
            completion="",
            truncated=False,
            weights_version=-1,
            reward=answer.reward,
            completion_mask=answer.completion_mask,
        )
        for number, answer in enumerate(taught)
    ]

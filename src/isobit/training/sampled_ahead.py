"""A share of each batch that is sampled ahead of the learner, compared under the weights that sampled it.

When such a batch is learned from, the weights have moved on, and a difference is learning, not mismatch. So the learner
computes the log-probabilities of `mismatch.share_ahead` of its completions while the working weights are those that
sampled: in one process before it learns; where a fleet samples beside it, when the batch has arrived. Then the learner
has learned, and its working weights are still those of before, or are put back where a batch takes several updates.
Which completions is drawn from the run's seed and the batch's first prompt, so they are the same ones in one process,
in a fleet, at any number of ranks and after a resume. Nothing is changed, so no bit of a run depends on it
(tests/training/test_sampled_ahead.py). Left out: what a run does where bits differ (`learning.py`).
"""

import math
from collections.abc import Sequence

from isobit.model.keeping import KeptWeights
from isobit.rl import Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.learner.agreement import Compared
from isobit.rl.learner.zero_advantage import drawn
from isobit.training.context import Context


class SampledAhead:
    """`late`: batches arrive when the learner has learned. After `before_learning` or `after_learning`, `compared` are
    the completions of this step that were compared, and `tokens` counts all that could have been."""

    def __init__(self, context: Context, ahead: int, late: bool) -> None:
        self._context, self._late = context, late
        self._ahead, self._share = ahead, context.parts.config.mismatch.share_ahead
        self._version = 0
        self._kept: KeptWeights | None = None
        self.compared: list[Compared] = []
        self.tokens = 0

    def before_learning(self) -> None:
        """The working weights are those that sample in this step. Raises as `Learner.compare`."""
        model, self.compared, self.tokens = self._context.parts.model, [], 0
        self._version = model.weights_version
        if not self._ahead:
            return
        if not self._late:
            self._compare()
        elif self._context.parts.config.keeps_weights:
            self._kept = KeptWeights(model.transformer)

    def after_learning(self) -> None:
        """What is sampled beside the learner has arrived. Raises as `Learner.compare`."""
        if not self._late or not self._ahead:
            return
        if self._kept is not None:
            self._kept.put_back()
            self._kept = None
        self._compare()

    def _compare(self) -> None:
        queue = self._context.state.queue
        fresh = [(batch, self._fresh(batch)) for batch in queue]
        self.tokens = sum(sample.num_trained for _, samples in fresh for sample in samples)
        chosen = [sample for batch, samples in fresh for sample in self._chosen(batch, samples)]
        if not chosen:
            return
        with self._context.meter.timed("compare"), self._context.saver.broken_weights_end_the_run():
            self.compared = self._context.parts.learner.compare(chosen)

    def _fresh(self, batch: StepBatch) -> list[Sample]:
        """What the weights of this step have sampled: batches of older ones wait in the queue too."""
        samples = (sample for group in batch.groups for sample in group)
        return [sample for sample in samples if sample.weights_version == self._version and sample.num_trained]

    def _chosen(self, batch: StepBatch, samples: Sequence[Sample]) -> list[Sample]:
        if not samples:
            return []
        count, first = math.ceil(self._share * len(samples)), batch.groups[0][0].prompt_index
        seed = self._context.parts.config.seed
        return [samples[i] for i in drawn(range(len(samples)), count, seed, first)]

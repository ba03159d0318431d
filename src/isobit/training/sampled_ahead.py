"""A share of each batch that is sampled ahead of the learner, compared under the weights that
sampled it.

When such a batch is learned from, the weights have moved on, and a difference is learning, not
mismatch. So the learner computes the log-probabilities of `mismatch.share_ahead` of its completions
while the working weights are those that sampled: in one process before it learns; where a fleet
samples meanwhile, when the batch has arrived. Then the learner has learned, and its working weights
are still those of before, or are put back where a batch takes several updates. Which completions is
drawn from the run's seed and the batch's first prompt, so they are the same ones in one process, in
a fleet, at any number of ranks and after a resume. Where completions go on across updates, those
that a step leaves, whole or not, are sampled ahead too, and what is compared of them are the tokens
of this step. Nothing is changed, so no bit of a run depends
on it (tests/training/test_sampled_ahead.py). Left out: what a run does where bits differ
(`learning.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isobit.model.keeping import KeptWeights
from isobit.rl import Group, Sample
from isobit.rl.learner.agreement import Compared
from isobit.rl.learner.schedule import drawn
from isobit.training.context import RunContext


@dataclass(frozen=True, eq=False)
class AheadCompared:
    """The completions that were compared, and how many tokens could have been."""

    pairs: Sequence[Compared] = ()
    tokens: int = 0


class SampledAhead:
    """Compares a `share` of what is sampled `ahead` steps before it is learned from, or, with
    `partial`, of what a step leaves for later ones, chosen by `seed`. `late`: batches arrive when
    the learner has learned, and with `keeps_weights` the weights of before are kept until then.
    By default nothing is ahead."""

    def __init__(
        self,
        context: RunContext,
        *,
        share: float = 0.0,
        seed: int = 0,
        ahead: int = 0,
        partial: bool = False,
        late: bool = False,
        keeps_weights: bool = False,
    ) -> None:
        self._learner, self._state = context.trained.learner, context.state
        self._meter, self._saver = context.meter, context.saver
        self._share, self._seed = share, seed
        self._partial = partial
        self._ahead, self._late, self._keeps = ahead > 0 or partial, late, keeps_weights
        self._version = 0
        self._kept: KeptWeights | None = None

    def before_learning(self, took: dict[str, float]) -> AheadCompared:
        """Compare while the working weights are those that sample in this step; `took` gets the
        seconds. Raises as `Learner.compare`."""
        model = self._learner.model
        self._version = model.weights_version
        if not self._ahead:
            return AheadCompared()
        if not self._late:
            return self._compare(took)
        if self._keeps:
            self._kept = KeptWeights(model.transformer)
        return AheadCompared()

    def after_learning(self, took: dict[str, float]) -> AheadCompared | None:
        """Compare the samples that have arrived from a fleet; None without one. Raises as
        `Learner.compare`."""
        if not self._late or not self._ahead:
            return None
        if self._kept is not None:
            self._kept.put_back()
            self._kept = None
        return self._compare(took)

    def _compare(self, took: dict[str, float]) -> AheadCompared:
        fresh = [(groups, self._fresh(groups)) for groups in self._waiting()]
        tokens = sum(sample.num_trained for _, samples in fresh for sample in samples)
        chosen = [sample for groups, samples in fresh for sample in self._chosen(groups, samples)]
        if not chosen:
            return AheadCompared((), tokens)
        with self._meter.timed(took, "compare"), self._saver.broken_weights_end_the_run():
            return AheadCompared(self._learner.compare(chosen), tokens)

    def _waiting(self) -> Iterator[Sequence[Group]]:
        """Yield the groups that wait to be learned from."""
        state = self._state
        yield from (batch.groups for batch in state.queue)
        if self._partial:
            yield [*state.pending, *state.unfinished]

    def _fresh(self, groups: Sequence[Group]) -> list[Sample]:
        """Return the samples that the weights of this step drew: those of older ones wait too."""
        samples = (sample for group in groups for sample in group)
        return [
            sample.trained_from(sample.drawn[-1].start)
            for sample in samples
            if sample.weights_version == self._version and sample.num_trained
        ]

    def _chosen(self, groups: Sequence[Group], samples: Sequence[Sample]) -> list[Sample]:
        if not samples:
            return []
        count, first = math.ceil(self._share * len(samples)), groups[0][0].prompt_index
        return [samples[i] for i in drawn(range(len(samples)), count, self._seed, first)]

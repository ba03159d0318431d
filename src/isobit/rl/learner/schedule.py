"""How the samples of a rollout batch are cut into micro-batches: once for a step, as a value, for
all that is computed on them: the reference's log-probabilities, the old ones, and the gradient of
each update.

Micro-batches are a function of the samples and of the step, of nothing else, so they are the same
at any number of ranks and after a resume.

Samples whose advantage is exactly 0, or whose tokens the loss leaves out, teach nothing: no term of
the loss has a gradient, and no micro-batch of them alone needs a backward. Only whole micro-batches
are left out. Samples that share one with others stay: their rows decide with others the scales by
which FP8 WGrad quantizes 128 tokens, and a library may choose the order of a sum by its length.
What remains is computed as it would be, and what is left out would have added zeros
(docs/numerics.md, section 6; tests/rl/test_idle.py). Left out: the rows of a micro-batch
(`packing.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from isobit.rl.algorithm.loss import LOSSES
from isobit.rl.algorithm.objective import Objective
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.packing import MOST_KEYS

MicroBatches = Sequence[Sequence[int]]
"""Samples by index, micro-batch by micro-batch."""


@dataclass(frozen=True, eq=False)
class Update:
    """An optimizer step on these `samples`, by index. Those with a trained token are in
    `micro_batches`; `zero_advantage`: which of these have a gradient of 0; `measured`:
    micro-batches of a few of their samples, on which the mismatch is measured all the same."""

    samples: Sequence[int]
    micro_batches: MicroBatches
    zero_advantage: frozenset[int] = frozenset()
    measured: MicroBatches = ()

    @property
    def zero_advantage_samples(self) -> list[int]:
        return [i for number in sorted(self.zero_advantage) for i in self.micro_batches[number]]

    def dealt(self, gradient_sum_group: int) -> list[int | None]:
        """Return the micro-batches in the order in which ranks take them, without groups of
        `gradient_sum_group` whose gradient is 0. One of gradient 0 in another group keeps its
        place, which says what is added first."""
        numbers, size = range(len(self.micro_batches)), gradient_sum_group
        groups = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        groups_left = [group for group in groups if not self.zero_advantage.issuperset(group)]
        return [None if n in self.zero_advantage else n for group in groups_left for n in group]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A step's schedule: micro-batches of the samples whose `old` log-probabilities are computed,
    and its `updates`."""

    old: MicroBatches
    updates: Sequence[Update]


@dataclass(frozen=True)
class Cutting:
    """The rules by which batches are cut into micro-batches of at most `most_tokens`, those of a
    prompt counted once where completions `share_prompts`. `apart`: samples of zero advantage follow
    the others, in separate micro-batches; the mismatch is measured on `measured` of those that are
    left out, which `seed` and the step choose. `together` consecutive samples stay together: both
    answers of a pair."""

    most_tokens: int
    share_prompts: bool = False
    apart: bool = False
    measured: int = 0
    updates_per_batch: int = 1
    epochs: int = 1
    seed: int = 0
    together: int = 1

    def whole(self, samples: Sequence[Sample]) -> MicroBatches:
        """Return all samples, in their order."""
        spans = micro_batches(samples, self.most_tokens, self.share_prompts, self.together)
        return [list(span) for span in spans]

    def schedule(
        self,
        samples: Sequence[Sample],
        zero: Sequence[bool],
        step: int,
        old: Sequence[int] = (),
        old_zero: Sequence[bool] = (),
    ) -> Schedule:
        """Build a step's schedule. `zero[i]`: sample i has zero advantage. `old`: the samples whose
        old log-probabilities are wanted, apart from micro-batches that are `old_zero` throughout,
        but for a few."""
        wanted = self.old(samples, old, old_zero, step)
        minibatches_ = [
            minibatch
            for epoch in range(self.epochs)
            for minibatch in self._parts(len(samples), step, epoch)
        ]
        updates = [self._update(samples, minibatch, zero, step) for minibatch in minibatches_]
        return Schedule(wanted, updates)

    def old(
        self, samples: Sequence[Sample], old: Sequence[int], zero: Sequence[bool], step: int
    ) -> MicroBatches:
        """Return micro-batches of the samples `old`, without those of zero advantage throughout,
        but for some of these."""
        cut = self._cut(samples, old, zero)
        unneeded = without_teaching(cut, zero)
        left_out = [i for number in sorted(unneeded) for i in cut[number]]
        needed = [micro_batch for number, micro_batch in enumerate(cut) if number not in unneeded]
        return [*needed, *self._cut(samples, drawn(left_out, self.measured, self.seed, step), zero)]

    def _parts(self, count: int, step: int, epoch: int) -> list[list[int]]:
        minibatches_ = minibatches(count, self.updates_per_batch, self.seed, step, epoch)
        return [
            sorted(minibatch) if self.share_prompts else minibatch for minibatch in minibatches_
        ]  # a prompt's together

    def _update(
        self, samples: Sequence[Sample], part: Sequence[int], zero: Sequence[bool], step: int
    ) -> Update:
        trained = [i for i in part if samples[i].num_trained]
        cut = self._cut(samples, trained, zero)
        update = Update(part, cut, without_teaching(cut, zero))
        chosen = drawn(update.zero_advantage_samples, self.measured, self.seed, step)
        return Update(part, cut, update.zero_advantage, self._cut(samples, chosen, zero))

    def _cut(
        self, samples: Sequence[Sample], chosen: Sequence[int], zero: Sequence[bool]
    ) -> MicroBatches:
        """Cut the samples `chosen` into micro-batches, in their order."""
        runs = [chosen]
        if self.apart:
            runs = [[i for i in chosen if not zero[i]], [i for i in chosen if zero[i]]]
        return [
            [run[i] for i in span]
            for run in runs
            for span in micro_batches(
                [samples[i] for i in run], self.most_tokens, self.share_prompts, self.together
            )
        ]


def zero_advantage_samples(
    objective: Objective,
    advantages: Sequence[Tensor],
    masked: Sequence[bool],
    observed: Sequence[int],
) -> list[bool]:
    """Return which samples teach nothing, given the advantages [trained tokens] of each, which the
    loss leaves out, and how many tokens of each are learned as `observed`. None where another term
    of the loss needs them: a KL penalty, an entropy bonus, a divergence, or what a user's own loss
    may add, which leave out what is masked; a load-balancing loss, which does not."""
    if objective.router_aux_coefficient > 0:
        return [False] * len(advantages)
    penalized = objective.kl_coefficient > 0 and not objective.kl_in_reward
    loss = LOSSES.get(objective.loss)
    if penalized or objective.pays_entropy or loss is None or loss.factor is None:
        return list(masked)
    return [
        out or not (written or bool(advantage.any()))
        for advantage, out, written in zip(advantages, masked, observed, strict=True)
    ]


def without_teaching(micro: Sequence[Sequence[int]], zero: Sequence[bool]) -> frozenset[int]:
    """Return which of the micro-batches have samples of zero advantage alone."""
    return frozenset(
        number for number, indices in enumerate(micro) if all(zero[i] for i in indices)
    )


def drawn(candidates: Sequence[int], count: int, seed: int, step: int) -> list[int]:
    """Return at most `count` of the candidates, by raw Philox numbers of (seed, step), in their
    order."""
    key = np.random.SeedSequence([seed, step, 0x1D1E]).generate_state(2, np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(len(candidates)), kind="stable")
    return [candidates[i] for i in sorted(order[:count].tolist())]


def micro_batches(
    samples: Sequence[Sample], budget: int, share_prompts: bool = False, together: int = 1
) -> Iterator[range]:
    """Yield consecutive ranges of samples of at most `budget` tokens each, those of a shared
    prompt counted once; a longer sample stands alone. They begin at multiples of `together`."""
    start, rows, keys, prompts = 0, 0, 0, set[tuple[int, ...]]()
    for index in range(0, len(samples), together):
        unit = samples[index : index + together]
        length = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in unit)
        extra = _own_rows(unit, prompts) if share_prompts else length
        if index > start and (rows + extra > budget or keys + length > MOST_KEYS * budget):
            yield range(start, index)
            start, rows, keys = index, 0, 0
            prompts.clear()
            extra = _own_rows(unit, prompts) if share_prompts else length
        rows, keys = rows + extra, keys + length
        if share_prompts:
            prompts.update(sample.prompt_ids for sample in unit)
    if start < len(samples):
        yield range(start, len(samples))


def _own_rows(samples: Sequence[Sample], prompts: set[tuple[int, ...]]) -> int:
    """Count the tokens of samples, those of known prompts once."""
    new = {sample.prompt_ids for sample in samples} - prompts
    return sum(map(len, new)) + sum(len(sample.completion_ids) for sample in samples)


def minibatches(count: int, updates: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Split `count` samples into `updates` parts of nearly equal size.

    One part keeps the order; several are shuffled by (seed, step, epoch), so that a resumed run
    repeats them. The order is that of raw Philox numbers, which numpy keeps over its versions,
    unlike its `permutation`.
    """
    if updates == 1:
        return [list(range(count))]
    key = np.random.SeedSequence([seed, step, epoch]).generate_state(2, np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
    return [
        minibatch.tolist() for minibatch in np.array_split(order, updates) if minibatch.size > 0
    ]

"""How the samples of a rollout batch are cut into micro-batches: once for a step, as a value, for
all that is computed on them: the reference's log-probabilities, the old ones, and the gradient of
each update.

Micro-batches are a function of the samples and of the step, of nothing else, so they are the same
at any number of ranks and after a resume. Left out: the rows of a micro-batch (`packing.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isobit.rl.learner.packing import MOST_KEYS, Trainable
from isobit.rl.learner.zero_advantage import drawn, without_teaching

MicroBatches = Sequence[Sequence[int]]
"""Samples by index, micro-batch by micro-batch."""


@dataclass(frozen=True, eq=False)
class Update:
    """An optimizer step on the samples `part`. Those with a trained token are in `micro_batches`;
    `zero_advantage`: which of these have a gradient of 0; `measured`: micro-batches of a few of
    their samples, on which the mismatch is measured all the same."""

    part: Sequence[int]
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
        kept = [group for group in groups if not self.zero_advantage.issuperset(group)]
        return [None if n in self.zero_advantage else n for group in kept for n in group]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A step's schedule: micro-batches of the `whole` batch, of the samples whose `old`
    log-probabilities are computed, and of its `updates`."""

    whole: MicroBatches
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

    def whole(self, samples: Sequence[Trainable]) -> MicroBatches:
        """Return all samples, in their order."""
        spans = micro_batches(samples, self.most_tokens, self.share_prompts, self.together)
        return [list(span) for span in spans]

    def schedule(
        self,
        samples: Sequence[Trainable],
        zero: Sequence[bool],
        step: int,
        old: Sequence[int] = (),
        old_zero: Sequence[bool] = (),
    ) -> Schedule:
        """Build a step's schedule. `zero[i]`: sample i has zero advantage. `old`: the samples whose
        old log-probabilities are wanted, apart from micro-batches that are `old_zero` throughout,
        but for a few."""
        wanted = self.old(samples, old, old_zero, step)
        parts = [
            part for epoch in range(self.epochs) for part in self._parts(len(samples), step, epoch)
        ]
        updates = [self._update(samples, part, zero, step) for part in parts]
        return Schedule(self.whole(samples), wanted, updates)

    def old(
        self, samples: Sequence[Trainable], old: Sequence[int], zero: Sequence[bool], step: int
    ) -> MicroBatches:
        """Return micro-batches of the samples `old`, without those of zero advantage throughout,
        but for some of these."""
        cut = self._cut(samples, old, zero)
        unneeded = without_teaching(cut, zero)
        left_out = [i for number in sorted(unneeded) for i in cut[number]]
        needed = [part for number, part in enumerate(cut) if number not in unneeded]
        return [*needed, *self._cut(samples, drawn(left_out, self.measured, self.seed, step), zero)]

    def _parts(self, count: int, step: int, epoch: int) -> list[list[int]]:
        parts = minibatches(count, self.updates_per_batch, self.seed, step, epoch)
        return [
            sorted(part) if self.share_prompts else part for part in parts
        ]  # a prompt's together

    def _update(
        self, samples: Sequence[Trainable], part: Sequence[int], zero: Sequence[bool], step: int
    ) -> Update:
        trained = [i for i in part if _is_trained(samples[i])]
        cut = self._cut(samples, trained, zero)
        update = Update(part, cut, without_teaching(cut, zero))
        chosen = drawn(update.zero_advantage_samples, self.measured, self.seed, step)
        return Update(part, cut, update.zero_advantage, self._cut(samples, chosen, zero))

    def _cut(
        self, samples: Sequence[Trainable], chosen: Sequence[int], zero: Sequence[bool]
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


def _is_trained(sample: Trainable) -> bool:
    """Return whether any of its tokens is."""
    mask = sample.completion_mask
    return bool(sample.completion_ids) if mask is None else any(mask)


def micro_batches(
    samples: Sequence[Trainable], budget: int, share_prompts: bool = False, together: int = 1
) -> Iterator[range]:
    """Consecutive ranges of samples of at most `budget` tokens each, those of a shared prompt
    counted once; a longer sample stands alone. They begin at multiples of `together`."""
    start, rows, keys, prompts = 0, 0, 0, set[tuple[int, ...]]()
    for index in range(0, len(samples), together):
        unit = samples[index : index + together]
        length = sum(len(each.prompt_ids) + len(each.completion_ids) for each in unit)
        own = _own_rows(unit, prompts) if share_prompts else length
        if index > start and (rows + own > budget or keys + length > MOST_KEYS * budget):
            yield range(start, index)
            start, rows, keys = index, 0, 0
            prompts.clear()
            own = _own_rows(unit, prompts) if share_prompts else length
        rows, keys = rows + own, keys + length
        if share_prompts:
            prompts.update(each.prompt_ids for each in unit)
    if start < len(samples):
        yield range(start, len(samples))


def _own_rows(samples: Sequence[Trainable], prompts: set[tuple[int, ...]]) -> int:
    """Tokens of samples, those of prompts that are there counted once."""
    new = {each.prompt_ids for each in samples} - prompts
    return sum(map(len, new)) + sum(len(each.completion_ids) for each in samples)


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
    return [part.tolist() for part in np.array_split(order, updates) if part.size > 0]

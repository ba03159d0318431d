"""Samples to packed rows, without padding: what the learner's forward takes.

A sequence is prompt and completion without its last token, since nothing is predicted from that. Row i of `targets` is
predicted from row `rows[i]`; given tokens are context and no targets. Deterministic, in the order
of the samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from isobit.kernels import Layout


class Trainable(Protocol):
    """What packing needs of a sample."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def completion_ids(self) -> tuple[int, ...]: ...

    @property
    def completion_mask(self) -> tuple[bool, ...] | None: ...


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """tokens [T] int64 with their layout; for each of C trained tokens its row, its id and its sequence [C] int64."""

    tokens: Tensor
    layout: Layout
    rows: Tensor
    targets: Tensor
    sequence: Tensor

    @property
    def num_targets(self) -> int:
        return self.targets.shape[0]


def pack(samples: Sequence[Trainable]) -> PackedBatch:
    """Pack samples with a prompt of at least one token; empty completions contribute no rows to predict."""
    prompts = np.array([len(s.prompt_ids) for s in samples], np.int64)
    completions = np.array([len(s.completion_ids) for s in samples], np.int64)
    assert bool((prompts > 0).all()), "every sample needs a prompt token to predict from"
    lengths = prompts + completions - (completions > 0)
    tokens = [t for s in samples for t in (*s.prompt_ids, *s.completion_ids[:-1])]
    targets = np.array([t for s in samples for t in s.completion_ids], np.int64)
    starts = np.cumsum(lengths) - lengths
    sequence = np.repeat(np.arange(len(samples)), completions)
    offset = np.arange(len(targets)) - (np.cumsum(completions) - completions)[sequence]
    rows = (starts + prompts - 1)[sequence] + offset
    masks = [s.completion_mask or (True,) * len(s.completion_ids) for s in samples]
    trained = np.array([trained for mask in masks for trained in mask], bool)
    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        layout=Layout.packed(lengths.tolist()),
        rows=torch.from_numpy(rows[trained]),
        targets=torch.from_numpy(targets[trained]),
        sequence=torch.from_numpy(sequence[trained]),
    )


def micro_batches(samples: Sequence[Trainable], budget: int) -> Iterator[range]:
    """Consecutive ranges of samples of at most `budget` tokens each; a longer sample stands alone."""
    start, tokens = 0, 0
    for index, sample in enumerate(samples):
        length = len(sample.prompt_ids) + len(sample.completion_ids)
        if index > start and tokens + length > budget:
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    if start < len(samples):
        yield range(start, len(samples))


def minibatches(count: int, updates: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Split `count` samples into `updates` parts of nearly equal size.

    One part keeps the order; several are shuffled by (seed, step, epoch), so that a resumed run repeats them. The
    order is that of raw Philox numbers, which numpy keeps over its versions, unlike its `permutation`.
    """
    if updates == 1:
        return [list(range(count))]
    key = np.random.SeedSequence([seed, step, epoch]).generate_state(2, np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
    return [part.tolist() for part in np.array_split(order, updates) if part.size > 0]

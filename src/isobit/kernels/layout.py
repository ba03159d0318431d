"""Rows of sequences, where their keys and values are (`Layout`), and rows that several share
(`Copies`).

A *row* is one token of one sequence. Rows of a sequence stand together and in order. A *slot* is
the place of one token's key and value: `page * page_size + offset`. Rollout and learner describe
their work in these terms. Left out: who owns the pages (`isobit.engine`), which rows sequences
share (`isobit.rl.learner.packing`), and the gradient of copying
(`isobit.model.forward.gather_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Adder(Protocol):
    """The part of `Ops` that `Copies.added` needs."""

    def sum_of_rows(self, x: Tensor, place: Tensor, gates: Tensor | None) -> Tensor: ...


class Several(NamedTuple):
    """The rows [P] int64 that have up to k copies, at `place` [P, k] int64, of which `present`
    [P, k] float32 are 1; the rest, 0, fill up."""

    rows: Tensor
    place: Tensor
    present: Tensor


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of `count` rows: copy r is of row `index[r]`, [R] int64, in any order.

    For the way back: the rows `taken` [U] int64 have copies, the first at `first` [U]. Those with
    more are in `several`, by how many they have, up to powers of two, so that one row with many
    copies costs no other anything.
    """

    index: Tensor
    count: int
    taken: Tensor
    first: Tensor
    several: tuple["Several", ...]

    @staticmethod
    def of(index: Tensor, count: int) -> "Copies":
        """Return the copies of rows `index` [R] int64 on the CPU."""
        order = torch.argsort(index, stable=True)
        taken, copies = torch.unique_consecutive(index[order], return_counts=True)
        start, widths = copies.cumsum(0) - copies, _power_of_two(copies)
        several = []
        for width in torch.unique(widths[copies > 1]).tolist():
            many = widths == width
            slot = torch.arange(width).unsqueeze(0)  # a kernel is compiled for each width
            present = slot < copies[many].unsqueeze(1)
            sources = order[start[many].unsqueeze(1) + torch.where(present, slot, 0)]
            several.append(Several(taken[many], sources, present.float()))
        return Copies(index, count, taken, order[start], tuple(several))

    def to(self, device: torch.device) -> "Copies":
        """Return the same with its tensors on `device`."""
        index, taken, first = (
            tensor.to(device, non_blocking=True) for tensor in (self.index, self.taken, self.first)
        )
        several = tuple(
            Several(*(tensor.to(device, non_blocking=True) for tensor in group))
            for group in self.several
        )
        return Copies(index, self.count, taken, first, several)

    def added(self, x: Tensor, ops: Adder) -> Tensor:
        """Return for each row the sum of its copies' x [R, ...], added in float32 in their order
        and rounded once to x's dtype: [count, ...]; 0 where a row has none."""
        flat = x.reshape(len(x), -1)
        sums = flat.new_zeros(self.count, flat.shape[1])
        sums[self.taken] = flat[self.first]
        for rows, copies, present in self.several:
            sums[rows] = ops.sum_of_rows(flat, copies, present)
        return sums.view(self.count, *x.shape[1:])


def _power_of_two(numbers: Tensor) -> Tensor:
    """Return the least power of two that is not below each of the positive numbers."""
    return 1 << torch.ceil(torch.log2(numbers.double())).long()


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys that sequences see, one sequence after the other, for a backward where rows are keys
    of several: those of sequence s are `start[s]` to `start[s + 1]`, [S+1] int64, and each is a
    copy of the row that stored it."""

    start: Tensor
    copies: Copies

    def to(self, device: torch.device) -> "Keys":
        """Return the same with its tensors on `device`."""
        return Keys(self.start.to(device, non_blocking=True), self.copies.to(device))


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of a batch: T rows of S sequences over P pages each.

    row_start [S+1] int64: rows of sequence s are row_start[s] to row_start[s+1]. context [S] int64:
    position of its first row, that is how many keys are stored before. page_table [S, P] int32.
    positions, slots [T] int64: of every row. max_rows, max_keys: the most rows of a sequence, and
    the most keys that one of its rows sees. num_slots: slots that a store must have to hold every
    page of the table. These three are on the host, so reading them never waits for a GPU. `keys`:
    of a learner's sequences that share rows; None where each has its own. `turns` [T] or [T, 3]:
    the rows of rotary tables that turn the rows, if these are not the positions; three where
    positions have axes, of which a forward makes a table of one row each.
    """

    row_start: Tensor
    context: Tensor
    page_table: Tensor
    page_size: int
    positions: Tensor
    slots: Tensor
    max_rows: int
    max_keys: int
    num_slots: int
    keys: Keys | None = None
    turns: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    def to(self, device: torch.device) -> "Layout":
        """Return the same with its tensors on `device`; itself, if they are there."""
        if self.positions.device == device:
            return self
        names = ("row_start", "context", "page_table", "positions", "slots", "turns")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved, keys=None if self.keys is None else self.keys.to(device))

    @property
    def rotated(self) -> Tensor:
        """The row of rotary tables that turns each row, [T] int64."""
        return self.positions if self.turns is None else self.turns

    @property
    def key_start(self) -> Tensor:
        """The first key of each sequence among those of all, [S+1] int64; without `keys` they are
        its rows."""
        return self.row_start if self.keys is None else self.keys.start

    @property
    def key_slots(self) -> Tensor:
        """The slots of all sequences' keys [K] int64, for a backward."""
        return self.slots if self.keys is None else self.slots[self.keys.copies.index]

    @staticmethod
    def build(
        lengths: Sequence[int], contexts: Sequence[int], page_table: Tensor, page_size: int
    ) -> "Layout":
        """Build the layout of sequences: `lengths[s]` new rows after `contexts[s]` stored ones, in
        pages `page_table` [S, P]."""
        length = torch.tensor(lengths, dtype=torch.int64)
        context = torch.tensor(contexts, dtype=torch.int64)
        row_start = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(length, 0, out=row_start[1:])
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), length)
        positions = torch.arange(int(row_start[-1])) - row_start[sequence] + context[sequence]
        pages = page_table.long()[sequence, positions // page_size]
        slots = pages * page_size + positions % page_size
        max_keys = max((rows + cached for rows, cached in zip(lengths, contexts)), default=0)
        num_slots = (int(page_table.max()) + 1) * page_size if page_table.numel() else 0
        sizes = (max(lengths, default=0), max_keys, num_slots)
        return Layout(row_start, context, page_table.int(), page_size, positions, slots, *sizes)

    @staticmethod
    def packed(lengths: Sequence[int], page_size: int = 16) -> "Layout":
        """Return the learner's layout: whole sequences one after the other, each in its own
        contiguous pages."""
        pages = [-(-length // page_size) for length in lengths]
        first = torch.cumsum(torch.tensor([0, *pages[:-1]]), 0)
        table = first.unsqueeze(1) + torch.arange(max(pages, default=0)).unsqueeze(0)
        table = torch.where(
            torch.arange(table.shape[1]) < torch.tensor(pages).unsqueeze(1), table, 0
        )
        return Layout.build(lengths, [0] * len(lengths), table.int(), page_size)

"""Copies of rows: which row each is of, and how what the copies give is added again.

Left out: the gradient of copying (`isobit.model.forward.gather_rows`), and which rows several
sequences share (`isobit.rl.learner.packing`).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Adder(Protocol):
    """What `Copies.added` needs of `Ops`."""

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
        """Of rows `index` [R] int64 on the CPU."""
        order = torch.argsort(index, stable=True)
        taken, copies = torch.unique_consecutive(index[order], return_counts=True)
        start, widths = copies.cumsum(0) - copies, _power_of_two(copies)
        several = []
        for width in torch.unique(widths[copies > 1]).tolist():
            many = widths == width
            slot = torch.arange(width).unsqueeze(0)  # a kernel is compiled for each width
            present = slot < copies[many].unsqueeze(1)
            place = order[start[many].unsqueeze(1) + torch.where(present, slot, 0)]
            several.append(Several(taken[many], place, present.float()))
        return Copies(index, count, taken, order[start], tuple(several))

    def to(self, device: torch.device) -> "Copies":
        """The same with its tensors on `device`."""
        index, taken, first = (
            tensor.to(device, non_blocking=True) for tensor in (self.index, self.taken, self.first)
        )
        several = tuple(
            Several(*(tensor.to(device, non_blocking=True) for tensor in each))
            for each in self.several
        )
        return Copies(index, self.count, taken, first, several)

    def added(self, x: Tensor, ops: Adder) -> Tensor:
        """Of each row the sum of its copies' x [R, ...], added in float32 in their order and
        rounded once to x's dtype: [count, ...]; 0 where a row has none."""
        flat = x.reshape(len(x), -1)
        found = flat.new_zeros(self.count, flat.shape[1])
        found[self.taken] = flat[self.first]
        for rows, place, present in self.several:
            found[rows] = ops.sum_of_rows(flat, place, present)
        return found.view(self.count, *x.shape[1:])


def _power_of_two(numbers: Tensor) -> Tensor:
    """The least power of two that is not below each of the positive numbers."""
    return 1 << torch.ceil(torch.log2(numbers.double())).long()

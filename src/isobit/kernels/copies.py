"""Copies of rows: which row each is of, and how what the copies give is added again.

Left out: the gradient of copying (`isobit.model.forward.gather_rows`), and which rows several
sequences share (`isobit.rl.learner.packing`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Adder(Protocol):
    """What `Copies.added` needs of `Ops`."""

    def sum_of_rows(self, x: Tensor, place: Tensor, gates: Tensor | None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of `count` rows: copy r is of row `index[r]`, [R] int64, in any order.

    For the way back: the rows `taken` [U] int64 have copies, the first at `first` [U]; the rows
    `several` [P] of them have more, at `place` [P, k], of which `present` [P, k] float32 are 1; the
    rest, 0, fill up.
    """

    index: Tensor
    count: int
    taken: Tensor
    first: Tensor
    several: Tensor
    place: Tensor
    present: Tensor

    @staticmethod
    def of(index: Tensor, count: int) -> "Copies":
        """Of rows `index` [R] int64 on the CPU."""
        order = torch.argsort(index, stable=True)
        taken, copies = torch.unique_consecutive(index[order], return_counts=True)
        start, many = copies.cumsum(0) - copies, copies > 1
        most = int(copies.max()) if len(copies) else 1
        slot = torch.arange(1 << (most - 1).bit_length()).unsqueeze(
            0
        )  # a kernel is compiled for each width
        present = slot < copies[many].unsqueeze(1)
        place = order[start[many].unsqueeze(1) + torch.where(present, slot, 0)]
        return Copies(index, count, taken, order[start], taken[many], place, present.float())

    def to(self, device: torch.device) -> "Copies":
        """The same with its tensors on `device`."""
        tensors = (self.taken, self.first, self.several, self.place, self.present)
        index, *others = (tensor.to(device, non_blocking=True) for tensor in (self.index, *tensors))
        return Copies(index, self.count, *others)

    def added(self, x: Tensor, ops: Adder) -> Tensor:
        """Of each row the sum of its copies' x [R, ...], added in float32 in their order and
        rounded once to x's dtype: [count, ...]; 0 where a row has none."""
        flat = x.reshape(len(x), -1)
        found = flat.new_zeros(self.count, flat.shape[1])
        found[self.taken] = flat[self.first]
        if len(self.several):
            found[self.several] = ops.sum_of_rows(flat, self.place, self.present)
        return found.view(self.count, *x.shape[1:])

"""A layer's experts that ranks hold together: each has some whole experts, or some rows of each, as
the layout says.

Whole experts: a rank computes the rows that its own serve, and results travel for every token and
slot, so that each rank adds a token's in the order of its slots, as one rank does. By rows: codes
travel before `down`, as of an MLP, and the columns of the sum behind it. Left out: which it is
(`distributed/layout.py`).
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from isobit.kernels import Ops
from isobit.kernels.backends.rows import RowOps
from isobit.model.forward.experts import results_of
from isobit.model.weights.layout import Mixture


@dataclass(frozen=True, eq=False)
class ExpertsOfRanks:
    """The number of experts of each rank, or the columns of their result that each has, if it has
    rows of all experts."""

    counts: tuple[int, ...]
    result: tuple[int, ...] | None

    def through(self, x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops) -> Tensor:
        """Compute `through_experts` of rows that are those of every rank: its bits."""
        over = cast(RowOps, ops)
        if self.result is not None:
            rows, position, offsets = ops.by_expert(chosen, len(layer.experts))
            down = results_of(x, rows, offsets, layer, ops).down
            return over.side_by_side(ops.sum_of_rows(down, position, gates), self.result)
        rows, position, offsets = ops.by_expert(chosen, sum(self.counts))
        ends = list(accumulate(self.counts, initial=0))
        rank, bounds = over.ranks.rank, offsets[ends].tolist()
        (first, last), (lo, hi) = ends[rank : rank + 2], bounds[rank : rank + 2]
        results = x.new_empty(0, x.shape[1])
        if hi > lo:
            results = results_of(x, rows[lo:hi], offsets[first : last + 1] - lo, layer, ops).down
        sizes = [(stop - start) * x.shape[1] for start, stop in pairwise(bounds)]
        down = torch.cat(over.gathered(results, sizes)).view(-1, x.shape[1])
        return ops.sum_of_rows(down, position, gates)

"""Adapters of weights that ranks hold together: every rank has A whole, and multiplies by the rows of
B that belong to its rows of the weight.

Where every rank needs the whole result, it is what travels, with what adapters add, rounded.
Left out: their products (`model/adapters/low_rank.py`, `kernels/low_rank/experts.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from isobit.distributed.shards import Rows
from isobit.kernels import Divided, Operand, Ops
from isobit.kernels.backends.rows import RowOps
from isobit.model.adapters import low_rank
from isobit.model.weights.stored import LowRank, Weight


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """The product of a weight with adapters of which each rank has rows; `local` is the weight as a
    product of the rank's rows takes it."""

    local: Weight

    @staticmethod
    def of(weight: Weight, prepared: Divided) -> Weight:
        """Return a weight whose product this is."""
        rows = replace(weight, prepared=replace(prepared, operand=None, result=None))
        return replace(weight, several=JoinedRows(rows))

    def product(self, x: Operand, weight: Weight, ops: Ops, dtype: torch.dtype) -> Tensor:
        over, divided = cast(RowOps, ops), cast(Divided, weight.prepared)
        y, _ = low_rank.product(over.operand(x, divided), self.local, ops, dtype)
        return over.result(y, divided)


def own_rows_of(low: LowRank, ranges: Sequence[Rows]) -> Iterator[tuple[Rows, int, int]]:
    """Yield (rows of B, the place `lo` to `hi` of these among a rank's rows) for each range of a
    weight's rows in which the factors have any."""
    start = 0
    for lo, hi in ranges:
        first, last = max(lo, low.lo), min(hi, low.hi)
        if first < last:
            yield (first - low.lo, last - low.lo), start + first - lo, start + last - lo
        start += hi - lo

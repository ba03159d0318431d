"""The product with a weight, plus the low-rank products of adapters, each on its own rows.

For factors A [r, K] and B [hi - lo, r] of rows `lo` to `hi` of a weight, of a row x [K]:

    total = W · x + bias,  total[lo:hi] += scale · (B · u),  u = round(A · x),  y = round(total)

The products are `Ops.product`'s, to float32 and of A to x's type; times the scale and the sum are
float32 operations, one after the other. So a row's bits are those that it has where its adapter is
the only one. Left out: gradients (`model/adapters/low_rank.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from isobit.kernels.matrices import Operand, Prepared, plain
from isobit.kernels.ops import Ops


class Part(NamedTuple):
    """Factors a [r, K] and b [hi - lo, r] of rows `lo` to `hi` of a weight."""

    a: Prepared
    b: Prepared
    lo: int
    hi: int


@dataclass(frozen=True, eq=False)
class Factors:
    """An adapter's factors of a weight, as `Ops.prepare_factors` returned them; a backend may have
    its own class."""

    parts: tuple[Part, ...]
    scale: float

    @property
    def address(self) -> int:
        """The address of a struct by which `Ops.adapted_product` takes them too; 0 without one."""
        return 0


def prepare_factors(
    ops: Ops, parts: Sequence[tuple[Tensor, Tensor, int, int]], scale: float
) -> Factors:
    return Factors(
        tuple(Part(ops.prepare(a), ops.prepare(b), lo, hi) for a, b, lo, hi in parts), scale
    )


def add_part(ops: Ops, total: Tensor, x: Tensor, part: Part, scale: float) -> Tensor:
    """Add to `total` [T, N] float32 what factors make of x [T, K]; u [T, r] in x's type."""
    u = ops.product(x, part.a, None, x.dtype)
    delta = ops.product(u, part.b, None, torch.float32)
    # two operations: one that fuses them would round once
    total[:, part.lo : part.hi] += delta.mul_(scale)
    return u


def adapted_product(
    ops: Ops,
    x: Operand,
    weight: Prepared,
    bias: Tensor | None,
    adapters: Sequence[Factors] | Tensor,
    rows: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `Ops.adapted_product`, of factors that have no address."""
    assert not isinstance(adapters, Tensor)
    total = ops.product(x, weight, bias, torch.float32)
    return ops.add_low_rank(total, x, adapters, rows, offsets, dtype)


def add_low_rank(
    ops: Ops,
    total: Tensor,
    x: Operand,
    adapters: Sequence[Factors],
    rows: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    values = plain(x, dtype)
    for factors, (start, stop) in zip(adapters, pairwise(offsets.tolist())):
        index = rows[start:stop]
        sums, inputs = total[index], values[index]
        for block in factors.parts:
            add_part(ops, sums, inputs, block, factors.scale)
        total[index] = sums
    return total.to(dtype)

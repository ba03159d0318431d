"""Adapters of low rank on a layer's experts: what every expert's factors add to the product of its
rows.

For factors A_e [r, K] and B_e [hi - lo, r] of rows `lo` to `hi` of the weight W_e [N, K] of expert
e, and a row x [K] that it serves:

    y = round(W_e·x + bias + scale · (B_e · u)),  u = round(A_e · x)

All products are `Ops.grouped_product`s, so nothing here depends on a backend, a row's bits depend
on that row and its expert alone, and they are those of `definition.py` where a grouped product has
those of a product (tests/model/test_expert_adapters.py). The backward, of dy and the rows of expert
e:

    du = round(scale · (dy·B_e)),  dx += du·A_e,  dA_e = duᵀ·x,  dB_e = scale · (dyᵀ·u)

Left out: several adapters at once, each on its own rows, which `Ops.add_low_rank` adds
(`model/adapters/multi_lora.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.matrices import Operand, Stacked, plain
from isobit.kernels.ops import Ops


@dataclass(frozen=True, eq=False)
class ExpertFactors:
    """Factors a [E, r, K] and b [E, hi - lo, r] of rows `lo` to `hi` of the weights of E experts."""

    a: Stacked
    b: Stacked
    lo: int
    hi: int
    scale: float


def product(
    ops: Ops,
    x: Operand,
    weights: Stacked,
    factors: Sequence[ExpertFactors],
    offsets: Tensor,
    out: torch.dtype,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return (y [R, N] in `out`, the u [R, r] of each of the factors); x, offsets and rows as of
    `Ops.grouped_product`."""
    if not factors:
        return ops.grouped_product(x, weights, offsets, out, rows), []
    total = ops.grouped_product(x, weights, offsets, torch.float32, rows)
    values, us = plain(x, out), list[Tensor]()
    for one in factors:
        u = ops.grouped_product(values, one.a, offsets, out, rows)
        delta = ops.grouped_product(u, one.b, offsets, torch.float32)
        # two operations: one that fuses them would round once
        total[:, one.lo : one.hi] += delta.mul_(one.scale)
        us.append(u)
    return total.to(out), us


def backward(
    ops: Ops,
    dy: Tensor,
    x: Operand,
    us: Sequence[Tensor],
    factors: Sequence[ExpertFactors],
    offsets: Tensor,
    name: str,
    needs_input: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return (what the factors add to dx [R, K], float32, or None; of each of the factors dA of
    every expert and then dB of every expert, float32, None where an expert has no rows), of dy [R,
    N] and the rows x [R, K] as they were multiplied."""
    values, dx, found = plain(x, dy.dtype), None, list[Tensor | None]()
    for one, u in zip(factors, us):
        part = dy[:, one.lo : one.hi].contiguous()
        wide = ops.grouped_product(part, one.b.transpose(), offsets, torch.float32)
        du = wide.mul_(one.scale).to(dy.dtype)
        found += ops.grouped_weight_gradient(du, values, offsets, None, name)
        of_b = ops.grouped_weight_gradient(part, u, offsets, None, name)
        found += [None if db is None else db.mul_(one.scale) for db in of_b]
        if needs_input:
            more = ops.grouped_product(du, one.a.transpose(), offsets, torch.float32)
            dx = more if dx is None else dx.add_(more)
    return dx, found

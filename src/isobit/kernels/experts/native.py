"""Products of experts in C++: one call for all of them, where they are in the order of
`bitwise`."""

import torch
from torch import Tensor

from isobit.kernels.experts import definition
from isobit.kernels.matrices import Operand, Stacked, picked
from isobit.kernels.native.base import NativeBase
from isobit.kernels.product.ordered import computes


def grouped_product(
    ops: NativeBase,
    a: Operand,
    weights: Stacked,
    offsets: Tensor,
    out: torch.dtype,
    rows: Tensor | None = None,
) -> Tensor:
    a = a if rows is None else picked(a, rows)
    bounds, first = offsets.tolist(), weights.experts[0]
    if ops.ordered is None or not bounds[-1] or not computes(a, first):
        return definition.grouped_product(ops, a, weights, offsets, out)
    return ops.ordered.grouped_product(a, weights, bounds, out)

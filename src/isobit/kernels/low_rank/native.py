"""What adapters of low rank add to a product, in C++: one call for all of them, where their
products are in the order of `bitwise`. Elsewhere, and of factors in float32, the definition."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.low_rank import definition
from isobit.kernels.low_rank.definition import Factors, Part
from isobit.kernels.matrices import Operand
from isobit.kernels.native.base import NativeBase
from isobit.kernels.quantize.native import dequantize
from isobit.precision import QTensor


@dataclass(frozen=True, eq=False)
class PackedFactors(Factors):
    """Factors that are packed together: `address` is that of their struct in C++, and `kept` all
    that it points to."""

    address: int
    kept: tuple[object, ...]


def prepare_factors(
    ops: NativeBase, parts: Sequence[tuple[Tensor, Tensor, int, int]], scale: float
) -> Factors:
    """As `Ops.prepare_factors`."""
    if ops.ordered is None or any(a.dtype != torch.bfloat16 for a, *_ in parts):
        return definition.prepare_factors(ops, parts, scale)
    struct, kept = ops.ordered.low_rank_factors(parts, scale)
    plain = tuple(Part(*part) for part in parts)
    return PackedFactors(plain, scale, ctypes.addressof(struct), (struct, kept))


def add_low_rank(
    ops: NativeBase,
    total: Tensor,
    x: Operand,
    adapters: Sequence[Factors],
    rows: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> None:
    """As `Ops.add_low_rank`."""
    packed = [one.address for one in adapters if isinstance(one, PackedFactors)]
    if ops.ordered is None or len(packed) < len(adapters):
        definition.add_low_rank(ops, total, x, adapters, rows, offsets, dtype)
    elif packed:
        values = dequantize(ops, x) if isinstance(x, QTensor) else x
        ops.ordered.add_low_rank(total, values, packed, rows, offsets)

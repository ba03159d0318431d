"""The product with a weight plus low-rank adapters in C++: one call for all of them where the
adapters' products are summed in the order of `bitwise`; the weight's product is part of the call if
it is, too. Other orders and float32 factors are left to the definition."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.low_rank import definition
from isobit.kernels.low_rank.definition import Factors, Part
from isobit.kernels.matrices import Operand, Prepared, weight_of
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.interface import LowRankFactorsArguments
from isobit.kernels.product.ordered import computes
from isobit.kernels.quantize.native import dequantize
from isobit.precision import QTensor


@dataclass(frozen=True, eq=False)
class PackedFactors(Factors):
    """Factors that are packed together: their struct in C++, and `kept`, all that it points to."""

    struct: LowRankFactorsArguments
    kept: tuple[object, ...]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


def prepare_factors(
    ops: NativeBase, parts: Sequence[tuple[Tensor, Tensor, int, int]], scale: float
) -> Factors:
    if ops.ordered is None or any(a.dtype != torch.bfloat16 for a, *_ in parts):
        return definition.prepare_factors(ops, parts, scale)
    struct, memory = ops.ordered.low_rank_factors(parts, scale)
    plain = tuple(Part(*block) for block in parts)
    return PackedFactors(plain, scale, struct, memory)


def adapted_product(
    ops: NativeBase,
    x: Operand,
    weight: Prepared,
    bias: Tensor | None,
    adapters: Sequence[Factors] | Tensor,
    rows: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    packed = adapters if isinstance(adapters, Tensor) else _packed(ops, adapters, dtype)
    if packed is None or not computes(x, weight_of(weight)):
        arguments = (x, weight, bias, adapters, rows, offsets, dtype)
        return definition.adapted_product(ops, *arguments)
    assert ops.ordered is not None
    return ops.ordered.adapted_product(x, weight, bias, packed, rows, offsets)


def add_low_rank(
    ops: NativeBase,
    total: Tensor,
    x: Operand,
    adapters: Sequence[Factors],
    rows: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    packed = _packed(ops, adapters, dtype)
    if packed is None:
        return definition.add_low_rank(ops, total, x, adapters, rows, offsets, dtype)
    assert ops.ordered is not None
    values = dequantize(ops, x) if isinstance(x, QTensor) else x.contiguous()
    return ops.ordered.add_low_rank(total, values, packed, rows, offsets)


def _packed(ops: NativeBase, adapters: Sequence[Factors], dtype: torch.dtype) -> Tensor | None:
    """Return the addresses of adapters that are packed, all of them."""
    packed = [lora.address for lora in adapters if isinstance(lora, PackedFactors)]
    fits = ops.ordered is not None and dtype == torch.bfloat16 and len(packed) == len(adapters)
    return torch.tensor(packed, dtype=torch.int64) if fits else None

"""Products in C++: under `bitwise` in an order (`ordered_native.py`), where it is defined for the
operands; else, and under `exact`, in float64 (`product.cpp`), which also reads two codes to a byte;
under `fast` a BLAS's of the dequantized operands.

`prepare` packs a weight for the inner loop; without it every product does so anew. Scales along K
in blocks other than 128 or a whole row, and E5M2 under `exact`, are left to the reference.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.matrices import Operand, Packed, Prepared, by_rows, values, weight_of
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.interface import KINDS, PLAIN, grid, nibble_arguments, product_arguments
from isobit.kernels.product.definition import added_product
from isobit.kernels.product.ordered import computes
from isobit.kernels.product.ordered_native import is_packed
from isobit.kernels.quantize.native import dequantize
from isobit.options.consistency import order
from isobit.precision import BLOCK, PackedFP4, QTensor, QuantSpec
from isobit.precision.packed_fp4 import GROUP

_KINDS = {torch.float8_e4m3fn: KINDS[torch.float8_e4m3fn], **PLAIN}
_FEW_ROWS = 256

mkldnn = torch.ops.mkldnn
_ONEDNN_PACKS = hasattr(mkldnn, "_linear_pointwise") and mkldnn._is_mkldnn_bf16_supported()


def prepare(ops: NativeBase, weight: Operand, into: Prepared | None = None) -> Prepared:
    previous = into if isinstance(into, Packed) else None
    if ops.fast:
        return _fast_prepare(ops, weight, previous)
    if ops.ordered is not None and is_packed(weight):
        return ops.ordered.prepare(weight, previous)
    data = weight.data if isinstance(weight, QTensor) else weight
    if data.dtype not in _KINDS or (isinstance(weight, QTensor) and not _blocks_are_native(weight)):
        return weight
    panels = _pack(ops, data, None if previous is None else previous.panels)
    return previous or Packed(weight, panels)


def product(
    ops: NativeBase,
    a: Operand,
    b: Prepared,
    bias: Tensor | None = None,
    out: torch.dtype = torch.bfloat16,
) -> Tensor:
    weight = weight_of(b)
    if ops.ordered is not None and computes(a, weight):
        return ops.ordered.product(a, b, bias, out)
    if isinstance(b, PackedFP4):
        return _nibble_product(ops, a, b, bias, out)
    if ops.fast:
        return _fast_product(ops, a, b, bias, out)
    assert not isinstance(weight, PackedFP4)
    panels, b = b.panels if isinstance(b, Packed) else None, weight
    if ops.ordered is not None and is_packed(b):
        panels = None
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        if not (_blocks_are_native(a) and _blocks_are_native(b)):
            return ops.falls_back("product", f"{a.spec} by {b.spec}").product(a, b, bias, out)
        return _product(ops, a.data, a, b.data, b, panels, bias, out)
    return _product(
        ops, values(a), None, values(b), None, None if isinstance(b, QTensor) else panels, bias, out
    )


def gradient_product(
    ops: NativeBase, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """Compute `Ops.gradient_product`; where sums have an order, they are added as they come."""
    if into is None or ops.ordered is None or not computes(a, b):
        return added_product(ops, a, b, out, into)
    return ops.ordered.product(a, b, None, torch.float32, into)


def rounds_last(ops: NativeBase, a: Operand, b: Prepared) -> bool:
    """Compute `Ops.rounds_last`: where sums have an order, they are float32 ones."""
    return ops.ordered is not None and computes(a, weight_of(b))


def unsupported(a: QuantSpec, b: QuantSpec, consistency: str) -> list[str]:
    """Return what is left to the reference of products of quantized operands: nothing, or this
    product. With two codes to a byte, as frozen NVFP4 weights have, more is in C++ than is said
    here."""
    blocks = all(spec.granularity in ("1x128", "128x128", "row", "tensor") for spec in (a, b))
    powers = all(spec.scale == "ue8m0" for spec in (a, b))
    if order(consistency) is not None:
        covered = powers or blocks
    else:
        covered = blocks and all(spec.format.dtype in _KINDS for spec in (a, b))
    return [] if covered or consistency == "fast" else [f"product of {a} by {b}"]


def _product(
    ops: NativeBase, a: Tensor, scales_a: QTensor | None, b: Tensor, scales_b: QTensor | None,
    panels: Tensor | None, bias: Tensor | None, out: torch.dtype,
) -> Tensor:  # fmt: skip
    plain = [out] if bias is None else [out, bias.dtype]
    if a.dtype not in _KINDS or b.dtype not in _KINDS or any(dtype not in PLAIN for dtype in plain):
        types = f"{a.dtype} by {b.dtype}"
        return ops.falls_back("product", types).product(scales_a or a, scales_b or b, bias, out)
    result = torch.empty((a.shape[0], b.shape[0]), dtype=out)
    panels = _pack(ops, b) if panels is None else panels
    bias = None if bias is None else bias.contiguous()
    arguments = product_arguments(a, b, panels, bias, result)
    if scales_a is not None and scales_b is not None:
        assert _blocks_are_native(scales_a)
        assert _blocks_are_native(scales_b)
        arguments.scaled = 1
        arguments.scale_a[:], arguments.scale_b[:] = grid(scales_a), grid(scales_b)
    ops.lib.isobit_product(ctypes.byref(arguments))
    return result


def _nibble_product(
    ops: NativeBase, a: Operand, b: PackedFP4, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    """With b decoded where it is read, in the order of the same codes a byte each; by parts where
    they have others: against scales that are not for 16 columns, and under `fast`."""
    data = a.data if isinstance(a, QTensor) else a
    plain = [out] if bias is None else [out, bias.dtype]
    fits = a.block[1] == GROUP if isinstance(a, QTensor) else True
    if (
        ops.fast
        or not fits
        or data.dtype not in _KINDS
        or any(dtype not in PLAIN for dtype in plain)
    ):
        return by_rows(ops.product, a, b, bias, out)
    result = torch.empty((a.shape[0], b.shape[0]), dtype=out)
    bias = None if bias is None else bias.contiguous()
    arguments = nibble_arguments(data, b, bias, result)
    if isinstance(a, QTensor):
        arguments.scaled = 1
        arguments.scale_a[:] = grid(a)
    ops.lib.isobit_product(ctypes.byref(arguments))
    return result


def _pack(ops: NativeBase, b: Tensor, into: Tensor | None = None) -> Tensor:
    """Pack a matrix [N, K] into panels [N / 16][K][16]."""
    columns, inner = b.shape
    panels = torch.empty(-(-columns // 16) * inner * 16, dtype=b.dtype) if into is None else into
    ops.lib.isobit_pack(
        _KINDS[b.dtype],
        b.data_ptr(),
        columns,
        inner,
        *b.stride(),
        panels.data_ptr(),
        torch.get_num_threads(),
    )
    return panels


def _fast_prepare(ops: NativeBase, weight: Operand, kept: Packed | None) -> Prepared:
    """Prepare a weight as BF16 values where it is quantized, and in oneDNN's blocked layout, which
    saves a quarter of the time of decoding."""
    matrix = dequantize(ops, weight) if isinstance(weight, QTensor) else weight
    if matrix.dtype != torch.bfloat16 or (matrix is weight and not _ONEDNN_PACKS):
        return weight
    panels = _reordered(matrix) if _ONEDNN_PACKS else None
    if kept is None:
        return Packed(weight, panels, None if matrix is weight else matrix)
    for old, new in ((kept.panels, panels), (kept.values, matrix)):
        if old is not None and new is not None:
            old.copy_(new)
    return kept


def _fast_product(
    ops: NativeBase, a: Operand, b: Operand | Packed, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    left = dequantize(ops, a) if isinstance(a, QTensor) else a
    packed, b = b if isinstance(b, Packed) else None, weight_of(b)
    if packed is not None and packed.values is not None:
        right = packed.values
    else:
        right = dequantize(ops, b) if isinstance(b, QTensor) else b
    if left.dtype != right.dtype:
        left, right = left.bfloat16(), right.bfloat16()
    bias = None if bias is None else bias.to(left.dtype)
    if left.dtype == torch.bfloat16 and left.shape[0] <= _FEW_ROWS and _ONEDNN_PACKS:
        panels = _reordered(right) if packed is None else packed.panels
        return mkldnn._linear_pointwise(left.contiguous(), panels, bias, "none", [], "").to(out)
    return functional.linear(left, right, bias).to(out)


def _reordered(weight: Tensor) -> Tensor:
    """Return a BF16 matrix in oneDNN's layout for few rows."""
    return mkldnn._reorder_linear_weight(weight.contiguous(), _FEW_ROWS)


def _blocks_are_native(x: QTensor) -> bool:
    return x.block[1] in (BLOCK, x.shape[1])

"""Quantization in C++ (`quantize.cpp`): E4M3 codes of a matrix, codes along its other dimension,
back to BF16, and how large the error is. Other formats go to the reference operators."""

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels.matrices import Operand
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.interface import KINDS, PLAIN
from isobit.kernels.quantize import definition
from isobit.precision import E4M3, ErrorSums, QTensor, QuantSpec, along_rows, nonfinite_message

_BLOCK_ROWS = 128


def quantize(ops: NativeBase, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
    kind = PLAIN.get(x.dtype)
    if kind is None or not has_scales(spec) or x.numel() == 0:
        return ops.falls_back("quantize", spec).quantize(x, spec, name)
    assert x.ndim == 2, f"quantize expects a matrix, got shape {tuple(x.shape)}"
    x = x.contiguous()
    rows, columns = x.shape
    block_rows, block_columns = spec.block((rows, columns))
    data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn)
    scale = torch.empty((-(-rows // block_rows), -(-columns // block_columns)))
    failed = ops.lib.isobit_quantize(
        kind, x.data_ptr(), rows, columns, block_rows, block_columns, spec.scale == "ue8m0",
        data.data_ptr(), scale.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise NonFiniteError(nonfinite_message(name, spec))
    return QTensor(data, scale, spec)


def quantize_along_tokens(ops: NativeBase, x: Operand, spec: QuantSpec, name: str) -> QTensor:
    along = along_rows(spec)
    if not (
        isinstance(x, QTensor)
        and _is_native(x)
        and has_scales(spec)
        and along.granularity == "128x1"
    ):
        return definition.quantize_along_tokens(ops, x, spec, name)
    rows, columns = x.shape
    block_rows, _ = along.block(x.shape)
    data, scale = torch.empty_like(x.data), torch.empty((-(-rows // block_rows), columns))
    failed = ops.lib.isobit_requantize(
        x.data.data_ptr(), rows, columns, x.scale.data_ptr(), *x.block, block_rows,
        spec.scale == "ue8m0",
        data.data_ptr(), scale.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise NonFiniteError(nonfinite_message(name, along))
    return QTensor(data, scale, along).transpose()


def error_sums(ops: NativeBase, x: Operand, quantized: QTensor) -> ErrorSums:
    coded = x if isinstance(x, QTensor) and _is_native(x) else None
    plain = x if isinstance(x, Tensor) and x.dtype in PLAIN else None
    given = coded.data if coded is not None else plain
    if given is None or not _is_native(quantized):
        return definition.error_sums(x, quantized)
    given = given.detach().contiguous()
    counts = torch.empty(2, dtype=torch.float64)
    squares = torch.empty((2, -(-given.shape[0] // _BLOCK_ROWS)), dtype=torch.float64)
    ops.lib.isobit_error_sums(
        KINDS[given.dtype], given.data_ptr(), None if coded is None else coded.scale.data_ptr(),
        *((1, 1) if coded is None else coded.block), quantized.data.data_ptr(),
        quantized.scale.data_ptr(),
        *quantized.block, *quantized.shape, counts.data_ptr(), squares.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return ErrorSums(given.numel(), counts, squares)


def dequantize(ops: NativeBase, x: QTensor) -> Tensor:
    """Return the values in bfloat16; exact where scales are powers of two."""
    if not _is_native(x):
        return x.dequantize().bfloat16()
    out = torch.empty(x.data.shape, dtype=torch.bfloat16)
    ops.lib.isobit_dequantize(
        x.data.data_ptr(),
        *x.data.shape,
        x.scale.data_ptr(),
        *x.block,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def has_scales(spec: QuantSpec) -> bool:
    """Return whether C++ quantizes to the format, with such scales."""
    return spec.format is E4M3 and spec.scale in ("fp32", "ue8m0")


def _is_native(x: QTensor) -> bool:
    """Return whether C++ reads it: contiguous E4M3 codes; one scale a column, for a multiple of 16
    columns, or for all."""
    if (
        x.data.dtype != torch.float8_e4m3fn
        or not x.data.is_contiguous()
        or not x.scale.is_contiguous()
    ):
        return False
    return x.block[1] % 16 == 0 or x.block[1] in (1, x.shape[1])

"""RMSNorm and gates in C++, alone and with the quantization of their result; and the test of the
row operators.

Under `bitwise` these, and attention, are float32 in the order `rows32-v1`
(`kernels/norms/float32.py`), which the first use of a library compares with scalar arithmetic
(`native/rows32.cpp`); a mark in the cache keeps that from being done again. Under `exact` and
`fast` they are float64 inside."""

from functools import cache

import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.build import differing, library
from isobit.kernels.native.interface import ACTIVATIONS, PLAIN, pointer
from isobit.kernels.norms import definition
from isobit.kernels.ops import Activation
from isobit.kernels.quantize.native import has_scales
from isobit.precision import QTensor, QuantSpec, nonfinite_message


@cache
def check_rows() -> None:
    """Raise IsobitError where the library's float32 row operators differ from scalar ones."""
    lib = library()
    if different := differing(lib, "rows32", lib.isobit_rows32_self_test):
        raise IsobitError(
            f"consistency: bitwise cannot hold here: {different} results of norms, gates and "
            "attention differ from scalar ones; set consistency: exact"
        )


def rms_norm(
    ops: NativeBase, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if not _alike(x, weight, residual):
        return ops.falls_back("rms_norm", x.dtype).rms_norm(x, weight, eps, residual)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _, summed, rstd = _norm(ops, x, weight, eps, residual, y, None)
    return y, summed, rstd


def rms_norm_quantized(
    ops: NativeBase,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    spec: QuantSpec,
    name: str,
) -> tuple[QTensor, Tensor, Tensor]:
    rows, columns = x.shape
    block = _block_of_row(spec, rows, columns) if _alike(x, weight, residual) else None
    if block is None:
        return definition.rms_norm_quantized(ops, x, weight, eps, residual, spec, name)
    quantized = _empty(rows, columns, block, spec)
    failed, summed, rstd = _norm(ops, x, weight, eps, residual, None, quantized, block)
    if failed:
        raise NonFiniteError(nonfinite_message(name, spec))
    return quantized, summed, rstd


def _norm(
    ops: NativeBase, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None,
    y: Tensor | None, to: QTensor | None, block: int = 1,
) -> tuple[int, Tensor, Tensor]:  # fmt: skip
    """Return (1 if the result cannot be quantized, summed, rstd); the result in `y` or `to`."""
    x, weight = x.contiguous(), weight.contiguous()
    summed, rstd = x, torch.empty(x.shape[0])
    if residual is not None:
        residual, summed = residual.contiguous(), torch.empty_like(x)
    failed = ops.lib.isobit_rms_norm(
        PLAIN[x.dtype], PLAIN[weight.dtype], ops.single, x.data_ptr(), pointer(residual),
        weight.data_ptr(), *x.shape, eps, pointer(y), summed.data_ptr(), rstd.data_ptr(),
        *_target(to, block), torch.get_num_threads(),
    )  # fmt: skip
    return failed, summed, rstd


def rms_norm_backward(
    ops: NativeBase, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    if not _alike(summed, weight, dy):
        return ops.falls_back("rms_norm_backward", summed.dtype).rms_norm_backward(
            dy, summed, weight, rstd
        )
    dy = dy.contiguous()
    summed = summed.contiguous()
    weight = weight.contiguous()
    rstd = rstd.contiguous()
    dx, dweight = torch.empty_like(summed), torch.empty(summed.shape[1])
    ops.lib.isobit_rms_norm_backward(
        PLAIN[summed.dtype], PLAIN[weight.dtype], ops.single, dy.data_ptr(), summed.data_ptr(),
        weight.data_ptr(), rstd.data_ptr(), *summed.shape, dx.data_ptr(), dweight.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight


def gate_mul(ops: NativeBase, activation: Activation, gate_up: Tensor) -> Tensor:
    if gate_up.dtype not in PLAIN:
        return ops.falls_back("gate_mul", gate_up.dtype).gate_mul(activation, gate_up)
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
    _gate(ops, activation, gate_up, out, None)
    return out


def gate_mul_quantized(
    ops: NativeBase, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
) -> QTensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    block = _block_of_row(spec, rows, inner) if gate_up.dtype in PLAIN else None
    if block is None:
        return definition.gate_mul_quantized(ops, activation, gate_up, spec, name)
    quantized = _empty(rows, inner, block, spec)
    if _gate(ops, activation, gate_up, None, quantized, block):
        raise NonFiniteError(nonfinite_message(name, spec))
    return quantized


def _gate(
    ops: NativeBase,
    activation: Activation,
    gate_up: Tensor,
    out: Tensor | None,
    to: QTensor | None,
    block: int = 1,
) -> int:
    """Return the result in `out` or quantized in `to`; 1 where it cannot be quantized."""
    gate_up = gate_up.contiguous()
    failed: int = ops.lib.isobit_gate_mul(
        ACTIVATIONS[activation], PLAIN[gate_up.dtype], ops.single, gate_up.data_ptr(),
        gate_up.shape[0],
        gate_up.shape[1] // 2, pointer(out), *_target(to, block), torch.get_num_threads(),
    )  # fmt: skip
    return failed


def gate_mul_backward(
    ops: NativeBase, activation: Activation, dh: Tensor, gate_up: Tensor
) -> Tensor:
    if gate_up.dtype not in PLAIN or dh.dtype != gate_up.dtype:
        return ops.falls_back("gate_mul_backward", gate_up.dtype).gate_mul_backward(
            activation, dh, gate_up
        )
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up)
    ops.lib.isobit_gate_mul_backward(
        ACTIVATIONS[activation], PLAIN[gate_up.dtype], ops.single, dh.data_ptr(),
        gate_up.data_ptr(), *dh.shape,
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _alike(x: Tensor, weight: Tensor, other: Tensor | None) -> bool:
    """Return whether C++ norms x: a norm's weight may be float32 where rows are BF16."""
    return x.dtype in PLAIN and weight.dtype in PLAIN and (other is None or other.dtype == x.dtype)


def _block_of_row(spec: QuantSpec, rows: int, columns: int) -> int | None:
    """Return the columns of a block where C++ quantizes a row as soon as it is computed, to E4M3
    with scales of the row alone; else None."""
    if not has_scales(spec) or rows * columns == 0:
        return None
    high, wide = spec.block((rows, columns))
    return wide if high == 1 else None


def _empty(rows: int, columns: int, block: int, spec: QuantSpec) -> QTensor:
    data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn)
    return QTensor(data, torch.empty((rows, -(-columns // block))), spec)


def _target(to: QTensor | None, block: int) -> tuple[int | None, int | None, int, bool]:
    """Return `struct Quantized` of norms.h, argument by argument."""
    if to is None:
        return None, None, block, False
    return to.data.data_ptr(), to.scale.data_ptr(), block, to.spec.scale == "ue8m0"

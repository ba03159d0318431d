"""The SiLU gate on a GPU, alone or with its result quantized at once, and its backward.

silu(gate) · up = gate / (1 + exp(-gate)) · up in float32, rounded once (SwiGLU: Shazeer 2020). Elementwise but for the
scales, so a row's bits depend on the row alone. `exp` is the GPU's (2 units in the last place, and a relative error of
|gate| · 2⁻²⁴ from its argument), so the bits are not the CPU's. The bound is the memory's speed: an element of the BF16
result takes 4 bytes read, and 2 written or 1 for its code; in the backward 6 read and 4 written.

Left out: other gates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.triton.launch import launch
from isobit.kernels.triton.numbers import cast
from isobit.kernels.triton.quantize import codes, empty, largest, lies_beside, quantize, scale_or_flag, supported
from isobit.kernels.types import Activation
from isobit.precision import BLOCK, QTensor, QuantSpec

_HIGH = 8
_WARPS = 4
"""Rows of a program's tile, whose columns are a block of the quantizer, and its warps: 8 elements a thread."""


@triton.jit(do_not_specialize=["rows"])
def _silu_mul(
    gate_up_ptr, h_ptr, scale_ptr, flag_ptr, rows,
    COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, QUANTIZED: tl.constexpr, UE8M0: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """A tile [HIGH, WIDE] of the result [rows, COLUMNS]."""
    STEPS: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    tile = tl.program_id(0)
    across = tile % STEPS
    first = (tile // STEPS * HIGH).to(tl.int64)
    i = tl.arange(0, HIGH)
    column = across * WIDE + tl.arange(0, WIDE)
    row = tile // STEPS * HIGH + i
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = first * (2 * COLUMNS) + i[:, None] * (2 * COLUMNS) + column[None, :]
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + COLUMNS + at, mask=inside, other=0).to(tl.float32)
    h = cast(tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up, gate_up_ptr.dtype.element_ty)
    out = h_ptr + first * COLUMNS + i[:, None] * COLUMNS + column[None, :]
    if QUANTIZED:
        h = h.to(tl.float32)
        scale = scale_or_flag(largest(h, 1), flag_ptr, UE8M0)
        if BESIDE:
            tl.store(scale_ptr + tl.cast(rows, tl.int64) * across + row, scale, mask=row < rows)
        else:
            tl.store(scale_ptr + first * STEPS + i * STEPS + across, scale, mask=row < rows)
        h = codes(h, scale[:, None], UE8M0)
    tl.store(out, h, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dh_ptr, gate_up_ptr, gradient_ptr, rows, COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """A tile [HIGH, WIDE] of both halves of the gradient."""
    STEPS: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    tile = tl.program_id(0)
    first = (tile // STEPS * HIGH).to(tl.int64)
    i = tl.arange(0, HIGH)
    column = tile % STEPS * WIDE + tl.arange(0, WIDE)
    row = tile // STEPS * HIGH + i
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = first * (2 * COLUMNS) + i[:, None] * (2 * COLUMNS) + column[None, :]
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + COLUMNS + at, mask=inside, other=0).to(tl.float32)
    dh = tl.load(dh_ptr + first * COLUMNS + i[:, None] * COLUMNS + column[None, :], mask=inside, other=0).to(tl.float32)
    sigma = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    dgate = dh * up * (sigma * (1.0 + gate * (1.0 - sigma)))
    tl.store(gradient_ptr + at, cast(dgate, gradient_ptr.dtype.element_ty), mask=inside)
    tl.store(gradient_ptr + COLUMNS + at, cast(dh * (gate * sigma), gradient_ptr.dtype.element_ty), mask=inside)


def gate_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate and up side by side [T, 2I], BF16 or float32: [T, I], rounded once."""
    gate_up = gate_up.contiguous()
    h = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    _launch(_silu_mul, h.shape, gate_up, h, None, None, QUANTIZED=False, UE8M0=False, BESIDE=False)
    return h


def gate_mul_quantized(activation: Activation, gate_up: Tensor, spec: QuantSpec, flag: Tensor) -> QTensor:
    """`gate_mul` quantized, the bits of the two in turn; for `1x128` the result itself is never written.

    `flag` [1] int32 becomes 1 where the result holds NaN or an infinity.
    """
    if spec.granularity != "1x128":
        return quantize(gate_mul(activation, gate_up), spec, flag)
    assert supported(spec), f"no kernel quantizes to {spec}"
    gate_up = gate_up.contiguous()
    made = empty(gate_up.shape[0], gate_up.shape[1] // 2, spec, gate_up.device)
    data, ue8m0, beside = made.data.view(torch.uint8), spec.scale == "ue8m0", lies_beside(made)
    _launch(_silu_mul, made.shape, gate_up, data, made.scale, flag, QUANTIZED=True, UE8M0=ue8m0, BESIDE=beside)
    return made


def gate_mul_backward(activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up [T, 2I], in its type, of that of the result dh [T, I].

    With σ = 1 / (1 + exp(-gate)): d gate = dh·up·σ·(1 + gate·(1 - σ)), d up = dh·gate·σ.
    """
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    gradient = torch.empty_like(gate_up)
    _launch(_backward, dh.shape, dh, gate_up, gradient)
    return gradient


def _launch(kernel: object, shape: tuple[int, ...], *tensors: Tensor | None, **constants: bool) -> None:
    """A program for every tile of a result [rows, columns]."""
    rows, columns = shape
    grid = (-(-rows // _HIGH) * -(-columns // BLOCK),)
    launch(kernel, grid, *tensors, rows, COLUMNS=columns, HIGH=_HIGH, WIDE=BLOCK, num_warps=_WARPS, **constants)

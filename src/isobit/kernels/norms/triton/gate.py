"""Gates on a GPU, alone or with its result quantized at once, and its backward.

activation(gate) · up = gate / (1 + exp(-k)) · up in float32, rounded once (SwiGLU and GEGLU:
Shazeer 2020), where k is the gate for SiLU, and otherwise what `rows32.inner` says, of a gate and
an up as `pointwise.bounded` gives them; for the sigmoid up / (1 + exp(-gate)). Elementwise but for
the scales, so a row's bits depend on the row alone. `exp` is the GPU's (2 units in the last place,
and a relative error of |k| · 2⁻²⁴ from its argument), so the bits are not the CPU's. The bound is
the memory's speed: an element of the BF16 result takes 4 bytes read, and 2 written or 1 for its
code; in the backward 6 read and 4 written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.norms.definition import CLAMPED, FAR, GELU
from isobit.kernels.ops import Activation
from isobit.kernels.quantize.triton import (
    BOTH_WARPS,
    codes,
    empty,
    empty_both_ways,
    largest,
    lies_beside,
    quantize,
    quantize_both_ways,
    save_both_ways,
    scale_or_flag,
    supported,
)
from isobit.kernels.triton.launch import launch
from isobit.kernels.triton.numbers import cast, sigmoid
from isobit.precision import BLOCK, QTensor, QuantSpec

_HIGH = 8
_WARPS = 4
"""Rows of a program's tile, whose columns are a block of the quantizer, and its warps: 8 elements a
thread."""


_FAR = tl.constexpr(FAR)
_FIRST, _SECOND, _THIRD = (tl.constexpr(value) for value in GELU)
_SLOPE, _LIMIT = (tl.constexpr(value) for value in CLAMPED)


@triton.jit
def _inner(gate, ACTIVATION: tl.constexpr):
    """Return (k, gate · k') of a gate."""
    if ACTIVATION == "silu" or ACTIVATION == "sigmoid":
        return gate, gate
    elif ACTIVATION == "swiglu_clamped":
        return gate * _SLOPE, gate * _SLOPE
    else:
        x = tl.where(gate > _FAR, _FAR, tl.where(gate < -_FAR, -_FAR, gate))
        square = x * x
        return x * tl.fma(square, _SECOND, _FIRST), x * tl.fma(square, _THIRD, _FIRST)


@triton.jit
def _bounded(gate, up, ACTIVATION: tl.constexpr):
    """Return gate and up as they are multiplied, as `pointwise.bounded` does."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
    return gate, up


@triton.jit(do_not_specialize=["rows"])
def _gate_mul(
    gate_up_ptr, h_ptr, scale_ptr, flag_ptr, rows,
    COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, QUANTIZED: tl.constexpr,
    UE8M0: tl.constexpr,
    BESIDE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute a tile [HIGH, WIDE] of the result [rows, COLUMNS]."""
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
    gate, up = _bounded(gate, up, ACTIVATION)
    k, _ = _inner(gate, ACTIVATION)
    below = 1.0 + tl.exp(-k)
    product = tl.div_rn(up, below) if ACTIVATION == "sigmoid" else tl.div_rn(gate, below) * up
    h = cast(product, gate_up_ptr.dtype.element_ty)
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


@triton.jit
def _gradient(dh, gate, up, OF_UP: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the gradient of a gate, or of an up, in float32, given that of their product."""
    bounded, multiplied = _bounded(gate, up, ACTIVATION)
    k, slope = _inner(bounded, ACTIVATION)
    sigma = sigmoid(k)
    if OF_UP:
        gradient = dh * sigma if ACTIVATION == "sigmoid" else dh * (bounded * sigma)
        if ACTIVATION == "swiglu_clamped":
            gradient = tl.where((up > _LIMIT) | (up < -_LIMIT), 0.0, gradient)
    elif ACTIVATION == "sigmoid":
        gradient = dh * multiplied * (sigma * (1.0 - sigma))
    else:
        gradient = dh * multiplied * (sigma * (1.0 + slope * (1.0 - sigma)))
        if ACTIVATION == "swiglu_clamped":
            gradient = tl.where(gate > _LIMIT, 0.0, gradient)
    return gradient


@triton.jit
def _given(
    dh_ptr, gate_up_ptr, first, column, rows, COLUMNS: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """Return dh, gate and up of a tile, HIGH rows from `first` on and these columns; then where
    these two stand, and which there are."""
    i = tl.arange(0, HIGH)
    inside = (i < rows - first)[:, None] & (column < COLUMNS)[None, :]
    start, at = first.to(tl.int64) * COLUMNS, i[:, None] * COLUMNS + column[None, :]
    dh = tl.load(dh_ptr + start + at, mask=inside, other=0).to(tl.float32)
    at = 2 * start + i[:, None] * (2 * COLUMNS) + column[None, :]
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + COLUMNS + at, mask=inside, other=0).to(tl.float32)
    return dh, gate, up, at, inside


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dh_ptr, gate_up_ptr, gradient_ptr, rows,
    COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute a tile [HIGH, WIDE] of both halves of the gradient."""
    STEPS: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    tile = tl.program_id(0)
    column = tile % STEPS * WIDE + tl.arange(0, WIDE)
    dh, gate, up, at, inside = _given(
        dh_ptr, gate_up_ptr, tile // STEPS * HIGH, column, rows, COLUMNS, HIGH
    )
    like: tl.constexpr = gradient_ptr.dtype.element_ty
    dgate = _gradient(dh, gate, up, False, ACTIVATION)
    tl.store(gradient_ptr + at, cast(dgate, like), mask=inside)
    dup = _gradient(dh, gate, up, True, ACTIVATION)
    tl.store(gradient_ptr + COLUMNS + at, cast(dup, like), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_quantized(
    dh_ptr, gate_up_ptr, data_ptr, scale_ptr, turned_ptr, turned_scale_ptr, flag_ptr, rows, pitch,
    COLUMNS: tl.constexpr, BESIDE: tl.constexpr, TURNED_BESIDE: tl.constexpr, UE8M0: tl.constexpr,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK, BLOCK] of one half of the gradient, whose blocks do not cross to the
    other: as codes with a scale for each row, and, transposed, for each column. Registers do not
    suffice for both halves; programs of the same place in both are neighbours, which find their
    operands in the cache."""
    STEPS: tl.constexpr = COLUMNS // BLOCK
    half, tile = tl.program_id(0) % 2, tl.program_id(0) // 2
    down, across = tile // STEPS, tile % STEPS
    column = across * BLOCK + tl.arange(0, BLOCK)
    like: tl.constexpr = gate_up_ptr.dtype.element_ty
    # each half loads for itself: most gradients of up need no up, which then takes no registers
    if half == 0:
        dh, gate, up, _, _ = _given(dh_ptr, gate_up_ptr, down * BLOCK, column, rows, COLUMNS, BLOCK)
        x = _gradient(dh, gate, up, False, ACTIVATION)
    else:
        dh, gate, up, _, _ = _given(dh_ptr, gate_up_ptr, down * BLOCK, column, rows, COLUMNS, BLOCK)
        x = _gradient(dh, gate, up, True, ACTIVATION)
    save_both_ways(
        cast(x, like).to(tl.float32), data_ptr, scale_ptr, turned_ptr, turned_scale_ptr, flag_ptr,
        down, across + half * STEPS, rows, pitch, 2 * COLUMNS, like, BESIDE, TURNED_BESIDE, UE8M0,
        BLOCK,
    )  # fmt: skip


def gate_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    """Return activation(gate) · up of gate and up side by side [T, 2I], BF16 or float32: [T, I],
    rounded once."""
    gate_up = gate_up.contiguous()
    h = torch.empty(
        gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device
    )
    how = {"QUANTIZED": False, "UE8M0": False, "BESIDE": False}
    _launch(_gate_mul, activation, h.shape, gate_up, h, None, None, **how)
    return h


def gate_mul_quantized(
    activation: Activation, gate_up: Tensor, spec: QuantSpec, flag: Tensor
) -> QTensor:
    """Return `gate_mul` quantized, the bits of the two in turn; for `1x128` the result itself is
    never written.

    `flag` [1] int32 becomes 1 where the result holds NaN or an infinity.
    """
    if spec.granularity != "1x128":
        return quantize(gate_mul(activation, gate_up), spec, flag)
    assert supported(spec), f"no kernel quantizes to {spec}"
    gate_up = gate_up.contiguous()
    made = empty(gate_up.shape[0], gate_up.shape[1] // 2, spec, gate_up.device)
    how = {"QUANTIZED": True, "UE8M0": spec.scale == "ue8m0", "BESIDE": lies_beside(made)}
    _launch(
        _gate_mul,
        activation,
        made.shape,
        gate_up,
        made.data.view(torch.uint8),
        made.scale,
        flag,
        **how,
    )
    return made


def gate_mul_backward(activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of gate_up [T, 2I], in its type, from that of the result dh [T, I].

    With σ = 1 / (1 + exp(-k)): d gate = dh·up·σ·(1 + gate·k'·(1 - σ)), d up = dh·gate·σ; of the
    sigmoid dh·up·σ·(1 - σ) and dh·σ.
    """
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    gradient = torch.empty_like(gate_up)
    _launch(_backward, activation, dh.shape, dh, gate_up, gradient)
    return gradient


def gate_mul_backward_quantized(
    activation: Activation, dh: Tensor, gate_up: Tensor, spec: QuantSpec, flag: Tensor
) -> tuple[QTensor, QTensor]:
    """Return `gate_mul_backward` quantized along its columns and along the tokens, the bits of the
    two in turn; for `1x128`, where no block has columns of gate and up, the gradient itself is
    never written. `flag` as of `gate_mul_quantized`."""
    rows, inner = dh.shape
    if spec.granularity != "1x128" or inner % BLOCK or not rows:
        return quantize_both_ways(gate_mul_backward(activation, dh, gate_up), spec, flag)
    made, turned = empty_both_ways(rows, 2 * inner, spec, dh.device)
    launch(
        _backward_quantized, (2 * -(-rows // BLOCK) * (inner // BLOCK),), dh.contiguous(),
        gate_up.contiguous(), made.data.view(torch.uint8), made.scale,
        turned.data.view(torch.uint8), turned.scale, flag, rows, turned.data.stride(0),
        COLUMNS=inner, BESIDE=lies_beside(made), TURNED_BESIDE=lies_beside(turned),
        UE8M0=spec.scale == "ue8m0", BLOCK=BLOCK, ACTIVATION=activation, num_warps=BOTH_WARPS,
    )  # fmt: skip
    return made, turned


def _launch(
    kernel: object,
    activation: Activation,
    shape: tuple[int, ...],
    *tensors: Tensor | None,
    **constants: bool,
) -> None:
    """Launch a program for every tile of a result [rows, columns]."""
    rows, columns = shape
    grid = (-(-rows // _HIGH) * -(-columns // BLOCK),)
    sizes = {"COLUMNS": columns, "HIGH": _HIGH, "WIDE": BLOCK}
    launch(
        kernel, grid, *tensors, rows, ACTIVATION=activation, num_warps=_WARPS, **sizes, **constants
    )

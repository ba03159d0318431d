"""RMSNorm on a GPU, alone or with its result quantized at once, and its backward.

One program normalizes one row. The sum of squares is taken in float32 over neighbours in pairs,
then pairs of pairs, each step a sum of two: an addition that has no order. So a row's bits depend
on the row alone: not on the batch, nor on how Triton spreads a row over threads, which may differ
between writing y and writing its codes. Interpreter and GPU are held to the same sums in PyTorch,
bit for bit (`tests/kernels/triton/test_norm.py`).

With n = s · rstd of s = x + residual, everything is float32 inside and rounded where the reference
rounds: s, rstd, y. The bound is the memory's speed: an element of BF16 with a residual takes 4
bytes read, 2 written for s, and 2 for y or 1 for its code. Left out: the norms of query and key
heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.quantize.triton import (
    codes,
    empty,
    largest,
    lies_beside,
    quantize,
    scale_or_flag,
    supported,
    warps_for,
)
from isobit.kernels.triton.launch import launch
from isobit.kernels.triton.numbers import cast
from isobit.precision import BLOCK, QTensor, QuantSpec

_MOST_CHUNKS = 1024
_FEWEST_ROWS = 8
_HIGH, _WIDE = 128, 32
"""The backward's chunks of rows, and the tile in which their sums are added."""


@triton.jit
def pair_sum(x, LEVELS: tl.constexpr):
    """Return sums of the rows of float32 `x` [A, 2**LEVELS]: [A]. Neighbours in pairs, then pairs
    of pairs."""
    A: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (A, 2**LEVELS, 1))
    for level in tl.static_range(LEVELS):
        x = tl.reshape(x, (A, 2 ** (LEVELS - level - 1), 2))
        x = tl.sum(x, 2)
    return tl.reshape(x, (A,))


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, summed_ptr, y_ptr, scale_ptr, rstd_ptr, flag_ptr, eps,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr,
    QUANTIZED: tl.constexpr, UE8M0: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Compute a row as BLOCKS blocks of WIDE columns, which are those of the quantizer."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    inside = at < COLUMNS
    s = tl.load(x_ptr + row * COLUMNS + at, mask=inside, other=0).to(tl.float32)
    if residual_ptr is not None:
        s += tl.load(residual_ptr + row * COLUMNS + at, mask=inside, other=0).to(tl.float32)
        rounded = cast(s, x_ptr.dtype.element_ty)
        tl.store(summed_ptr + row * COLUMNS + at, rounded, mask=inside)
        s = rounded.to(tl.float32)
    total = pair_sum(tl.reshape(s * s, (1, BLOCKS * WIDE)), LEVELS)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, COLUMNS + 0.0) + eps))
    tl.store(rstd_ptr + row + tl.arange(0, 1), rstd)
    weight = tl.load(weight_ptr + at, mask=inside, other=0).to(tl.float32)
    y = cast(s * rstd[:, None] * weight, x_ptr.dtype.element_ty)
    if QUANTIZED:
        y = y.to(tl.float32)
        STEPS: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
        scale = scale_or_flag(largest(y, 1), flag_ptr, UE8M0)
        if BESIDE:
            tl.store(
                scale_ptr + tl.num_programs(0).to(tl.int64) * block + row, scale, mask=block < STEPS
            )
        else:
            tl.store(scale_ptr + row * STEPS + block, scale, mask=block < STEPS)
        y = codes(y, scale[:, None], UE8M0)
        # as many codes a thread as it has loaded, in 16 bytes: loads are not spread to fit the
        # store
        out = tl.max_contiguous(
            y_ptr + row * COLUMNS + at, [1, 128 // x_ptr.dtype.element_ty.primitive_bitwidth]
        )
        tl.store(out, y, mask=inside)
    else:
        tl.store(y_ptr + row * COLUMNS + at, y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dy_ptr, summed_ptr, weight_ptr, rstd_ptr, added_ptr, ds_ptr, part_ptr, rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ROWS rows, `added` to them if it is there, and the sum over them, in
    order, of that of the weight."""
    chunk = tl.program_id(0)
    at = tl.arange(0, WIDE)
    inside = at < COLUMNS
    weight = tl.load(weight_ptr + at, mask=inside, other=0).to(tl.float32)
    dweight = tl.zeros((WIDE,), tl.float32)
    for i in tl.range(0, ROWS, num_stages=STAGES):
        row = chunk * ROWS + i
        first = row.to(tl.int64) * COLUMNS
        present = inside & (row < rows)
        dy = tl.load(dy_ptr + first + at, mask=present, other=0).to(tl.float32)
        s = tl.load(summed_ptr + first + at, mask=present, other=0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normed = s * rstd
        scaled = dy * weight
        mean = tl.div_rn(pair_sum(tl.reshape(scaled * normed, (1, WIDE)), LEVELS), COLUMNS + 0.0)
        ds = cast(rstd * (scaled - normed * mean), ds_ptr.dtype.element_ty)
        if added_ptr is not None:
            added = tl.load(added_ptr + first + at, mask=present, other=0).to(tl.float32)
            ds = cast(ds.to(tl.float32) + added, ds_ptr.dtype.element_ty)
        tl.store(ds_ptr + first + at, ds, mask=present)
        dweight += dy * normed
    tl.store(part_ptr + chunk.to(tl.int64) * COLUMNS + at, dweight, mask=inside)


@triton.jit(do_not_specialize=["chunks"])
def _add_chunks(
    part_ptr, sum_ptr, chunks,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Add up the rows of [chunks, COLUMNS]: every HIGH-th row in ascending order, then these sums
    in pairs."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for step in range(STEPS):
        chunk = step * HIGH + tl.arange(0, HIGH)
        inside = (chunk < chunks)[:, None] & (column < COLUMNS)[None, :]
        total += tl.load(
            part_ptr + chunk[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0
        )
    tl.store(sum_ptr + column, pair_sum(tl.trans(total), LEVELS), mask=column < COLUMNS)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, summed, rstd) of x [R, C], BF16 or float32, and weight [C] (Zhang and Sennrich
    2019, eq. 4).

    summed = x + residual rounded to x's type, or x itself; rstd [R] = 1 / sqrt(mean(summed²) + eps)
    in float32; y = summed · rstd · weight in float32, rounded to x's type.
    """
    x, residual, summed, rstd = _prepare(x, residual)
    y = torch.empty_like(x)
    _launch_norm(x, residual, weight, summed, y, None, rstd, None, eps, ue8m0=False)
    return y, summed, rstd


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, spec: QuantSpec, flag: Tensor
) -> tuple[QTensor, Tensor, Tensor]:
    """Return `rms_norm` with its y quantized, the bits of the two in turn; for `1x128` y is never
    written.

    `flag` [1] int32 becomes 1 where y holds NaN or an infinity.
    """
    if spec.granularity != "1x128":
        y, summed, rstd = rms_norm(x, weight, eps, residual)
        return quantize(y, spec, flag), summed, rstd
    assert supported(spec), f"no kernel quantizes to {spec}"
    x, residual, summed, rstd = _prepare(x, residual)
    made = empty(x.shape[0], x.shape[1], spec, x.device)
    codes_of = made.data.view(torch.uint8)
    ue8m0, beside = spec.scale == "ue8m0", lies_beside(made)
    _launch_norm(
        x,
        residual,
        weight,
        summed,
        codes_of,
        made.scale,
        rstd,
        flag,
        eps,
        ue8m0=ue8m0,
        beside=beside,
    )
    return made, summed, rstd


def rms_norm_backward(
    dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (gradient of summed [R, C] in its type, gradient of weight [C] float32).

    With n = summed · rstd: ds = rstd · (dy·w - n · mean(dy·w·n)), dw = Σ_rows dy·n. It repeats:
    rows are added in order in chunks, whose number depends on R alone, and the chunks in a fixed
    order. It reads 4 bytes and writes 2 an element of BF16, and a float32 row for each chunk.
    """
    return _gradients(dy, summed, weight, rstd, None)


def rms_norm_backward_added(
    dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm_backward`, its first result plus `added` [R, C]: the sum of what is rounded,
    as if it came after. 2 bytes more are read."""
    return _gradients(dy, summed, weight, rstd, added.contiguous())


def _gradients(
    dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    dy, summed = dy.contiguous(), summed.contiguous()
    rows, columns = summed.shape
    wide = triton.next_power_of_2(columns)
    per = max(_FEWEST_ROWS, triton.next_power_of_2(-(-rows // _MOST_CHUNKS)))
    chunks = -(-rows // per)
    ds = torch.empty_like(summed)
    partials = torch.empty(chunks, columns, device=summed.device)
    dweight = torch.empty(columns, device=summed.device)
    launch(
        _backward, (chunks,), dy, summed, weight, rstd, added, ds, partials, rows,
        ROWS=per, COLUMNS=columns, WIDE=wide, LEVELS=wide.bit_length() - 1, STAGES=2,
        num_warps=warps_for(2 * wide),
    )  # fmt: skip
    launch(
        _add_chunks, (-(-columns // _WIDE),), partials, dweight, chunks,
        STEPS=_MOST_CHUNKS // _HIGH, COLUMNS=columns, HIGH=_HIGH, WIDE=_WIDE,
        LEVELS=_HIGH.bit_length() - 1,
        num_warps=4,
    )  # fmt: skip
    return ds, dweight


def _prepare(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return contiguous operands, and the tensors for the sum (x itself without a residual) and
    rstd."""
    x = x.contiguous()
    rstd = torch.empty(x.shape[0], device=x.device)
    if residual is None:
        return x, None, x, rstd
    assert residual.shape == x.shape, f"a residual {tuple(residual.shape)} of rows {tuple(x.shape)}"
    return x, residual.contiguous(), torch.empty_like(x), rstd


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, summed: Tensor, y: Tensor,
    scale: Tensor | None, rstd: Tensor,
    flag: Tensor | None, eps: float, *, ue8m0: bool, beside: bool = False,
) -> None:  # fmt: skip
    columns = x.shape[1]
    blocks = triton.next_power_of_2(-(-columns // BLOCK))
    launch(
        _rms_norm, (x.shape[0],), x, residual, weight, summed, y, scale, rstd, flag, eps,
        COLUMNS=columns, BLOCKS=blocks, WIDE=BLOCK, LEVELS=(blocks * BLOCK).bit_length() - 1,
        QUANTIZED=scale is not None, UE8M0=ue8m0, BESIDE=beside,
        num_warps=warps_for(blocks * BLOCK),
    )  # fmt: skip

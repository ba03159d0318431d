"""E4M3 codes with a scale per block, on a GPU: the bits of `isobit.precision.quantize`.

A program holds whole blocks in registers, so that their largest magnitude and their codes come from
one reading: of float32 weights 4 bytes are read and 1 written an element, of BF16 activations 2 and
1, and where a saved activation is quantized again along the tokens 1 and 1, its transpose included.
A gradient, which both products of a backward take, is read once and written twice, along its
columns and along the tokens: 2 and 2. The bound is the memory's speed. Largest magnitudes do not
depend on the order in which they are found and codes are elementwise, so tile sizes cannot change a
bit.

NaN and infinity set the flag and make the scale NaN. Left out: FP4, E5M2, blocks of 32 and 16, and
one scale for a whole tensor or column.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.matrices import Operand
from isobit.kernels.product.triton.plan import FEW_ROWS
from isobit.kernels.triton.launch import launch
from isobit.kernels.triton.numbers import block_scale, from_e4m3, to_e4m3
from isobit.precision import BLOCK, E4M3, QTensor, QuantSpec, along_rows

INFINITY = tl.constexpr(0x7F800000)

_TILES = {"1x128": (16, 128, 4), "128x1": (128, 64, 16), "128x128": (128, 128, 16)}
"""Rows and columns of a program's tile, and its warps: 16 to 32 elements a thread."""
BOTH_WARPS = 16
"""Of a tile of 128 x 128 that is quantized both ways."""
_WIDEST = 16384
_ALIGNED = 16  # bytes of the widest store


@triton.jit
def largest(x, axis: tl.constexpr):
    """Return the bits of the largest magnitudes of float32 `x` along an axis (int32, of all if
    None).

    Compared as integers, infinity is above every number and NaN above infinity, so that neither is
    lost.
    """
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)


@triton.jit
def scale_or_flag(bits, flag_ptr, UE8M0: tl.constexpr):
    """Return the float32 scales of blocks whose `largest` magnitude is given; set the flag where
    that is not finite."""
    tl.store(flag_ptr + bits * 0, 1, mask=bits >= INFINITY)
    return block_scale(bits.to(tl.float32, bitcast=True), UE8M0)


@triton.jit
def codes(x, scale, UE8M0: tl.constexpr):
    """Return E4M3 codes (uint8) of float32 `x` under scales that broadcast to it; `to_e4m3`
    saturates.

    Under a NaN scale codes may be any: their values are NaN.
    """
    if UE8M0:
        # the reciprocal of a power of two is one too, with the exponent mirrored: the product is
        # the quotient
        return to_e4m3(
            x * (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        )
    else:
        return to_e4m3(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))


@triton.jit
def _by_rows(
    x, scale_ptr, flag_ptr, row, across, rows, ACROSS: tl.constexpr, BESIDE: tl.constexpr,
    UE8M0: tl.constexpr,
):  # fmt: skip
    """Return codes of a tile that is a block of 128 columns, number `across` of ACROSS, with a
    scale for each row, which is stored."""
    scale = scale_or_flag(largest(x, 1), flag_ptr, UE8M0)
    if BESIDE:
        at = tl.cast(rows, tl.int64) * across + row
    else:
        at = row.to(tl.int64) * ACROSS + across
    tl.store(scale_ptr + at, scale, mask=row < rows)
    return codes(x, scale[:, None], UE8M0)


@triton.jit
def _by_columns(
    x, scale_ptr, flag_ptr, column, down, blocks, COLUMNS: tl.constexpr, FLAT: tl.constexpr,
    UE8M0: tl.constexpr,
):  # fmt: skip
    """Return codes of a tile that is a block of 128 rows, number `down` of `blocks`, with a scale
    for each column; scales are stored [COLUMNS, blocks] where FLAT, else [blocks, COLUMNS]."""
    scale = scale_or_flag(largest(x, 0), flag_ptr, UE8M0)
    at = column.to(tl.int64) * blocks + down if FLAT else down.to(tl.int64) * COLUMNS + column
    tl.store(scale_ptr + at, scale, mask=column < COLUMNS)
    return codes(x, scale[None, :], UE8M0)


@triton.jit
def _save(found, data_ptr, first, start, rows, COLUMNS: tl.constexpr, LIKE: tl.constexpr):
    """Store a tile of codes, from row `first` and column `start` on, to [rows, COLUMNS]; LIKE: the
    type that they were loaded as."""
    i, column = tl.arange(0, found.shape[0]), start + tl.arange(0, found.shape[1])
    inside = (i < rows - first)[:, None] & (column < COLUMNS)[None, :]
    out = data_ptr + first.to(tl.int64) * COLUMNS + i[:, None] * COLUMNS + column[None, :]
    # left alone, Triton stores 16 codes a thread, and spreads the loads of wider elements to fit
    out = tl.max_contiguous(out, [1, 128 // LIKE.primitive_bitwidth])
    tl.store(out, found, mask=inside)


@triton.jit
def _save_turned(found, data_ptr, first, start, pitch, COLUMNS: tl.constexpr):
    """Store the codes transposed, to [COLUMNS, pitch]."""
    row, j = first + tl.arange(0, found.shape[0]), tl.arange(0, found.shape[1])
    inside = (j < COLUMNS - start)[:, None] & (row < pitch)[None, :]
    out = data_ptr + start.to(tl.int64) * pitch + j[:, None] * pitch + row[None, :]
    tl.store(out, tl.trans(found), mask=inside)


@triton.jit(do_not_specialize=["rows", "old_row", "old_step"])
def _tiles(
    x_ptr, old_ptr, data_ptr, scale_ptr, flag_ptr, rows, stride, pitch, old_row, old_step,
    COLUMNS: tl.constexpr, OLD_BLOCK: tl.constexpr, GRANULARITY: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BESIDE: tl.constexpr, UE8M0: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the scales and codes of a tile [HIGH, WIDE]; `old_ptr` are the scales of an `x` that
    is codes itself, with strides `old_row` and `old_step`. BESIDE: the scales' layout is that of
    `empty` for many rows, all rows of one block next to each other.

    `pitch` is the row stride of the result: COLUMNS, or of a transposed one the number of rows,
    rounded up to 16, on which wide stores depend; the padding is written, as zeros.
    """
    ACROSS: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    tile = tl.program_id(0)
    down, across = tile // ACROSS, tile % ACROSS
    first = (down * HIGH).to(tl.int64)
    i, j = tl.arange(0, HIGH), tl.arange(0, WIDE)
    row, column = down * HIGH + i, across * WIDE + j
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    x = tl.load(
        x_ptr + first * stride + i[:, None] * stride + column[None, :], mask=inside, other=0
    )
    if old_ptr is None:
        x = x.to(tl.float32)
    else:
        old = old_ptr + (first + i) * old_row + (across * WIDE // OLD_BLOCK).to(tl.int64) * old_step
        x = from_e4m3(x) * tl.load(old, mask=row < rows, other=0.0)[:, None]
    if GRANULARITY == "1x128":
        coded = _by_rows(x, scale_ptr, flag_ptr, row, across, rows, ACROSS, BESIDE, UE8M0)
    elif GRANULARITY == "128x1":
        flat: tl.constexpr = TRANSPOSED and not BESIDE
        coded = _by_columns(
            x, scale_ptr, flag_ptr, column, down, (rows + HIGH - 1) // HIGH, COLUMNS, flat, UE8M0
        )
    else:
        scale = scale_or_flag(tl.max(largest(x, 1), 0), flag_ptr, UE8M0)
        tl.store(scale_ptr + tile, scale)
        coded = codes(x, scale, UE8M0)
    if TRANSPOSED:
        _save_turned(coded, data_ptr, down * HIGH, across * WIDE, pitch, COLUMNS)
    else:
        _save(coded, data_ptr, down * HIGH, across * WIDE, rows, COLUMNS, x_ptr.dtype.element_ty)


@triton.jit
def save_both_ways(
    x, data_ptr, scale_ptr, turned_ptr, turned_scale_ptr, flag_ptr, down, across, rows, pitch,
    COLUMNS: tl.constexpr, LIKE: tl.constexpr, BESIDE: tl.constexpr, TURNED_BESIDE: tl.constexpr,
    UE8M0: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the codes of a float32 tile x [BLOCK, BLOCK], number (`down`, `across`) of [rows,
    COLUMNS], with a scale for each row, and, transposed, with one for each column; as `_tiles`
    makes them one after the other from input of type LIKE."""
    first, start = down * BLOCK, across * BLOCK
    i = tl.arange(0, BLOCK)
    STEPS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    tile = _by_rows(x, scale_ptr, flag_ptr, first + i, across, rows, STEPS, BESIDE, UE8M0)
    _save(tile, data_ptr, first, start, rows, COLUMNS, LIKE)
    tile = _by_columns(
        x, turned_scale_ptr, flag_ptr, start + i, down, (rows + BLOCK - 1) // BLOCK, COLUMNS,
        not TURNED_BESIDE, UE8M0,
    )  # fmt: skip
    _save_turned(tile, turned_ptr, first, start, pitch, COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def _both_ways(
    x_ptr, data_ptr, scale_ptr, turned_ptr, turned_scale_ptr, flag_ptr, rows, stride, pitch,
    COLUMNS: tl.constexpr, BESIDE: tl.constexpr, TURNED_BESIDE: tl.constexpr, UE8M0: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize a tile [BLOCK, BLOCK] of x by `save_both_ways`."""
    ACROSS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    down, across = tl.program_id(0) // ACROSS, tl.program_id(0) % ACROSS
    i = tl.arange(0, BLOCK)
    row, column = down * BLOCK + i, across * BLOCK + i
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = (down * BLOCK).to(tl.int64) * stride + i[:, None] * stride + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    save_both_ways(
        x, data_ptr, scale_ptr, turned_ptr, turned_scale_ptr, flag_ptr, down, across, rows, pitch,
        COLUMNS, x_ptr.dtype.element_ty, BESIDE, TURNED_BESIDE, UE8M0, BLOCK,
    )  # fmt: skip


@triton.jit
def _rows(
    x_ptr, data_ptr, scale_ptr, flag_ptr, stride,
    COLUMNS: tl.constexpr, UE8M0: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantize a row with one scale, in steps of WIDE columns; a row of one step is read once, a
    longer one twice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    x_ptr += row * stride
    data_ptr += row * COLUMNS
    x = tl.load(x_ptr + column, mask=column < COLUMNS, other=0).to(tl.float32)
    bits = largest(x, 0)
    for step in range(1, STEPS):
        at = step * WIDE + column
        bits = tl.maximum(
            bits, largest(tl.load(x_ptr + at, mask=at < COLUMNS, other=0).to(tl.float32), 0)
        )
    scale = scale_or_flag(bits, flag_ptr, UE8M0)
    tl.store(scale_ptr + row, scale)
    tl.store(data_ptr + column, codes(x, scale, UE8M0), mask=column < COLUMNS)
    for step in range(1, STEPS):
        at = step * WIDE + column
        x = tl.load(x_ptr + at, mask=at < COLUMNS, other=0).to(tl.float32)
        tl.store(data_ptr + at, codes(x, scale, UE8M0), mask=at < COLUMNS)


def supported(spec: QuantSpec) -> bool:
    """Return whether `quantize` computes this spec."""
    return (
        spec.format is E4M3
        and spec.granularity in (*_TILES, "row")
        and spec.scale in ("fp32", "ue8m0")
    )


def empty(
    rows: int, columns: int, spec: QuantSpec, device: torch.device, pitch: int | None = None
) -> QTensor:
    """Return a quantized matrix [rows, columns] whose codes and scales are not yet written. Rows of
    codes are `pitch` bytes apart; by default they are contiguous.

    Of more than FEW_ROWS rows with their own scale for each block, the scales of neighbouring
    rows stand side by side, as products load them (`lies_beside`); all others are contiguous.
    """
    high, wide = spec.block((rows, columns))
    data = torch.empty(rows, pitch or columns, dtype=E4M3.dtype, device=device)[:, :columns]
    sizes = (-(-rows // high), -(-columns // wide))
    scale = (
        torch.empty(sizes[::-1], device=device).t()
        if _many(rows, spec)
        else torch.empty(sizes, device=device)
    )
    return QTensor(data, scale, spec)


def _many(rows: int, spec: QuantSpec) -> bool:
    return rows > FEW_ROWS and spec.granularity == "1x128"


def lies_beside(made: QTensor) -> bool:
    """Return whether `empty` made these scales [R, L] with strides (1, R)."""
    return _many(made.shape[0], made.spec)


def quantize(x: Tensor, spec: QuantSpec, flag: Tensor) -> QTensor:
    """Return `isobit.precision.quantize` of a BF16 or float32 matrix [R, C], bit for bit; codes are
    contiguous, scales as `empty` has them.

    `flag` [1] int32 becomes 1 where `x` holds NaN or an infinity. Rows may have any stride.
    """
    assert x.ndim == 2, f"quantize expects a matrix, got shape {tuple(x.shape)}"
    assert supported(spec), f"no kernel quantizes to {spec}"
    x = _with_rows(x)
    rows, columns = x.shape
    made = empty(rows, columns, spec, x.device)
    if x.numel() == 0:
        return made
    ue8m0 = spec.scale == "ue8m0"
    if spec.granularity == "row":
        wide = min(triton.next_power_of_2(columns), _WIDEST)
        launch(
            _rows, (rows,), x, made.data.view(torch.uint8), made.scale, flag, x.stride(0),
            COLUMNS=columns, UE8M0=ue8m0, WIDE=wide, STEPS=-(-columns // wide),
            num_warps=warps_for(wide),
        )  # fmt: skip
    else:
        _launch_tiles(x, None, made, spec, flag, transposed=False)
    return made


def quantize_along_tokens(x: Operand, spec: QuantSpec, flag: Tensor) -> QTensor:
    """Return xᵀ [C, T] of x [T, C], quantized in blocks of 128 tokens: codes [C, T] and scales [C,
    ceil(T / 128)], as `empty` has them.

    Rows of codes are a multiple of 16 bytes apart, so that any T is stored 16 codes at a time and
    by one binary. The bits are those of `quantize(values of x, 128x1).transpose()`. `x` is a BF16
    or float32 matrix, or quantized with blocks along its rows (`1x128` or `row`): its values are
    then restored in registers. `spec` is that of `x` or of a gradient; `flag` as of `quantize`.
    """
    along = along_rows(spec)
    refusal = f"no kernel quantizes {spec} along the tokens"
    assert along.granularity == "128x1", refusal
    assert supported(along), refusal
    rows, columns = x.shape
    values = x.data.view(torch.uint8) if isinstance(x, QTensor) else x
    made = empty(
        columns, rows, along.transpose(), values.device, pitch=-(-rows // _ALIGNED) * _ALIGNED
    )
    if rows * columns > 0:
        _launch_tiles(
            _with_rows(values),
            x if isinstance(x, QTensor) else None,
            made,
            along,
            flag,
            transposed=True,
        )
    return made


def quantize_both_ways(x: Tensor, spec: QuantSpec, flag: Tensor) -> tuple[QTensor, QTensor]:
    """Return (`quantize`, `quantize_along_tokens`) of a BF16 or float32 matrix, the bits of the two
    in turn; for `1x128` of one reading."""
    if spec.granularity != "1x128" or x.numel() == 0:
        return quantize(x, spec, flag), quantize_along_tokens(x, spec, flag)
    x = _with_rows(x)
    rows, columns = x.shape
    made, turned = empty_both_ways(rows, columns, spec, x.device)
    launch(
        _both_ways, (-(-rows // BLOCK) * -(-columns // BLOCK),), x, made.data.view(torch.uint8),
        made.scale, turned.data.view(torch.uint8), turned.scale, flag, rows, x.stride(0),
        turned.data.stride(0),
        COLUMNS=columns, BESIDE=lies_beside(made), TURNED_BESIDE=lies_beside(turned),
        UE8M0=spec.scale == "ue8m0", BLOCK=BLOCK, num_warps=BOTH_WARPS,
    )  # fmt: skip
    return made, turned


def empty_both_ways(
    rows: int, columns: int, spec: QuantSpec, device: torch.device
) -> tuple[QTensor, QTensor]:
    """Return the unwritten results of `quantize` and `quantize_along_tokens`."""
    assert supported(spec), f"no kernel quantizes to {spec}"
    along, pitch = along_rows(spec).transpose(), -(-rows // _ALIGNED) * _ALIGNED
    return empty(rows, columns, spec, device), empty(columns, rows, along, device, pitch)


def warps_for(elements: int) -> int:
    """Return the warps of a program that holds `elements` elements: 16 of them a thread where that
    takes 1 to 16 warps."""
    return min(max(triton.next_power_of_2(elements) // 512, 1), 16)


def _with_rows(x: Tensor) -> Tensor:
    """Return `x` with contiguous columns, of whatever row stride."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _launch_tiles(
    values: Tensor,
    old: QTensor | None,
    made: QTensor,
    spec: QuantSpec,
    flag: Tensor,
    *,
    transposed: bool,
) -> None:
    rows, columns = values.shape
    high, wide, warps = _TILES[spec.granularity]
    if old is not None:
        assert old.block[0] == 1, f"rows of an operand share scales: {old.spec}"
        assert old.block[1] in (BLOCK, columns), f"no kernel reads blocks of {old.spec}"
    launch(
        _tiles, (-(-rows // high) * -(-columns // wide),),
        values, None if old is None else old.scale, made.data.view(torch.uint8), made.scale, flag,
        rows, values.stride(0), made.data.stride(0),
        *((0, 0) if old is None else old.scale.stride()),
        COLUMNS=columns, OLD_BLOCK=BLOCK if old is None else old.block[1],
        GRANULARITY=spec.granularity,
        TRANSPOSED=transposed, BESIDE=lies_beside(made), UE8M0=spec.scale == "ue8m0", HIGH=high,
        WIDE=wide,
        num_warps=warps,
    )  # fmt: skip

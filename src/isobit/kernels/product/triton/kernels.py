"""The kernels of matrix products: FP8 blocks, plain operands, nibbles, and the ordered sum of
chunks.

A tile of b (weights) [BLOCK_N, step] times a tile of a (tokens) [step, BLOCK_M]: b on the 64-high
side of the matrix instruction, and the sum transposed on its way out. With TOKENS_FIRST the
operands change places, and the sum is [BLOCK_M, BLOCK_N] at once. K ascends. A chunk's sum starts
from zero; chunk sums are added ascending in float32, in registers (CHUNKS of them) or, where each
chunk has its own programs (PARTIAL), by `ordered_sum`: the same additions, so the same bits. The
bias is added in float32, before the one rounding. With ADD the result, float32, is added to what y
holds: one addition an element, as `y += result` has it.

Left out: which tiles and chunks (`plan.py`), and the operators (`product.py`).
"""

import triton
import triton.language as tl

from isobit.kernels.triton import numbers

GROUP = tl.constexpr(8)


@triton.jit
def _tile_of(program, rows, columns, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (tile along N, tile along M) of a program: groups of tiles along N go over all of M,
    to reuse caches."""
    tiles_n = (columns + BLOCK_N - 1) // BLOCK_N
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    group = program // (GROUP * tiles_m)
    first = group * GROUP
    high = tl.minimum(tiles_n - first, GROUP)
    inside = program - group * GROUP * tiles_m
    return first + inside % high, inside // high


@triton.jit
def along(x, FIRST: tl.constexpr):
    """Numbers for the rows of an operand, to be broadcast over a tile: [N, 1] of the FIRST one,
    [1, N] of the other."""
    if FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def _add_scaled(
    acc, part, a_scale, b_scale, B_ROW_SCALES: tl.constexpr, TOKENS_FIRST: tl.constexpr
):
    """Return acc + part · (a_scale · b_scale), by fma: b_scale for each of b's rows, or one for
    all."""
    if B_ROW_SCALES:
        scale = along(a_scale, TOKENS_FIRST) * along(b_scale, not TOKENS_FIRST)
    else:
        scale = tl.broadcast_to(along(a_scale * b_scale, TOKENS_FIRST), part.shape)
    return tl.fma(part, scale, acc)


@triton.jit
def _store(
    total, bias_ptr, y_ptr, chunk, n, m, rows, columns,
    HAS_BIAS: tl.constexpr, PARTIAL: tl.constexpr, ADD: tl.constexpr,
    TOKENS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Write a tile [BLOCK_N, BLOCK_M], of TOKENS_FIRST [BLOCK_M, BLOCK_N], to y [M, N], or add it
    with ADD, or write it to chunk's [M, N] of the partial sums."""
    y = total if TOKENS_FIRST else tl.trans(total)
    at = m.to(tl.int64)[:, None] * columns + n[None, :]
    if PARTIAL:
        at += chunk.to(tl.int64) * rows * columns
    elif HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    if ADD and not PARTIAL:
        y = tl.load(y_ptr + at, mask=inside, other=0.0) + y
    tl.store(y_ptr + at, numbers.cast(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "a_scale_block"])
def block_product(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, bias_ptr, y_ptr,
    rows, columns, inner, a_row, a_scale_row, a_scale_block, b_row, b_scale_row, b_scale_block,
    steps, chunk_steps,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, IN_CHUNKS: tl.constexpr, EVEN_K: tl.constexpr,
    B_ROW_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, PARTIAL: tl.constexpr, ADD: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute FP8 codes (uint8, K contiguous): for each block of 128 along K, (codes · codes) ·
    (scale_a · scale_b), the sum of a block from zero, the blocks added by fma. Scales of b: one for
    every row, or for every 128 rows.

    A thread has two rows of a sum, and a quarter of the columns. So where a has its own scales
    for each row and b one for all, TOKENS_FIRST leaves a thread two scales to multiply by, where it
    would have as many as it has columns.
    """
    tile_n, tile_m = _tile_of(tl.program_id(0), rows, columns, BLOCK_N, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, 128)
    # rows beyond the edge repeat the last one: loads need no mask, and stores leave them out
    b_at = tl.minimum(n, columns - 1).to(tl.int64)
    a_at = tl.minimum(m, rows - 1).to(tl.int64)
    start = tl.program_id(1) * chunk_steps
    stop = tl.minimum(start + chunk_steps, steps) if PARTIAL else steps
    inner_at = start * 128 + k
    b_tile = numbers.e4m3_pointer(b_ptr) + along(b_at, not TOKENS_FIRST) * b_row
    a_tile = numbers.e4m3_pointer(a_ptr) + along(a_at, TOKENS_FIRST) * a_row
    b_tile += along(inner_at, TOKENS_FIRST)
    a_tile += along(inner_at, not TOKENS_FIRST)
    # as offsets from one pointer: where the scales of neighbouring rows are neighbours, they need
    # no registers
    a_scales = a_scale_ptr + tile_m * BLOCK_M * a_scale_row + start * a_scale_block
    a_local = tl.arange(0, BLOCK_M)
    b_group = b_at if B_ROW_SCALES else tile_n * BLOCK_N // 128
    b_scales = b_scale_ptr + b_group * b_scale_row + start * b_scale_block
    shape: tl.constexpr = (BLOCK_M, BLOCK_N) if TOKENS_FIRST else (BLOCK_N, BLOCK_M)
    total = tl.zeros(shape, tl.float32)
    acc = tl.zeros(shape, tl.float32)
    # scales are loaded a step ahead: nothing else hides the way to them, which takes as long as the
    # step's instructions
    inside = a_local < rows - tile_m * BLOCK_M
    a_scale = tl.load(a_scales + a_local * a_scale_row, mask=inside, other=0.0)
    b_scale = tl.load(b_scales)
    for step in range(numbers.steps(start), numbers.steps(stop)):
        if IN_CHUNKS:
            fresh = step % chunk_steps == 0
            if fresh:
                total += acc
                acc = tl.zeros(shape, tl.float32)
        ahead = tl.where(step + 1 < stop, 1, 0)  # the last step's are loaded again, and not used
        a_scales += ahead * a_scale_block
        b_scales += ahead * b_scale_block
        next_a = tl.load(a_scales + a_local * a_scale_row, mask=inside, other=0.0)
        next_b = tl.load(b_scales)
        left = inner - step * 128
        if TOKENS_FIRST:
            a, b = numbers.load_step(a_tile, b_tile, k, left, EVEN_K)
            part = numbers.dot(a, b, tl.zeros(shape, tl.float32))
        else:
            b, a = numbers.load_step(b_tile, a_tile, k, left, EVEN_K)
            part = numbers.dot(b, a, tl.zeros(shape, tl.float32))
        acc = _add_scaled(acc, part, a_scale, b_scale, B_ROW_SCALES, TOKENS_FIRST)
        a_scale, b_scale = next_a, next_b
        b_tile += 128
        a_tile += 128
    total = total + acc if IN_CHUNKS else acc
    _store(
        total, bias_ptr, y_ptr, tl.program_id(1), n, m, rows, columns, HAS_BIAS, PARTIAL, ADD,
        TOKENS_FIRST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def plain_product(
    a_ptr, b_ptr, bias_ptr, y_ptr, rows, columns, inner, a_row, a_column, b_row, b_column, steps,
    chunk_steps,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, IN_CHUNKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTIAL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute BF16 or FP32 operands with any strides: one float32 sum for each chunk of K, carried
    through all its steps."""
    tile_n, tile_m = _tile_of(tl.program_id(0), rows, columns, BLOCK_N, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    start = tl.program_id(1) * chunk_steps
    stop = tl.minimum(start + chunk_steps, steps) if PARTIAL else steps
    first = (start * BLOCK_K + k).to(tl.int64)
    b_tile = (
        b_ptr + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * b_row + first[None, :] * b_column
    )
    a_tile = (
        a_ptr + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * a_row + first[:, None] * a_column
    )
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(numbers.steps(start), numbers.steps(stop)):
        if IN_CHUNKS:
            fresh = step % chunk_steps == 0
            if fresh:
                total += acc
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        b, a = numbers.load_step(b_tile, a_tile, k, inner - step * BLOCK_K, EVEN_K)
        acc = numbers.dot(b, a, acc)
        b_tile += BLOCK_K * b_column
        a_tile += BLOCK_K * a_column
    total = total + acc if IN_CHUNKS else acc
    _store(total, bias_ptr, y_ptr, tl.program_id(1), n, m, rows, columns, HAS_BIAS, PARTIAL, ADD)


@triton.jit(do_not_specialize=["rows"])
def nibble_product(
    a_ptr, b_ptr, b_scale_ptr, common_ptr, bias_ptr, y_ptr, rows, columns, inner, a_row, a_column,
    steps, chunk_steps,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, IN_CHUNKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTIAL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute `plain_product` of b's values in a's type, BF16 or FP32: codes two to a byte [N, K /
    2] with scales [N, K / 16], decoded as they are loaded."""
    tile_n, tile_m = _tile_of(tl.program_id(0), rows, columns, BLOCK_N, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    start = tl.program_id(1) * chunk_steps
    stop = tl.minimum(start + chunk_steps, steps) if PARTIAL else steps
    first = (start * BLOCK_K + k).to(tl.int64)
    b_row = tl.minimum(n, columns - 1).to(tl.int64)[:, None]
    b_tile = b_ptr + b_row * (inner // 2) + (first // 2)[None, :]
    b_scales = b_scale_ptr + b_row * (inner // 16) + (first // 16)[None, :]
    a_tile = (
        a_ptr + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * a_row + first[:, None] * a_column
    )
    common = tl.load(common_ptr)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(numbers.steps(start), numbers.steps(stop)):
        if IN_CHUNKS:
            fresh = step % chunk_steps == 0
            if fresh:
                total += acc
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        b, a = numbers.load_step(b_tile, a_tile, k, inner - step * BLOCK_K, EVEN_K)
        if EVEN_K:
            scales = tl.load(b_scales)
        else:
            scales = tl.load(b_scales, mask=(k < inner - step * BLOCK_K)[None, :], other=0)
        weights = numbers.from_nibbles(b, k[None, :], scales, common)
        acc = numbers.dot(numbers.cast(weights, a.dtype), a, acc)
        b_tile += BLOCK_K // 2
        b_scales += BLOCK_K // 16
        a_tile += BLOCK_K * a_column
    total = total + acc if IN_CHUNKS else acc
    _store(total, bias_ptr, y_ptr, tl.program_id(1), n, m, rows, columns, HAS_BIAS, PARTIAL, ADD)


@triton.jit(do_not_specialize=["rows"])
def ordered_sum(
    parts_ptr, bias_ptr, y_ptr, rows, columns,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y [M, N] = the partial sums [SPLITS, M, N] added ascending in float32, plus the bias,
    rounded once; or that is added to y with ADD."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * columns + n
    size = tl.cast(rows, tl.int64) * columns
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + at + chunk * size, mask=n < columns, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)
    if ADD:
        total = tl.load(y_ptr + at, mask=n < columns, other=0.0) + total
    tl.store(y_ptr + at, numbers.cast(total, y_ptr.dtype.element_ty), mask=n < columns)

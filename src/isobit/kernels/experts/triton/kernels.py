"""The kernels of products grouped by expert: the schedule of tiles, FProp and DGrad, WGrad and its
quantizer, and the sum over the experts of a token.

Rows sorted by expert are cut into tiles of at most `BLOCK_T` rows that never cross an expert's
border. How many tiles an expert has is known on the device only; so the grid is an upper bound from
the host, `schedule` writes down which expert and first row each tile has, and a surplus tile ends
at once. A short tile repeats its last row: loads need no mask, and stores leave the repetitions
out. Left out: launches (`grouped.py`).
"""

import triton
import triton.language as tl

from isobit.kernels.product.triton.kernels import along
from isobit.kernels.quantize.triton import largest, scale_or_flag
from isobit.kernels.triton import numbers


@triton.jit(do_not_specialize=["tiles"])
def schedule(
    offsets_ptr, tile_ptr, start_ptr, tiles,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute tile [2, tiles] int32: the expert of every tile, -1 for a surplus one, and its first
    row; start [EXPERTS + 1] int32: every expert's first tile, and their number."""
    e = tl.arange(0, PADDED)
    begin = tl.load(offsets_ptr + e, mask=e < EXPERTS, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + e + 1, mask=e < EXPERTS, other=0).to(tl.int32)
    share = (end - begin + BLOCK_T - 1) // BLOCK_T
    ends = tl.cumsum(share, 0)
    total = tl.sum(share)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    shift = tl.where(e[None, :] == expert[:, None], (begin - (ends - share) * BLOCK_T)[None, :], 0)
    row = tl.sum(shift, 1) + tile * BLOCK_T
    there = tile < total
    tl.store(tile_ptr + tile, tl.where(there, expert, -1), mask=tile < tiles)
    tl.store(tile_ptr + tiles + tile, tl.where(there, row, 0), mask=tile < tiles)
    if tl.program_id(0) == 0:
        tl.store(start_ptr + e, ends - share, mask=e < EXPERTS)
        tl.store(start_ptr + EXPERTS, total)


@triton.jit
def _store_rows(
    total, bias_ptr, y_ptr, expert, n, t, stop, COLUMNS: tl.constexpr,
    TOKENS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Store a tile [BLOCK_N, BLOCK_T], of TOKENS_FIRST [BLOCK_T, BLOCK_N], and the expert's bias if
    there is any, to the rows t below `stop` of y [R, COLUMNS], rounded once."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * COLUMNS + n, mask=n < COLUMNS, other=0.0)
        total += along(bias.to(tl.float32), not TOKENS_FIRST)
    at = t.to(tl.int64)[:, None] * COLUMNS + n[None, :]
    y = numbers.cast(total if TOKENS_FIRST else tl.trans(total), y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=(t < stop)[:, None] & (n < COLUMNS)[None, :])


@triton.jit
def _row_of(pick_ptr, t):
    """Return the original rows of the sorted rows t."""
    if pick_ptr is None:
        return t.to(tl.int64)
    else:
        return tl.load(pick_ptr + t)


@triton.jit(do_not_specialize=["tiles", "a_scale_row", "a_scale_block"])
def block_product(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, tile_ptr, offsets_ptr, pick_ptr,
    tiles, a_scale_row, a_scale_block, w_scale_expert, w_scale_row, w_scale_block,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    ROW_SCALES: tl.constexpr, STAGES: tl.constexpr, TOKENS_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute y [R, N] of codes (uint8) a [R, K] and w [E, N, K]: for each block of 128 along K,
    ascending, (codes · codes) summed from zero, times (scale_a · scale_w), added by fma. Scales of
    w: one a row, or one for 128 rows. The rows are a's at `pick` [R] int64, if that is there.
    TOKENS_FIRST: on the long side of the instruction, where a thread has few of their scales."""
    tiles_n: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    tile, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    expert = tl.load(tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    stop = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    t = tl.load(tile_ptr + tiles + tile) + tl.arange(0, BLOCK_T)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    a_at = _row_of(pick_ptr, tl.minimum(t, stop - 1))
    w_at = tl.minimum(n, COLUMNS - 1).to(tl.int64)
    a_tile = numbers.e4m3_pointer(a_ptr) + along(a_at, TOKENS_FIRST) * INNER
    w_at_all = along(expert * COLUMNS + w_at, not TOKENS_FIRST)
    w_tile = numbers.e4m3_pointer(w_ptr) + w_at_all * INNER + along(k, TOKENS_FIRST)
    a_tile += along(k, not TOKENS_FIRST)
    a_scales = a_scale_ptr + a_at * a_scale_row
    if ROW_SCALES:
        w_scales = w_scale_ptr + expert * w_scale_expert + w_at * w_scale_row
    else:
        w_scales = w_scale_ptr + expert * w_scale_expert + (tile_n * BLOCK_N // 128) * w_scale_row
    shape: tl.constexpr = (BLOCK_T, BLOCK_N) if TOKENS_FIRST else (BLOCK_N, BLOCK_T)
    steps: tl.constexpr = (INNER + 127) // 128
    acc = tl.zeros(shape, tl.float32)
    a_scale, w_scale = tl.load(a_scales), tl.load(w_scales)  # a step ahead, as in `product`
    for step in tl.range(0, steps, num_stages=STAGES):
        ahead = tl.where(step + 1 < steps, 1, 0)
        a_scales += ahead * a_scale_block
        w_scales += ahead * w_scale_block
        next_a, next_w = tl.load(a_scales), tl.load(w_scales)
        left = INNER - step * 128
        if TOKENS_FIRST:
            a, w = numbers.load_step(a_tile, w_tile, k, left, INNER % 128 == 0)
            partial = numbers.dot(a, w, tl.zeros(shape, tl.float32))
        else:
            w, a = numbers.load_step(w_tile, a_tile, k, left, INNER % 128 == 0)
            partial = numbers.dot(w, a, tl.zeros(shape, tl.float32))
        if ROW_SCALES:
            scale = along(a_scale, TOKENS_FIRST) * along(w_scale, not TOKENS_FIRST)
        else:
            scale = tl.broadcast_to(along(a_scale, TOKENS_FIRST) * w_scale, shape)
        acc = tl.fma(partial, scale, acc)
        a_scale, w_scale = next_a, next_w
        a_tile += 128
        w_tile += 128
    _store_rows(acc, bias_ptr, y_ptr, expert, n, t, stop, COLUMNS, TOKENS_FIRST)


@triton.jit(do_not_specialize=["tiles"])
def plain_product(
    a_ptr, w_ptr, bias_ptr, y_ptr, tile_ptr, offsets_ptr, pick_ptr, tiles, w_row, w_column,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the same of BF16 or FP32: one float32 sum over ascending K. w [E, N, K] may be the
    transpose of a storage."""
    tiles_n: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    tile, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    expert = tl.load(tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    stop = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    t = tl.load(tile_ptr + tiles + tile) + tl.arange(0, BLOCK_T)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_at = _row_of(pick_ptr, tl.minimum(t, stop - 1))
    w_at = (n if COLUMNS % BLOCK_N == 0 else tl.minimum(n, COLUMNS - 1)).to(tl.int64)
    a_tile = a_ptr + a_at[None, :] * INNER + k[:, None]
    w_tile = w_ptr + expert * COLUMNS * INNER + w_at[:, None] * w_row + k[None, :] * w_column
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in tl.range(0, (INNER + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        w, a = numbers.load_step(w_tile, a_tile, k, INNER - step * BLOCK_K, INNER % BLOCK_K == 0)
        acc = numbers.dot(w, a, acc)
        a_tile += BLOCK_K
        w_tile += BLOCK_K * w_column
    _store_rows(acc, bias_ptr, y_ptr, expert, n, t, stop, COLUMNS)


@triton.jit(do_not_specialize=["tiles", "x_scale_row", "x_scale_block"])
def quantize_tokens(
    x_ptr, x_scale_ptr, y_ptr, scale_ptr, flag_ptr, tile_ptr, offsets_ptr, tiles, x_scale_row,
    x_scale_block,
    COLUMNS: tl.constexpr, CODES: tl.constexpr, UE8M0: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return codes (uint8) y [C, 128 tiles] and scales [tiles, C] of x [R, C], transposed: a scale
    for every column of a tile of 128 tokens. x in BF16 or FP32, or CODES with scales for 128
    columns of a row. Beyond an expert's rows: zeros."""
    tile = tl.program_id(0)
    expert = tl.load(tile_ptr + tile)
    if expert < 0:
        return
    stop = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    t = tl.load(tile_ptr + tiles + tile) + tl.arange(0, 128)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (t < stop)[:, None] & (c < COLUMNS)[None, :]
    at = t.to(tl.int64)[:, None] * COLUMNS + c[None, :]
    if CODES:
        x = numbers.from_e4m3(tl.load(x_ptr + at, mask=inside, other=0))
        mask = (
            x_scale_ptr
            + t.to(tl.int64) * x_scale_row
            + (tl.program_id(1) * BLOCK_C // 128) * x_scale_block
        )
        x *= tl.load(mask, mask=t < stop, other=0.0)[:, None]
    else:
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = scale_or_flag(largest(x, 0), flag_ptr, UE8M0)
    tl.store(scale_ptr + tile.to(tl.int64) * COLUMNS + c, scale, mask=c < COLUMNS)
    codes = tl.trans(numbers.quantize_block(x, scale[None, :]))
    target = c.to(tl.int64)[:, None] * (tiles * 128) + tile * 128 + tl.arange(0, 128)[None, :]
    tl.store(y_ptr + target, codes, mask=(c < COLUMNS)[:, None])


@triton.jit
def _store_gradient(
    total, y_ptr, held_ptr, expert, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute a tile of an expert's gradient to y [E, N, K], or added to what y has where `held`
    [E] int32, if given, is 1."""
    at = (expert * ROWS + n)[:, None] * COLUMNS + k[None, :]
    inside = (n < ROWS)[:, None] & (k < COLUMNS)[None, :]
    if held_ptr is not None:
        held = tl.load(held_ptr + expert) != 0
        # selected, and not added with 0: -0 would become 0
        total = tl.where(held, tl.load(y_ptr + at, mask=inside & held, other=0.0) + total, total)
    tl.store(y_ptr + at, total, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def block_weight_gradient(
    g_ptr, g_scale_ptr, x_ptr, x_scale_ptr, y_ptr, held_ptr, start_ptr, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y [E, N, K] float32 of codes g [N, 128 tiles] and x [K, 128 tiles], both as
    `quantize_tokens` makes them: the expert's blocks of 128 tokens ascending, as `block_product`
    does those of K; added to y where `held`. An expert without rows is not written."""
    tiles_k: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    expert = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(start_ptr + expert), tl.load(start_ptr + expert + 1)
    if begin == end:
        return
    n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    token = tl.arange(0, 128)
    length = tiles.to(tl.int64) * 128
    # where tiles fit, the compiler has to see that neighbours are neighbours
    n_at = n if ROWS % BLOCK_N == 0 else tl.minimum(n, ROWS - 1)
    k_at = k if COLUMNS % BLOCK_K == 0 else tl.minimum(k, COLUMNS - 1)
    g_tile = numbers.e4m3_pointer(g_ptr) + n_at[:, None] * length + (begin * 128 + token)[None, :]
    x_tile = numbers.e4m3_pointer(x_ptr) + k_at[None, :] * length + (begin * 128 + token)[:, None]
    g_scales = g_scale_ptr + begin.to(tl.int64) * ROWS + n_at
    x_scales = x_scale_ptr + begin.to(tl.int64) * COLUMNS + k_at
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for _ in tl.range(numbers.steps(begin), numbers.steps(end), num_stages=STAGES):
        partial = numbers.dot(
            tl.load(g_tile), tl.load(x_tile), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        )
        acc = tl.fma(partial, tl.load(g_scales)[:, None] * tl.load(x_scales)[None, :], acc)
        g_tile += 128
        x_tile += 128
        g_scales += ROWS
        x_scales += COLUMNS
    _store_gradient(acc, y_ptr, held_ptr, expert, n, k, ROWS, COLUMNS)


@triton.jit
def plain_weight_gradient(
    g_ptr, x_ptr, y_ptr, held_ptr, offsets_ptr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y [E, N, K] float32 of g [R, N] and x [R, K] in BF16 or FP32: one float32 sum over
    the expert's rows, ascending; added to y where `held`. An expert without rows is not written."""
    tiles_k: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    expert = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    if begin == end:
        return
    n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    # where tiles fit, the compiler has to see that neighbours are neighbours
    n_at = n if ROWS % BLOCK_N == 0 else tl.minimum(n, ROWS - 1)
    k_at = k if COLUMNS % BLOCK_K == 0 else tl.minimum(k, COLUMNS - 1)
    token = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in tl.range(numbers.steps(begin), numbers.steps(end), BLOCK_T, num_stages=STAGES):
        inside = token < end - first
        t = first + token
        g = tl.load(g_ptr + t[None, :] * ROWS + n_at[:, None], mask=inside[None, :], other=0.0)
        x = tl.load(x_ptr + t[:, None] * COLUMNS + k_at[None, :], mask=inside[:, None], other=0.0)
        acc = numbers.dot(g, x, acc)
    _store_gradient(acc, y_ptr, held_ptr, expert, n, k, ROWS, COLUMNS)


@triton.jit
def sum_of_rows(
    x_ptr, place_ptr, gate_ptr, y_ptr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y [T, C]: the rows `place` [T, SLOTS] of x [R, C], times gates if GATED, added in the
    order of the slots."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        source = tl.load(place_ptr + row * SLOTS + slot)
        x = tl.load(x_ptr + source * COLUMNS + c, mask=c < COLUMNS, other=0.0).to(tl.float32)
        if GATED:
            x *= tl.load(gate_ptr + row * SLOTS + slot)
        total = x if slot == 0 else total + x
    tl.store(
        y_ptr + row * COLUMNS + c, numbers.cast(total, y_ptr.dtype.element_ty), mask=c < COLUMNS
    )


@triton.jit
def sum_of_rows_backward(
    dy_ptr, x_ptr, place_ptr, gate_ptr, dx_ptr, dgate_ptr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx [R, C] and dgate [T, SLOTS] of `sum_of_rows` with gates; BLOCK covers a row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * COLUMNS + c, mask=c < COLUMNS, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        at = tl.load(place_ptr + row * SLOTS + slot) * COLUMNS + c
        x = tl.load(x_ptr + at, mask=c < COLUMNS, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * SLOTS + slot)
        tl.store(dx_ptr + at, numbers.cast(dy * gate, dx_ptr.dtype.element_ty), mask=c < COLUMNS)
        tl.store(dgate_ptr + row * SLOTS + slot, tl.sum(dy * x))

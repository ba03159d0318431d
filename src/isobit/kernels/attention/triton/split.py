"""One split of a row's keys: scores, softmax and values, with the keys or the rows on the long side
of the matrix instruction.

A matrix instruction takes 64 of one operand's rows and as few as 16 of the other's. A tile is
scores [keys, rows] of KEYS_FIRST, else [rows, keys]; the sums over values are [channels, rows],
else [rows, channels]. Few rows, as in decoding, are a tile of 16 next to 64 keys, where they would
fill a fraction of 64 otherwise; many rows stand first, because then a row's largest score is found
inside a thread or four, and P needs no way through shared memory.

**Why both have the same bits.** An element of a product is the sum over the same 16 channels, or
keys, an instruction, in the same chain of instructions from zero; which operand is on which side,
and how many rows a tile has, is left to be the hardware's indifference: it multiplies exactly and
adds a sum's terms together. The largest score has no order. The sum of probabilities has one that
is written out: keys 8 apart are added, then neighbours, these over blocks in ascending order, and
at the end of a split neighbours in pairs, then pairs of pairs (`tree`). All else is elementwise.

**Codes.** PAIRED codes are read as words of two, so that one instruction unpacks two codes, and
products take the even channels first, then the odd ones. Keys become float16, which has every INT8
and E4M3 code, and queries float16 with a power of two for each row; values and probabilities are
bfloat16, whose range is a scale's. Left out: launches, and joining splits (`forward.py`).
"""

import triton
import triton.language as tl

from isobit.kernels.triton import numbers

NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def by_key(x, KEYS_FIRST: tl.constexpr):
    """Return a number for each key, to be broadcast over a tile of scores."""
    if KEYS_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def by_row(x, KEYS_FIRST: tl.constexpr):
    """Return a number for each row, to be broadcast over a tile of scores or of sums."""
    if KEYS_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def product(keys, rows, acc, KEYS_FIRST: tl.constexpr):
    """Return acc plus the product of the keys' operand [M, K] with the rows': [K, N] with
    KEYS_FIRST, else [N, K]."""
    if KEYS_FIRST:
        return numbers.dot(keys, rows, acc)
    else:
        return numbers.dot(rows, tl.trans(keys), acc)


@triton.jit
def queries(q, factor, PAIRED: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return (even channels, odd channels, factor [N] of their scores) of rows q [N, D], as
    operands; where codes are not PAIRED, all channels twice.

    Next to PAIRED codes they become float16, times the power of two that leaves a row's largest
    magnitude between 2^14 and 2^15: exact down to 2^-31 of it. The factor takes that back.
    """
    even, odd = q, q
    factor = tl.full([q.shape[0]], 1.0, tl.float32) * factor
    if PAIRED:
        x = q.to(tl.float32)
        exponent = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, 41)
        factor = factor * ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        x = (x * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if KEYS_FIRST:
        even, odd = tl.trans(even), tl.trans(odd)
    return even, odd, factor


@triton.jit
def together(even, odd, PAIRED: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return the sums [N, D] over values of even and odd channels, of `attend_split`."""
    if KEYS_FIRST:
        even, odd = tl.trans(even), tl.trans(odd)
    return tl.interleave(even, odd) if PAIRED else even


@triton.jit
def operands(x, like: tl.constexpr, PAIRED: tl.constexpr):
    """Return (even channels, odd channels) of what was loaded, as operands of this type: codes by
    their exact values."""
    if PAIRED:
        return numbers.pairs(x, like)
    elif (x.dtype == tl.uint8) or (x.dtype == tl.int8):
        values = numbers.cast(numbers.from_codes(x), like)
        return values, values
    else:
        return x, x


@triton.jit
def load_block(pointer, place, there, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    FINITE: tl.constexpr,
               CHANNELS_FIRST: tl.constexpr):  # fmt: skip
    """Return keys or values of the tokens at `place`, [keys, WIDTH], or with CHANNELS_FIRST [WIDTH,
    keys]; 0 beyond CHANNELS. Those that are not `there` are 0 too, but for FINITE codes: page 0 is
    read for them, and their scales are 0."""
    channel = tl.arange(0, WIDTH)
    at, mask = pointer + place[:, None] + channel[None, :], (channel < CHANNELS)[None, :]
    if not FINITE:
        mask = mask & there[:, None]
    mask = tl.broadcast_to(mask, at.shape)
    if CHANNELS_FIRST:
        # the same pointers, turned: no page is looked up again for another layout
        at, mask = tl.trans(at), tl.trans(mask)
    if FINITE and WIDTH == CHANNELS:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def load_scales(k_scale_ptr, v_scale_ptr, place, there, COPIES: tl.constexpr):
    """Return (scales of keys, scales of values) of the tokens at `place`; 0 of those that are not
    `there`.

    One load for both, of as many numbers as there are threads, some of them in COPIES: a smaller
    one would be repeated by all of them.
    """
    keys: tl.constexpr = place.shape[0]
    pointers = tl.where(tl.arange(0, 2 * COPIES) % 2 == 0, k_scale_ptr, v_scale_ptr)
    scales = tl.load(pointers[None, :] + place[:, None], mask=there[:, None], other=0.0)
    if COPIES == 2:
        scales, _ = tl.split(tl.trans(tl.reshape(scales, [keys, 2, 2]), 0, 2, 1))
    return tl.split(scales)


@triton.jit
def softmax(scores, factor, totals, peak, KEYS_FIRST: tl.constexpr):
    """Return a block's probabilities 2^(score · factor - peak), with the totals so far and the peak
    of both; and the factor of what was summed under the peak before."""
    shape: tl.constexpr = scores.shape
    keys: tl.constexpr = shape[0] if KEYS_FIRST else shape[1]
    rows: tl.constexpr = shape[1] if KEYS_FIRST else shape[0]
    highest = tl.maximum(peak, tl.max(scores, 0 if KEYS_FIRST else 1) * factor)
    base = tl.where(highest == NOTHING, 0.0, highest)
    decay = tl.exp2(peak - base)
    factor = tl.broadcast_to(by_row(factor, KEYS_FIRST), shape)
    weights = tl.exp2(tl.fma(scores, factor, tl.broadcast_to(by_row(-base, KEYS_FIRST), shape)))
    if KEYS_FIRST:
        sums = tl.sum(tl.sum(tl.reshape(weights, [keys // 16, 2, 4, 2, rows]), 1), 2)
        return weights, totals * decay[None, None, :] + sums, highest, decay
    else:
        sums = tl.sum(tl.sum(tl.reshape(weights, [rows, keys // 16, 2, 4, 2]), 2), 3)
        return weights, totals * decay[:, None, None] + sums, highest, decay


@triton.jit
def tree(totals, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return the sums [N] of `softmax`'s totals: neighbours in pairs, then pairs of pairs."""
    rows: tl.constexpr = totals.shape[2] if KEYS_FIRST else totals.shape[0]
    LEVELS: tl.constexpr = 2 if KEYS == 16 else 3 if KEYS == 32 else 4
    tl.static_assert(KEYS == 4 * 2**LEVELS)
    for level in tl.static_range(LEVELS):
        if KEYS_FIRST:
            totals = tl.sum(tl.reshape(totals, [2 ** (LEVELS - level - 1), 2, rows]), 1)
        else:
            totals = tl.sum(tl.reshape(totals, [rows, 2 ** (LEVELS - level - 1), 2]), 2)
    return tl.reshape(totals, [rows])


@triton.jit
def attend_split(
    even_q, odd_q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, first,
    stop, lowest,
    TOKEN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE_TOKEN: tl.constexpr, KEYS_PER_SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    COPIES: tl.constexpr, DTYPE: tl.constexpr, PAIRED: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return (sums over values of even channels, of odd channels, Σ 2^(s-peak) [N], peak = max s
    [N]) of the keys `first` to `stop`, KEYS_PER_SPLIT of them at the most; with a window, from the
    block of key `lowest` on. Channels are WIDTH, of which there are DIM; they are pairs where codes
    are PAIRED, and all are even where not."""
    rows: tl.constexpr = positions.shape[0]
    K_WIDTH: tl.constexpr = even_q.shape[0] if KEYS_FIRST else even_q.shape[1]
    FINITE: tl.constexpr = SCALED and k_ptr.dtype.element_ty.is_int_signed()
    even = tl.zeros([WIDTH, rows] if KEYS_FIRST else [rows, WIDTH], tl.float32)
    odd = even
    totals = tl.zeros(
        [BLOCK_KEYS // 16, 4, rows] if KEYS_FIRST else [rows, BLOCK_KEYS // 16, 4], tl.float32
    )
    peak = tl.full([rows], NOTHING, tl.float32)
    steps = (tl.minimum(stop - first, KEYS_PER_SPLIT) + BLOCK_KEYS - 1) // BLOCK_KEYS
    offsets = tl.arange(0, BLOCK_KEYS)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(lowest - first, 0) // BLOCK_KEYS
    ahead = first + begin * BLOCK_KEYS + offsets
    page = tl.load(table_ptr + ahead // PAGE_SIZE, mask=ahead < stop, other=0)
    for step in range(numbers.steps(begin), numbers.steps(steps)):
        key = first + step * BLOCK_KEYS + offsets
        there = key < stop
        # where a block is whole pages, places in them are the same in every block
        inside = offsets % PAGE_SIZE if BLOCK_KEYS % PAGE_SIZE == 0 else key % PAGE_SIZE
        address = page.to(tl.int64) * (PAGE_SIZE * TOKEN) + inside * TOKEN
        k = load_block(k_ptr, address, there, K_WIDTH, DIM, FINITE, False)
        v = load_block(v_ptr, address, there, WIDTH, DIM, FINITE, KEYS_FIRST)
        k_even, k_odd = operands(k, even_q.dtype, PAIRED)
        if not KEYS_FIRST:
            # before the scores, or there are not enough registers for all
            v_even, v_odd = operands(tl.trans(v), DTYPE, PAIRED)
        shape: tl.constexpr = [BLOCK_KEYS, rows] if KEYS_FIRST else [rows, BLOCK_KEYS]
        scores = product(k_even, even_q, tl.zeros(shape, tl.float32), KEYS_FIRST)
        if PAIRED:
            scores = product(k_odd, odd_q, scores, KEYS_FIRST)
        if SCALED:
            scale_at = page.to(tl.int64) * (PAGE_SIZE * SCALE_TOKEN) + inside * SCALE_TOKEN
            k_scale, v_scale = load_scales(k_scale_ptr, v_scale_ptr, scale_at, there, COPIES)
            scores = scores * by_key(k_scale, KEYS_FIRST)
        scores = tl.where(by_key(key, KEYS_FIRST) <= by_row(positions, KEYS_FIRST), scores, NOTHING)
        if WINDOW is not None:
            scores = tl.where(
                by_key(key, KEYS_FIRST) > by_row(positions - WINDOW, KEYS_FIRST), scores, NOTHING
            )
        weights, totals, peak, decay = softmax(scores, factor, totals, peak, KEYS_FIRST)
        if SCALED:
            weights = weights * by_key(v_scale, KEYS_FIRST)
        weights, decay = numbers.cast(weights, DTYPE), by_row(decay, KEYS_FIRST)
        if KEYS_FIRST:
            v_even, v_odd = operands(v, DTYPE, PAIRED)
        even = product(v_even, weights, even * decay, KEYS_FIRST)
        if PAIRED:
            odd = product(v_odd, weights, odd * decay, KEYS_FIRST)
        # the pages of the next block are known before it begins, so that its keys can be on their
        # way by then
        page = tl.load(
            table_ptr + (key + BLOCK_KEYS) // PAGE_SIZE, mask=key + BLOCK_KEYS < stop, other=0
        )
    return even, odd, tree(totals, BLOCK_KEYS, KEYS_FIRST), peak

"""Causal grouped-query attention over stored keys and values: one kernel for decoding, prefill in chunks and the
learner's packed rows.

softmax(q·kᵀ·scale)·v (Vaswani et al. 2017, eq. 1), with the running maximum and sum of Milakov and Gimelshein (2018)
over blocks of keys, as in FlashAttention (Dao et al. 2022). Exponentials are powers of two: scale · log2(e) is one
factor of the scores. Codes, E4M3 or INT8, are operands as they are: the scale of a token's key multiplies its column
of scores, that of its value multiplies its column of probabilities before these are rounded to the type of q. Sums are
float32, and that of the probabilities is of the unrounded ones.

**What decides the bits of a row.** Keys are cut into *splits* at fixed positions of the sequence, multiples of
`_KEYS_PER_SPLIT`; a split starts from nothing and takes its blocks in ascending order; splits are joined in ascending
order by one expression, `join`. Programs that see few rows leave their splits in memory, where `_join_splits` reads
them; others join in registers. The tile of scores is always `_BLOCK_ROWS` high, padded where there are fewer rows, so
that instructions and trees of sums are the same everywhere. What a row does not see has probability 0 and a factor of
1, and moves no bit as long as keys and values are finite; so splits and blocks below every row's window are left out.
The bits depend on the row's query, on the keys and values that it sees, and on its position: not on the batch, chunks,
pages, or where splits are joined (`tests/kernels/triton/test_attention.py`, `test_windows.py`). A head's sink is one
more part of its rows, without a value, joined last.

Left out: writing keys and values; the backward; formats other than E4M3, INT8 and those of q.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.stores import KVStore
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch, target
from isobit.kernels.types import Layout
from isobit.precision import E4M3, INT8

_BLOCK_ROWS = 64
_KEYS_PER_SPLIT = 512
_MOST_PARTIALS = 1 << 26  # numbers that splits may leave in memory, 256 MB; beyond, they are joined in registers
_NOTHING = tl.constexpr(float("-inf"))
_LN2, _LOG2E = tl.constexpr(math.log(2)), tl.constexpr(math.log2(math.e))


class Tiling(NamedTuple):
    """Keys of a block, warps of a program, and blocks on their way at once."""

    keys: int
    warps: int
    stages: int


def tiling(dim: int, dtype: torch.dtype) -> Tiling:
    """By head dimension, type of q and architecture: what compiles without spills (`benchmarks/cross_compile.py`)."""
    if dtype == torch.float32:
        return Tiling(16, 16, 1)
    if dim > 128:
        return Tiling(32, 8, 2)
    return Tiling(64, 8 if target().matrix == "warp" else 4, 3)


def attention(
    q: Tensor, store: KVStore, layout: Layout, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D] in q's type, lse [T, H] float32): row t at position p attends to keys 0 to p of its sequence,
    with a `window` to the last `window` of them; `sinks` [H] float32 are one score more for each head.

    q [T, H, D] is bfloat16 or float32; the store holds codes or q's type. All tensors are on one device and
    nothing is read on the host, so a CUDA graph can hold this; `layout.max_rows` and `layout.max_keys` are bounds.
    """
    rows, heads, dim = q.shape
    kv_heads, sequences = store.k.shape[1], layout.context.shape[0]
    assert store.k.dtype == (store.kv.format.stored if store.kv is not None else q.dtype)
    assert store.kv is None or store.kv.format in (E4M3, INT8), "this kernel reads E4M3 and INT8 codes"
    assert all(x.is_contiguous() for x in (q, store.k, store.v))
    group = triton.next_power_of_2(heads // kv_heads)
    assert group <= _BLOCK_ROWS
    tile_rows = _BLOCK_ROWS // group
    tiles, splits = -(-layout.max_rows // tile_rows), -(-layout.max_keys // _KEYS_PER_SPLIT)
    parallel = tiles == 1 and splits > 1 and splits * q.numel() <= _MOST_PARTIALS

    out, lse = torch.empty_like(q), torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    results = [out, lse, lse]
    if parallel:
        sizes = ((splits, rows, heads, dim), (splits, rows, heads), (splits, rows, heads))
        results = [torch.empty(size, dtype=torch.float32, device=q.device) for size in sizes]
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "BLOCK_DIM": max(16, triton.next_power_of_2(dim))}
    shape |= {"GROUP": group, "KEYS_PER_SPLIT": _KEYS_PER_SPLIT, "WINDOW": window}
    block = tiling(dim, q.dtype)
    assert _KEYS_PER_SPLIT % block.keys == 0
    launch(
        _attend, (sequences * kv_heads, tiles, splits if parallel else 1),
        q, store.k, store.v, store.k_scale, store.v_scale, layout.page_table, layout.row_start, layout.context,
        *results, None if parallel else sinks, scale * math.log2(math.e), rows, layout.page_table.stride(0),
        PAGE_SIZE=layout.page_size, SCALED=store.kv is not None, SCALE_TOKEN=0 if store.calibrated else kv_heads,
        SCALE_HEAD=0 if store.calibrated else 1, ROWS=tile_rows, BLOCK_KEYS=block.keys, PARALLEL=parallel,
        num_warps=block.warps, num_stages=block.stages, **shape,
    )  # fmt: skip
    if parallel:
        given = *results, layout.positions, sinks, out, lse, rows
        launch(_join_splits, (rows, kv_heads), *given, num_warps=2, **shape)
    return out, lse


@triton.jit
def join(acc, total, peak, more_acc, more_total, more_peak):
    """Two parts of a row's keys as one: Σ 2^(s-peak)·v [M, D], Σ 2^(s-peak) [M] and peak = max s [M], of each.

    A part without visible keys, (0, 0, -inf), leaves the other exactly as it is.
    """
    highest = tl.maximum(peak, more_peak)
    base = tl.where(highest == _NOTHING, 0.0, highest)
    factor, more_factor = tl.exp2(peak - base), tl.exp2(more_peak - base)
    acc = acc * factor[:, None] + more_acc * more_factor[:, None]
    return acc, total * factor + more_total * more_factor, highest


@triton.jit
def join_sinks(
    acc, total, peak, sink_ptr, head, lane, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr
):
    """The parts of rows with the sinks of their heads: row `lane` is of member lane % GROUP of the key head's group."""
    member = lane % GROUP
    heads: tl.constexpr = HEADS // KV_HEADS
    sink = tl.load(sink_ptr + head * heads + member, mask=member < heads, other=0.0) * _LOG2E
    return join(acc, total, peak, tl.zeros_like(acc), tl.full(total.shape, 1.0, tl.float32), sink)


@triton.jit
def finish(acc, total, peak):
    """(softmax·v [M, D], natural log-sum-exp [M]) of a row's joined parts."""
    # a zero's sign can depend on keys that a row does not see: adding +0 makes it +
    return acc * tl.div_rn(1.0, total)[:, None] + 0.0, (peak + tl.log2(total)) * _LN2


@triton.jit
def operand(x, like: tl.constexpr):
    """What was loaded as an operand beside others of type `like`: codes by their exact values."""
    if (x.dtype == tl.uint8) or (x.dtype == tl.int8):
        # by way of float32: Triton's cast from E4M3 to BF16 takes an instruction that Hopper runs at a low rate
        return numbers.cast(numbers.from_codes(x), like)
    else:
        return x


@triton.jit
def attend_split(
    q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, first, stop,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, SCALED: tl.constexpr,
    SCALE_TOKEN: tl.constexpr, SCALE_HEAD: tl.constexpr, KEYS_PER_SPLIT: tl.constexpr, WINDOW: tl.constexpr, lowest,
    BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """(acc, total, peak), as in `join`, of the keys `first` to `stop`, KEYS_PER_SPLIT of them at the most; with a
    window, from the block of key `lowest` on."""
    rows: tl.constexpr = q.shape[0]
    acc = tl.zeros([rows, BLOCK_DIM], tl.float32)
    total = tl.zeros([rows], tl.float32)
    peak = tl.full([rows], _NOTHING, tl.float32)
    channel = tl.arange(0, BLOCK_DIM)
    steps = (tl.minimum(stop - first, KEYS_PER_SPLIT) + BLOCK_KEYS - 1) // BLOCK_KEYS
    offsets = tl.arange(0, BLOCK_KEYS)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(lowest - first, 0) // BLOCK_KEYS
    ahead = first + begin * BLOCK_KEYS + offsets
    page = tl.load(table_ptr + ahead // PAGE_SIZE, mask=ahead < stop, other=0)
    if SCALED:
        scale_ptr = tl.where(tl.arange(0, 2) == 0, k_scale_ptr, v_scale_ptr)[None, :]
    for step in range(numbers.steps(begin), numbers.steps(steps)):
        key = first + step * BLOCK_KEYS + offsets
        there = key < stop
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        at = (slot * (KV_HEADS * DIM))[:, None] + channel[None, :]
        mask = there[:, None] & (channel < DIM)[None, :]
        k = operand(tl.load(k_ptr + at, mask=mask, other=0), q.dtype)
        v = operand(tl.load(v_ptr + at, mask=mask, other=0), q.dtype)
        scores = numbers.dot(q, tl.trans(k), tl.zeros([rows, BLOCK_KEYS], tl.float32))
        if SCALED:
            # one load for both, of as many numbers as there are threads: a smaller one would be repeated by all of them
            scale_at = scale_ptr + (slot * SCALE_TOKEN)[:, None]
            k_scale, v_scale = tl.split(tl.load(scale_at, mask=there[:, None], other=0.0))
            scores = scores * (k_scale * factor)[None, :]
        else:
            scores = scores * factor
        scores = tl.where(key[None, :] <= positions[:, None], scores, _NOTHING)
        if WINDOW is not None:
            scores = tl.where(key[None, :] > positions[:, None] - WINDOW, scores, _NOTHING)
        highest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(highest == _NOTHING, 0.0, highest)
        kept = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * kept + tl.sum(weights, 1)
        if SCALED:
            weights = weights * v_scale[None, :]
        acc = numbers.dot(numbers.cast(weights, q.dtype), v, acc * kept[:, None])
        peak = highest
        # the pages of the next block are known before it begins, so that its keys can be on their way by then
        page = tl.load(table_ptr + (key + BLOCK_KEYS) // PAGE_SIZE, mask=key + BLOCK_KEYS < stop, other=0)
    return acc, total, peak


@triton.jit
def attend_splits(
    q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, stop, sink_ptr, head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SCALED: tl.constexpr, SCALE_TOKEN: tl.constexpr, SCALE_HEAD: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr, WINDOW: tl.constexpr, lowest, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """`finish` of the keys up to `stop`, from the split of key `lowest` on."""
    acc = tl.zeros([q.shape[0], BLOCK_DIM], tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    peak = tl.full([q.shape[0]], _NOTHING, tl.float32)
    start = lowest // KEYS_PER_SPLIT * KEYS_PER_SPLIT
    for first in range(numbers.steps(start), numbers.steps(stop), KEYS_PER_SPLIT):
        more_acc, more_total, more_peak = attend_split(
            q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, first, stop,
            KV_HEADS, DIM, BLOCK_DIM, PAGE_SIZE, SCALED, SCALE_TOKEN, SCALE_HEAD, KEYS_PER_SPLIT, WINDOW, lowest,
            BLOCK_KEYS,
        )  # fmt: skip
        acc, total, peak = join(acc, total, peak, more_acc, more_total, more_peak)
    if sink_ptr is not None:
        acc, total, peak = join_sinks(
            acc, total, peak, sink_ptr, head, tl.arange(0, q.shape[0]), HEADS, KV_HEADS, GROUP
        )  # fmt: skip
    return finish(acc, total, peak)


@triton.jit
def places(
    row_start_ptr, sequence, head, tile,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Of every row in a tile: its number in the sequence, its place in [T, H], those of its channels in [T, H, D], and
    which of both there are.

    Asked before the keys and again after them: kept in between, the answer would take registers that there are not. So
    the loads are volatile, or the compiler would keep it.
    """
    start = tl.load(row_start_ptr + sequence, volatile=True)
    rows = (tl.load(row_start_ptr + sequence + 1, volatile=True) - start).to(tl.int32)
    lane = tl.arange(0, ROWS * GROUP)
    row, member = lane // GROUP, lane % GROUP
    channel = tl.arange(0, BLOCK_DIM)
    valid = (row < rows - tile * ROWS) & (member < HEADS // KV_HEADS)
    place = (start + tile * ROWS) * HEADS + head * (HEADS // KV_HEADS)
    among = row * HEADS + member
    at = place * DIM + ((among * DIM)[:, None] + channel[None, :])
    return place + among, at, valid, valid[:, None] & (channel < DIM)[None, :]


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, row_start_ptr, context_ptr, out_ptr, lse_ptr, total_ptr,
    sink_ptr, factor, num_rows, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, SCALED: tl.constexpr, SCALE_TOKEN: tl.constexpr,
    SCALE_HEAD: tl.constexpr, KEYS_PER_SPLIT: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PARALLEL: tl.constexpr,
):  # fmt: skip
    """ROWS consecutive rows of one sequence and the query heads of one key head: a tile of ROWS · GROUP rows. With
    PARALLEL the program computes one split and leaves it in out [splits, T, H, D], total and lse [splits, T, H] (lse is
    the peak); else it computes all of them and finishes."""
    sequence, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the rows with the most keys first
    rows = (tl.load(row_start_ptr + sequence + 1) - tl.load(row_start_ptr + sequence)).to(tl.int32)
    context = tl.load(context_ptr + sequence).to(tl.int32)
    stop = context + tl.minimum((tile + 1) * ROWS, rows)
    split = tl.program_id(2)
    if (tile * ROWS >= rows) | (split * KEYS_PER_SPLIT >= stop):
        return
    lowest = 0
    if WINDOW is not None:
        lowest = tl.maximum(context + tile * ROWS - WINDOW + 1, 0)
        if PARALLEL:  # noqa: SIM102 (a constant of the kernel, and a condition in it)
            if (split + 1) * KEYS_PER_SPLIT <= lowest:
                return
    place, at, valid, mask = places(
        row_start_ptr, sequence, head, tile, HEADS, KV_HEADS, DIM, BLOCK_DIM, GROUP, ROWS
    )  # fmt: skip
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    positions = context + tile * ROWS + tl.arange(0, ROWS * GROUP) // GROUP
    table_ptr += sequence.to(tl.int64) * table_stride
    k_ptr += head * DIM
    v_ptr += head * DIM
    if SCALED:
        k_scale_ptr += head * SCALE_HEAD
        v_scale_ptr += head * SCALE_HEAD
    if PARALLEL:
        acc, total, peak = attend_split(
            q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, split * KEYS_PER_SPLIT,
            stop, KV_HEADS, DIM, BLOCK_DIM, PAGE_SIZE, SCALED, SCALE_TOKEN, SCALE_HEAD, KEYS_PER_SPLIT, WINDOW, lowest,
            BLOCK_KEYS,
        )  # fmt: skip
        place, at, valid, mask = places(
            row_start_ptr, sequence, head, tile, HEADS, KV_HEADS, DIM, BLOCK_DIM, GROUP, ROWS
        )  # fmt: skip
        before = split * (num_rows.to(tl.int64) * HEADS)
        tl.store(out_ptr + before * DIM + at, acc, mask=mask)
        tl.store(lse_ptr + before + place, peak, mask=valid)
        tl.store(total_ptr + before + place, total, mask=valid)
    else:
        out, lse = attend_splits(
            q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, stop, sink_ptr, head, HEADS,
            KV_HEADS, DIM, BLOCK_DIM, GROUP, PAGE_SIZE, SCALED, SCALE_TOKEN, SCALE_HEAD, KEYS_PER_SPLIT, WINDOW, lowest,
            BLOCK_KEYS,
        )  # fmt: skip
        place, at, valid, mask = places(
            row_start_ptr, sequence, head, tile, HEADS, KV_HEADS, DIM, BLOCK_DIM, GROUP, ROWS
        )  # fmt: skip
        tl.store(out_ptr + at, numbers.cast(out, out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + place, lse, mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def _join_splits(
    part_ptr, part_peak_ptr, part_total_ptr, position_ptr, sink_ptr, out_ptr, lse_ptr, num_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GROUP: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One row and the query heads of one key head: its splits, which PARALLEL left, joined in ascending order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(position_ptr + row)
    splits = (position // KEYS_PER_SPLIT + 1).to(tl.int32)
    lowest = 0
    if WINDOW is not None:
        lowest = (tl.maximum(position - WINDOW + 1, 0) // KEYS_PER_SPLIT).to(tl.int32)
    member = tl.arange(0, GROUP)
    channel = tl.arange(0, BLOCK_DIM)
    valid = member < HEADS // KV_HEADS
    mask = valid[:, None] & (channel < DIM)[None, :]
    place = row * HEADS + head * (HEADS // KV_HEADS) + member
    at = (place * DIM)[:, None] + channel[None, :]
    acc = tl.zeros([GROUP, BLOCK_DIM], tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    peak = tl.full([GROUP], _NOTHING, tl.float32)
    for split in range(numbers.steps(lowest), numbers.steps(splits)):
        before = split * (num_rows.to(tl.int64) * HEADS)
        more_acc = tl.load(part_ptr + before * DIM + at, mask=mask, other=0.0)
        more_total = tl.load(part_total_ptr + before + place, mask=valid, other=0.0)
        more_peak = tl.load(part_peak_ptr + before + place, mask=valid, other=0.0)
        acc, total, peak = join(acc, total, peak, more_acc, more_total, more_peak)
    if sink_ptr is not None:
        acc, total, peak = join_sinks(acc, total, peak, sink_ptr, head, member, HEADS, KV_HEADS, GROUP)
    out, lse = finish(acc, total, peak)
    tl.store(out_ptr + at, numbers.cast(out, out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + place, lse, mask=valid)

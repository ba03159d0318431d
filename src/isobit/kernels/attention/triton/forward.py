"""Causal grouped-query attention over stored keys and values: one kernel for decoding, prefill in
chunks and the learner's packed rows.

softmax(q·kᵀ·scale)·v (Vaswani et al. 2017, eq. 1), with the running maximum and sum of Milakov and
Gimelshein (2018) over blocks of keys, as in FlashAttention (Dao et al. 2022). Exponentials are
powers of two: scale · log2(e) is one factor of the scores. Codes, E4M3 or INT8, are operands as
they are: the scale of a token's key multiplies its column of scores, that of its value multiplies
its column of probabilities before these are rounded to the type of q. Sums are float32, and that of
the probabilities is of the unrounded ones.

**What decides the bits of a row.** Keys are cut into *splits* at fixed positions of the sequence,
multiples of `_KEYS_PER_SPLIT`; a split starts from nothing and takes its blocks in ascending order
(`split.py`); splits are joined in ascending order by one expression, with the `factors` of both.
Programs that see few rows leave their splits in memory, where `_join_splits` reads them; others
join in registers. A tile has the query heads of one key head for some rows, padded where there are
fewer: 16 or 32 on the short side of the matrix instruction, or 64 or 128 on the long one, with the
same sums in the same order. What a row does not see has probability 0 and a factor of 1, and moves
no bit as long as keys and values are finite; so splits and blocks below every row's window are left
out. The bits depend on the row's query, on the keys and values that it sees, and on its position:
not on the batch, chunks, pages, tiles, or where splits are joined
(`tests/kernels/triton/test_attention.py`, `test_windows.py`). A head's sink is one more part of its
rows, without a value, joined last. The program that finishes a row can write its result as codes
(`attention_quantized`).

Left out: writing keys and values; the backward; formats other than E4M3, INT8 and those of q.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.attention.triton.split import NOTHING, attend_split, by_row, queries, together
from isobit.kernels.layout import Layout
from isobit.kernels.quantize.triton import (
    codes,
    empty,
    largest,
    lies_beside,
    quantize,
    scale_or_flag,
    supported,
)
from isobit.kernels.stores import KVStore
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch, roomy, target
from isobit.precision import BLOCK, E4M3, INT8, Format, QTensor, QuantSpec

_FEW_ROWS = 32
"""Up to this many rows of a tile keys are on the long side of the matrix instruction; 0 where
`put_rows_first`."""
_KEYS_PER_SPLIT = 512
_INSTRUCTION = 16
"""Channels that a matrix instruction takes at a time, of 16-bit operands."""
_MOST_PARTIALS = (
    1 << 26
)  # numbers that splits may leave in memory, 256 MB; beyond, they are joined in registers
_LN2, _LOG2E = tl.constexpr(math.log(2)), tl.constexpr(math.log2(math.e))


class Quantized(NamedTuple):
    """The destination of a result in codes, the flag that NaN sets, and whether it is written as
    numbers too."""

    made: QTensor
    flag: Tensor
    keep: bool


class Tiling(NamedTuple):
    """Rows of a tile, keys of a block, warps of a program, and blocks on their way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


def put_rows_first() -> None:
    """Put rows on the long side of every tile from now on, as in batches of many rows: the same
    bits, where exchanging the operands of an instruction does not keep them."""
    global _FEW_ROWS
    _FEW_ROWS = 0


def keys_first() -> bool:
    """Return whether tiles of few rows have the keys on the long side."""
    return _FEW_ROWS > 0


def tiling(rows: int, dim: int, dtype: torch.dtype) -> Tiling:
    """Return the tiles for sequences of `rows` rows, each counted for every query head of a key
    head; by head dimension, type of q and architecture: what compiles without spills
    (`benchmarks/cross_compile.py`). Keys are the same for all rows."""
    few, by_warp = rows <= _FEW_ROWS, target().matrix == "warp"
    short = 16 if rows <= 16 else 32
    if dtype == torch.float32:
        return Tiling(short if few else 64, 16, 4 if few else 16, 1)
    keys, stages = 32 if by_warp else 64, 2 if dim > 128 else 3
    if dim > 256:  # one block at a time has room, and on most cards 32 rows
        return Tiling(short if few else 64 if roomy() else 32, keys, 8, 1)
    if few:
        return Tiling(short, keys, 4, stages)
    if dim > 128:
        return Tiling(64, keys, 8, stages)
    if rows <= 64:
        return Tiling(64, keys, 8 if by_warp else 4, stages)
    return Tiling(128, keys, 8, 2 if target().matrix == "tensor" else stages)


def attention(
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    probabilities: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `attend`, as `Ops.attention`: results in q's type."""
    assert probabilities is None, "`check_precision` refuses it"
    return attend(q, store, layout, scale, window, sinks)


def attention_quantized(
    q: Tensor, store: KVStore, layout: Layout, scale: float, window: int | None,
    sinks: Tensor | None, probabilities: Format | None, spec: QuantSpec, flag: Tensor,
    keep: bool,
) -> tuple[Tensor | None, QTensor, Tensor]:  # fmt: skip
    """Compute `Ops.attention_quantized`: of BF16 heads of 128 channels, which are blocks of
    `1x128`, by the kernel that finishes a row, else by another. `flag` [1] int32 becomes 1 where
    out holds NaN or an infinity."""
    rows, heads, dim = q.shape
    fits = q.dtype == torch.bfloat16 and dim == BLOCK and spec.granularity == "1x128"
    if not (fits and supported(spec) and rows):
        out, lse = attention(q, store, layout, scale, window, sinks, probabilities)
        return out if keep else None, quantize(out.flatten(1), spec, flag), lse
    assert probabilities is None, "`check_precision` refuses it"
    made = empty(rows, heads * dim, spec, q.device)
    destination = Quantized(made, flag, keep)
    out, lse = attend(q, store, layout, scale, window, sinks, quantized=destination)
    return (out if keep else None), made, lse


def attend(
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    out_type: torch.dtype | None = None,
    quantized: Quantized | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, D] in q's type, lse [T, H] float32): row t at position p attends to keys 0
    to p of its sequence, with a `window` to the last `window` of them; `sinks` [H] float32 are one
    score more for each head. `out_type`: float32 for sums that are not rounded. `quantized`: out is
    also written as codes, or not as numbers at all.

    q [T, H, D] is bfloat16 or float32; the store holds codes or q's type; `scale` is positive. All
    tensors are on one device and nothing is read on the host, so a CUDA graph can hold this;
    `layout.max_rows` and `layout.max_keys` are bounds.
    """
    rows, heads, dim = q.shape
    kv_heads, sequences = store.k.shape[1], layout.context.shape[0]
    assert store.k.dtype == (store.kv.format.stored if store.kv is not None else q.dtype)
    assert store.kv is None or store.kv.format in (E4M3, INT8), (
        "this kernel reads E4M3 and INT8 codes"
    )
    assert scale > 0
    assert all(x.is_contiguous() for x in (q, store.k, store.v))
    group = triton.next_power_of_2(heads // kv_heads)
    block = tiling(layout.max_rows * group, dim, q.dtype)
    assert group <= block.rows
    tile_rows = block.rows // group
    tiles, splits = -(-layout.max_rows // tile_rows), -(-layout.max_keys // _KEYS_PER_SPLIT)
    parallel = tiles == 1 and splits > 1 and splits * q.numel() <= _MOST_PARTIALS

    out = torch.empty_like(q, dtype=out_type)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    finished, how = _finished(out, lse, quantized)
    nothing = (None,) * 3
    results = [*finished, None]
    if parallel:
        sizes = ((splits, rows, heads, dim), (splits, rows, heads), (splits, rows, heads))
        results = [torch.empty(size, dtype=torch.float32, device=q.device) for size in sizes]
        results = [*results[:2], *nothing, results[2]]
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "GROUP": group}
    shape |= {"KEYS_PER_SPLIT": _KEYS_PER_SPLIT, "WINDOW": window}
    assert _KEYS_PER_SPLIT % block.keys == 0
    launch(
        _attend, (sequences * kv_heads, tiles, splits if parallel else 1),
        q, store.k, store.v, store.k_scale, store.v_scale, layout.page_table, layout.row_start,
        layout.context,
        *results, None if parallel else sinks, scale * math.log2(math.e), rows,
        layout.page_table.stride(0),
        PAGE_SIZE=layout.page_size, SCALED=store.kv is not None,
        SCALE_TOKEN=0 if store.calibrated else kv_heads,
        SCALE_HEAD=0 if store.calibrated else 1, ROWS=tile_rows, PARALLEL=parallel,
        num_warps=block.warps, num_stages=block.stages, **shape, **how,
        **_operands(store, dim, q.dtype, block),
    )  # fmt: skip
    if parallel:
        shape |= {"BLOCK_DIM": max(16, triton.next_power_of_2(dim)), "STAGES": 6}
        sums, peaks, *_, totals = results
        arguments = sums, peaks, totals, layout.positions, sinks, *finished, rows
        launch(_join_splits, (rows, kv_heads), *arguments, num_warps=2, **shape, **how)
    return out, lse


def _finished(
    out: Tensor, lse: Tensor, quantized: Quantized | None
) -> tuple[tuple[Tensor | None, ...], dict[str, bool]]:
    """Return (where `store_finished` writes out, lse, codes, scales and a flag, how it does)."""
    if quantized is None:
        return (out, lse, None, None, None), {"UE8M0": False, "BESIDE": False}
    made, flag, keep = quantized
    pointers = out if keep else None, lse, made.data.view(torch.uint8), made.scale, flag
    return pointers, {"UE8M0": made.spec.scale == "ue8m0", "BESIDE": lies_beside(made)}


def _operands(store: KVStore, dim: int, dtype: torch.dtype, block: Tiling) -> dict[str, object]:
    """Return how a tile is multiplied: its sides, and whether codes are read in pairs. Channels are
    at least as many as one instruction takes, of pairs the even ones and the odd ones each."""
    keys_first = block.rows <= _FEW_ROWS
    paired = store.kv is not None and dtype == torch.bfloat16 and dim % 2 == 0
    width = max(2 * _INSTRUCTION if paired else _INSTRUCTION, triton.next_power_of_2(dim))
    values = width // 2 if paired else width
    if keys_first and dtype != torch.float32 and target().matrix != "warp":
        values = max(
            64, values
        )  # the long side of a warpgroup's instruction, though half of it be zeros
    copies = 2 if 16 * block.warps >= 2 * block.keys else 1
    return {"BLOCK_KEYS": block.keys, "BLOCK_DIM": width, "WIDTH": values, "COPIES": copies,
        "PAIRED": paired,
            "KEYS_FIRST": keys_first}  # fmt: skip


@triton.jit
def factors(peak, more_peak):
    """Return (factor, more_factor, highest), the weights that join two partial softmax sums over
    disjoint keys: joined sum = sum * factor + more * more_factor, and `highest` is the peak of
    both.

    A side without visible keys has peak -inf and leaves the other side's bits unchanged.
    """
    highest = tl.maximum(peak, more_peak)
    base = tl.where(highest == NOTHING, 0.0, highest)
    return tl.exp2(peak - base), tl.exp2(more_peak - base), highest


@triton.jit
def sink_of(sink_ptr, head, lane, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Return the peak of a row's sink, a part whose Σ 2^(s-peak) is 1: row `lane` is of member lane
    % GROUP of the key head's group."""
    member = lane % GROUP
    heads: tl.constexpr = HEADS // KV_HEADS
    return tl.load(sink_ptr + head * heads + member, mask=member < heads, other=0.0) * _LOG2E


@triton.jit
def store_finished(
    acc, total, peak, out_ptr, lse_ptr, codes_ptr, scale_ptr, flag_ptr, place, at, valid, mask,
    num_rows, HEADS: tl.constexpr, UE8M0: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Write softmax·v [N, D] and the natural log-sum-exp [N] of rows whose key blocks are joined.

    `at`: offsets of the outputs; `place`: offsets of the per-row numbers. softmax·v is written as
    numbers (`out_ptr`), as FP8 codes of its BF16 rounding (`codes_ptr`), or as both. A head's
    channels are one scale block; BESIDE: scales are laid out as the quantizer's `lies_beside` says.
    """
    # a zero's sign can depend on keys that a row does not see: adding +0 makes it +
    out = acc * tl.div_rn(1.0, total)[:, None] + 0.0
    tl.store(lse_ptr + place, (peak + tl.log2(total)) * _LN2, mask=valid)
    if out_ptr is not None:
        tl.store(out_ptr + at, numbers.cast(out, out_ptr.dtype.element_ty), mask=mask)
    if codes_ptr is not None:
        out = tl.where(mask, numbers.cast(out, tl.bfloat16).to(tl.float32), 0.0)
        scale = scale_or_flag(largest(out, 1), flag_ptr, UE8M0)
        if BESIDE:
            place = place % HEADS * num_rows.to(tl.int64) + place // HEADS
        tl.store(scale_ptr + place, scale, mask=valid)
        tl.store(codes_ptr + at, codes(out, scale[:, None], UE8M0), mask=mask)


@triton.jit
def attend_splits(
    even_q, odd_q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, stop,
    lowest, sink_ptr, head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKEN: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, SCALED: tl.constexpr, SCALE_TOKEN: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    COPIES: tl.constexpr,
    DTYPE: tl.constexpr, PAIRED: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return `attend_split` of all keys up to `stop`, from key `lowest`'s split on, with sinks."""
    rows: tl.constexpr = positions.shape[0]
    even = tl.zeros([WIDTH, rows] if KEYS_FIRST else [rows, WIDTH], tl.float32)
    odd = even
    total = tl.zeros([rows], tl.float32)
    peak = tl.full([rows], NOTHING, tl.float32)
    start = lowest // KEYS_PER_SPLIT * KEYS_PER_SPLIT
    for first in range(numbers.steps(start), numbers.steps(stop), KEYS_PER_SPLIT):
        more_even, more_odd, more_total, more_peak = attend_split(
            even_q, odd_q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
            first, stop, lowest,
            TOKEN, DIM, WIDTH, PAGE_SIZE, SCALED, SCALE_TOKEN, KEYS_PER_SPLIT, WINDOW, BLOCK_KEYS,
            COPIES, DTYPE,
            PAIRED, KEYS_FIRST,
        )  # fmt: skip
        old, new, peak = factors(peak, more_peak)
        total = total * old + more_total * new
        even = even * by_row(old, KEYS_FIRST) + more_even * by_row(new, KEYS_FIRST)
        if PAIRED:
            odd = odd * by_row(old, KEYS_FIRST) + more_odd * by_row(new, KEYS_FIRST)
    if sink_ptr is not None:
        sink = sink_of(sink_ptr, head, tl.arange(0, rows), HEADS, KV_HEADS, GROUP)
        old, new, peak = factors(peak, sink)
        total = total * old + new
        even, odd = even * by_row(old, KEYS_FIRST), odd * by_row(old, KEYS_FIRST)
    return even, odd, total, peak


@triton.jit
def places(
    row_start_ptr, sequence, head, tile,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return of every row in a tile: its number in the sequence, its place in [T, H], those of its
    channels in [T, H, D], and masks of both.

    Asked before the keys and again after them: kept in between, the answer would take registers
    that there are not. So the loads are volatile, or the compiler would keep it.
    """
    start = tl.load(row_start_ptr + sequence, volatile=True)
    rows = (tl.load(row_start_ptr + sequence + 1, volatile=True) - start).to(tl.int32)
    lane = tl.arange(0, ROWS * GROUP)
    row, member = lane // GROUP, lane % GROUP
    channel = tl.arange(0, BLOCK_DIM)
    valid = (row < rows - tile * ROWS) & (member < HEADS // KV_HEADS)
    heads = (start + tile * ROWS) * HEADS + head * (HEADS // KV_HEADS)
    among = row * HEADS + member
    at = heads * DIM + ((among * DIM)[:, None] + channel[None, :])
    return heads + among, at, valid, valid[:, None] & (channel < DIM)[None, :]


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, row_start_ptr, context_ptr, out_ptr,
    lse_ptr, codes_ptr, code_scale_ptr, flag_ptr, total_ptr, sink_ptr, factor, num_rows,
    table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, SCALED: tl.constexpr,
    SCALE_TOKEN: tl.constexpr, SCALE_HEAD: tl.constexpr, KEYS_PER_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr, PARALLEL: tl.constexpr, WIDTH: tl.constexpr,
    COPIES: tl.constexpr, PAIRED: tl.constexpr, KEYS_FIRST: tl.constexpr, UE8M0: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """ROWS consecutive rows of one sequence and the query heads of one key head: a tile of ROWS ·
    GROUP rows. With PARALLEL the program computes one split and leaves it in out [splits, T, H, D],
    total and lse [splits, T, H] (lse is the peak); else it computes all of them and finishes."""
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
    heads, at, valid, mask = places(
        row_start_ptr, sequence, head, tile, HEADS, KV_HEADS, DIM, BLOCK_DIM, GROUP, ROWS
    )  # fmt: skip
    even_q, odd_q, factor = queries(
        tl.load(q_ptr + at, mask=mask, other=0.0), factor, PAIRED, KEYS_FIRST
    )
    positions = context + tile * ROWS + tl.arange(0, ROWS * GROUP) // GROUP
    table_ptr += sequence.to(tl.int64) * table_stride
    k_ptr, v_ptr = k_ptr + head * DIM, v_ptr + head * DIM
    if PAIRED:
        k_ptr, v_ptr = numbers.pair_pointer(k_ptr), numbers.pair_pointer(v_ptr)
    if SCALED:
        k_scale_ptr, v_scale_ptr = k_scale_ptr + head * SCALE_HEAD, v_scale_ptr + head * SCALE_HEAD
    CHANNELS: tl.constexpr = DIM // 2 if PAIRED else DIM
    if PARALLEL:
        even, odd, total, peak = attend_split(
            even_q, odd_q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
            split * KEYS_PER_SPLIT, stop, lowest, KV_HEADS * CHANNELS, CHANNELS, WIDTH, PAGE_SIZE,
            SCALED, SCALE_TOKEN,
            KEYS_PER_SPLIT, WINDOW, BLOCK_KEYS, COPIES, q_ptr.dtype.element_ty, PAIRED, KEYS_FIRST,
        )  # fmt: skip
    else:
        even, odd, total, peak = attend_splits(
            even_q, odd_q, positions, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
            stop, lowest, sink_ptr, head, HEADS, KV_HEADS, GROUP, KV_HEADS * CHANNELS, CHANNELS,
            WIDTH, PAGE_SIZE, SCALED, SCALE_TOKEN, KEYS_PER_SPLIT, WINDOW, BLOCK_KEYS, COPIES,
            q_ptr.dtype.element_ty, PAIRED, KEYS_FIRST,
        )  # fmt: skip
    heads, at, valid, mask = places(
        row_start_ptr, sequence, head, tile, HEADS, KV_HEADS, DIM, WIDTH * 2 if PAIRED else WIDTH,
        GROUP, ROWS
    )  # fmt: skip
    acc = together(even, odd, PAIRED, KEYS_FIRST)
    if PARALLEL:
        offset = split * (num_rows.to(tl.int64) * HEADS)
        tl.store(out_ptr + offset * DIM + at, acc, mask=mask)
        tl.store(lse_ptr + offset + heads, peak, mask=valid)
        tl.store(total_ptr + offset + heads, total, mask=valid)
    else:
        store_finished(
            acc, total, peak, out_ptr, lse_ptr, codes_ptr, code_scale_ptr, flag_ptr, heads, at,
            valid, mask, num_rows, HEADS, UE8M0, BESIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _join_splits(
    part_ptr, part_peak_ptr, part_total_ptr, position_ptr, sink_ptr, out_ptr, lse_ptr, codes_ptr,
    scale_ptr, flag_ptr, num_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, UE8M0: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """Join the splits of one row and the query heads of one key head, which PARALLEL left, in
    ascending order."""
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
    heads = row * HEADS + head * (HEADS // KV_HEADS) + member
    at = (heads * DIM)[:, None] + channel[None, :]
    acc = tl.zeros([GROUP, BLOCK_DIM], tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    peak = tl.full([GROUP], NOTHING, tl.float32)
    # several splits are on their way while one is joined
    for split in tl.range(numbers.steps(lowest), numbers.steps(splits), num_stages=STAGES):
        offset = split * (num_rows.to(tl.int64) * HEADS)
        more_acc = tl.load(part_ptr + offset * DIM + at, mask=mask, other=0.0)
        more_total = tl.load(part_total_ptr + offset + heads, mask=valid, other=0.0)
        more_peak = tl.load(part_peak_ptr + offset + heads, mask=valid, other=0.0)
        old, new, peak = factors(peak, more_peak)
        acc = acc * old[:, None] + more_acc * new[:, None]
        total = total * old + more_total * new
    if sink_ptr is not None:
        old, new, peak = factors(peak, sink_of(sink_ptr, head, member, HEADS, KV_HEADS, GROUP))
        acc = acc * old[:, None]
        total = total * old + new
    store_finished(
        acc, total, peak, out_ptr, lse_ptr, codes_ptr, scale_ptr, flag_ptr, heads, at, valid, mask,
        num_rows, HEADS, UE8M0, BESIDE,
    )  # fmt: skip

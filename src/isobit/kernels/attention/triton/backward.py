"""Backward of causal grouped-query attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691,
section 3.1, algorithm 2), without atomics.

With P = exp(scale · q·kᵀ - lse): dv = Pᵀ·dout, dP = dout·vᵀ, dS = P · (dP - Σ dout · out), dq =
scale · dS·k, dk = scale · dSᵀ·q. Four kernels. Two prepare: one reads keys and values of every row
from the store (code times scale, rounded to the type of the queries, as the forward reads them);
one sums dout · out of every row and head, and stores the sum and lse · log2(e) as [H, T]. Two
compute: dq for a block of queries and a head, over its keys in ascending order; dk and dv for a
block of keys and a key head, over its query heads and their queries in ascending order. Every sum
has one order, so the gradient repeats; a row's bits depend on its sequence alone. It goes straight
through the quantization of keys and values.

Keys and values are read from the store once, 1 byte an element and 2 written, so that the products,
which read them once for every block of queries, neither look up pages nor decode. There are seven
products, the scores and dP being computed twice; they, not memory, bound it from some hundred
tokens a sequence on. P and dS are rounded to the type of the queries for the tensor cores; float32
is multiplied in float32. Rows may follow keys that other rows stored, which several sequences see:
each sequence has a copy then, with its own gradients. Left out: the forward, and adding the
copies' gradients (`isobit.kernels.Copies`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.layout import Layout
from isobit.kernels.stores import KVStore
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch, roomy, target

_LOG2E = tl.constexpr(1.4426950408889634)
_TILE_ROWS = 16
_Blocks = tuple[int, int, int, int]


def attention_backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq [T, H, D], dk, dv [K, KV, D]) in q's dtype, of dout, q, out [T, H, D] and lse [T,
    H] float32, for a packed layout, or the layout's `keys`; with a `window` rows see the last
    `window` keys."""
    dout, q, out, lse = (x.contiguous() for x in (dout, q, out, lse))
    rows, heads, dim = q.shape
    kv_heads, width = store.k.shape[1], max(16, triton.next_power_of_2(dim))
    k, v = _read(store, layout.key_slots, q.dtype)
    exponent, inner = (
        torch.empty((heads, rows), dtype=torch.float32, device=q.device) for _ in range(2)
    )
    launch(
        _row_sums, (-(-rows * heads // _TILE_ROWS),), dout, out, lse, exponent, inner, rows,
        num_warps=4,
        HEADS=heads, DIM=dim, WIDTH=width, TILE=_TILE_ROWS,
    )  # fmt: skip
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "WIDTH": width, "WINDOW": window}
    sequences, where = layout.row_start.shape[0] - 1, (layout.row_start, layout.key_start)
    m, n, warps, stages = _query_blocks(width, q.dtype)
    blocks = -(-layout.max_rows // m)
    launch(
        _dq, (blocks * sequences, heads), dq, dout, q, k, v, exponent, inner, *where, rows, blocks,
        scale,
        num_warps=warps, num_stages=stages, M=m, N=n, **shape,
    )  # fmt: skip
    m, n, warps, stages = _key_blocks(width, q.dtype)
    blocks = -(-layout.max_keys // n)
    launch(
        _dkv, (blocks * sequences, kv_heads), dk, dv, dout, q, k, v, exponent, inner, *where, rows,
        blocks,
        scale, num_warps=warps, num_stages=stages, M=m, N=n, **shape,
    )  # fmt: skip
    return dq, dk, dv


def _query_blocks(width: int, dtype: torch.dtype) -> _Blocks:
    """Return (queries, keys of a block, warps, stages) of the kernel for dq: what compiles without
    spilling a register."""
    if dtype == torch.float32:
        return 16, 16, 4, 1
    if width > 256:
        return (64, 32, 8, 1) if roomy() else (16, 32, 4, 1)
    if width > 128:
        return 64, 32, 8, 2
    return (128, 32, 8, 2) if target().matrix == "warp" else (128, 64, 8, 2)


def _key_blocks(width: int, dtype: torch.dtype) -> _Blocks:
    """Return (queries, keys of a block, warps, stages) of the kernel for dk and dv, likewise."""
    if dtype == torch.float32:
        return 16, 16, 4, 1
    if width > 256:
        return (16, 64, 8, 1) if roomy() else (16, 16, 4, 1)
    if width > 128:
        return 16, 64, 8, 2
    if target().matrix == "warp":
        return 64, 64, 8, 2
    return (32, 128, 8, 3) if width == 128 else (64, 128, 8, 2)


def _read(store: KVStore, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values [T, KV, D] of the rows at `slots`, as attention reads them: in
    `dtype`."""
    rows, (kv_heads, dim) = slots.shape[0], store.k.shape[1:]
    k, v = (torch.empty((rows, kv_heads, dim), dtype=dtype, device=slots.device) for _ in range(2))
    # one scale for all is expanded over a single element
    strides = store.k_scale.stride() if store.k_scale is not None else (0, 0)
    launch(
        _gather, (-(-rows * kv_heads // _TILE_ROWS), 2), store.k, store.v, store.k_scale,
        store.v_scale, slots, k, v,
        rows, num_warps=4, HEADS=kv_heads, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
        TILE=_TILE_ROWS,
        SLOT_STRIDE=strides[0], HEAD_STRIDE=strides[1],
    )  # fmt: skip
    return k, v


@triton.jit
def _gather_rows(
    data, scales, slot, head, there, out, row, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    inside = there[:, None] & (column < DIM)
    codes = tl.load(data + ((slot * HEADS + head) * DIM)[:, None] + column, mask=inside, other=0)
    if scales is not None:
        scale = tl.load(scales + slot * SLOT_STRIDE + head * HEAD_STRIDE, mask=there, other=0.0)
        values = numbers.from_codes(codes) * scale[:, None]
    else:
        values = codes.to(tl.float32)
    tl.store(
        out + (row * DIM)[:, None] + column, numbers.cast(values, out.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=["rows"])
def _gather(
    k_data, v_data, k_scale, v_scale, slots, k, v, rows, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    token, head = row // HEADS, row % HEADS
    there = token < rows
    slot = tl.load(slots + token, mask=there, other=0)
    if tl.program_id(1) == 0:
        _gather_rows(
            k_data, k_scale, slot, head, there, k, row, HEADS, DIM, WIDTH, SLOT_STRIDE, HEAD_STRIDE
        )
    else:
        _gather_rows(
            v_data, v_scale, slot, head, there, v, row, HEADS, DIM, WIDTH, SLOT_STRIDE, HEAD_STRIDE
        )


@triton.jit(do_not_specialize=["rows"])
def _row_sums(
    dout, out, lse, exponent, inner, rows, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute exponent [H, T] = lse · log2(e), inner [H, T] = Σ dout · out."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    token, head = row // HEADS, row % HEADS
    there = token < rows
    column = tl.arange(0, WIDTH)[None, :]
    at, inside = (row * DIM)[:, None] + column, there[:, None] & (column < DIM)
    gradient = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    offset = head * rows + token
    tl.store(inner + offset, tl.sum(gradient * value, axis=1), mask=there)
    tl.store(exponent + offset, tl.load(lse + row, mask=there, other=0.0) * _LOG2E, mask=there)


@triton.jit
def _block(
    pointer,
    first,
    count,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return rows `first` to `first` + ROWS of one head, [ROWS, WIDTH]; 0 beyond `count` rows.

    The first row's place takes 64 bits, from 2^31 elements on; within a block 32 will do.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = row < count - first
    if DIM != WIDTH:
        inside = inside & (column < DIM)
    pointer += tl.cast(first, tl.int64) * STRIDE
    return tl.load(pointer + row * STRIDE + column, mask=inside, other=0.0)


@triton.jit
def _keep(
    pointer, value, first, count, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr
):  # fmt: skip
    """Store a block of rows, at the addresses from which `_block` loads it."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (row < count - first) & (column < DIM)
    pointer += tl.cast(first, tl.int64) * STRIDE
    tl.store(
        pointer + row * STRIDE + column, numbers.cast(value, pointer.dtype.element_ty), mask=inside
    )


@triton.jit
def _dq_step(
    dq, queries, gradient, exponent, inner, k, v, first, step, count, scale, STRIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return dq [M, WIDTH], not yet scaled, plus what a block of keys gives."""
    keys = _block(k, step * N, count, STRIDE, N, DIM, WIDTH)
    values = _block(v, step * N, count, STRIDE, N, DIM, WIDTH)
    scores = numbers.dot(queries, tl.trans(keys), tl.zeros((M, N), tl.float32))
    p = tl.exp2(scores * (scale * _LOG2E) - exponent[:, None])
    if MASKED:
        row, key = first + tl.arange(0, M)[:, None], step * N + tl.arange(0, N)[None, :]
        p = tl.where(key <= row, p, 0.0)
        if WINDOW is not None:
            p = tl.where(key > row - WINDOW, p, 0.0)
    dp = numbers.dot(gradient, tl.trans(values), tl.zeros((M, N), tl.float32))
    ds = numbers.cast(p * (dp - inner[:, None]), k.dtype.element_ty)
    return numbers.dot(ds, keys, dq)


@triton.jit
def _sequence(row_start, key_start, sequence):
    """Return (its first row, its first key, how many rows, how many keys)."""
    row, key = tl.load(row_start + sequence), tl.load(key_start + sequence)
    rows = (tl.load(row_start + sequence + 1) - row).to(tl.int32)
    return row, key, rows, (tl.load(key_start + sequence + 1) - key).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _dq(
    dq, dout, q, k, v, exponent, inner, row_start, key_start, rows, blocks, scale, M: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // blocks, tl.program_id(1)
    start, key_at, count, keys = _sequence(row_start, key_start, sequence)
    # the last block has the most keys, and so comes first
    first = (blocks - 1 - tl.program_id(0) % blocks) * M
    if first >= count:
        return
    KV_STRIDE: tl.constexpr = KV_HEADS * DIM
    STRIDE: tl.constexpr = HEADS * DIM
    kv_head = head // (HEADS // KV_HEADS)
    k += key_at * KV_STRIDE + kv_head * DIM
    v += key_at * KV_STRIDE + kv_head * DIM
    queries = _block(q + start * STRIDE + head * DIM, first, count, STRIDE, M, DIM, WIDTH)
    gradient = _block(dout + start * STRIDE + head * DIM, first, count, STRIDE, M, DIM, WIDTH)
    row = first + tl.arange(0, M)
    at = head.to(tl.int64) * rows + start + row
    # rows that are not there have probability exp(-inf)
    high = tl.load(exponent + at, mask=row < count, other=float("inf"))
    delta = tl.load(inner + at, mask=row < count, other=0.0)
    total = tl.zeros((M, WIDTH), tl.float32)
    position = keys - count + first
    if WINDOW is None:
        whole = position // N
        for step in range(numbers.steps(whole)):
            total = _dq_step(
                total, queries, gradient, high, delta, k, v, position, step, keys, scale, KV_STRIDE,
                M, N, DIM, WIDTH,
                WINDOW, False,
            )  # fmt: skip
    else:
        whole = (
            tl.maximum(position - WINDOW + 1, 0) // N
        )  # the first block that a row sees, and all are masked
    for step in range(
        numbers.steps(whole), numbers.steps((tl.minimum(position + M, keys) + N - 1) // N)
    ):
        total = _dq_step(
            total, queries, gradient, high, delta, k, v, position, step, keys, scale, KV_STRIDE, M,
            N, DIM, WIDTH,
            WINDOW, True,
        )  # fmt: skip
    _keep(dq + start * STRIDE + head * DIM, total * scale, first, count, STRIDE, M, DIM, WIDTH)


@triton.jit
def _dkv_step(
    dk, dv, keys, values, q, dout, exponent, inner, first, step, count, before, scale,
    STRIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return dk (not yet scaled) and dv [N, WIDTH] plus what a block of queries of one head gives;
    `before`: keys before the first of its rows."""
    queries = _block(q, step * M, count, STRIDE, M, DIM, WIDTH)
    gradient = _block(dout, step * M, count, STRIDE, M, DIM, WIDTH)
    row = step * M + tl.arange(0, M)
    high = tl.load(exponent + row, mask=row < count, other=float("inf"))
    delta = tl.load(inner + row, mask=row < count, other=0.0)
    scores = numbers.dot(keys, tl.trans(queries), tl.zeros((N, M), tl.float32))
    p = tl.exp2(scores * (scale * _LOG2E) - high[None, :])
    key = first + tl.arange(0, N)[:, None]
    p = tl.where(key <= row[None, :] + before, p, 0.0)
    if WINDOW is not None:
        p = tl.where(key > row[None, :] + before - WINDOW, p, 0.0)
    dv = numbers.dot(numbers.cast(p, q.dtype.element_ty), gradient, dv)
    dp = numbers.dot(values, tl.trans(gradient), tl.zeros((N, M), tl.float32))
    ds = numbers.cast(p * (dp - delta[None, :]), q.dtype.element_ty)
    return numbers.dot(ds, queries, dk), dv


@triton.jit(do_not_specialize=["rows", "blocks"])
def _dkv(
    dk, dv, dout, q, k, v, exponent, inner, row_start, key_start, rows, blocks, scale,
    M: tl.constexpr,
    N: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(0) // blocks, tl.program_id(1)
    start, key_at, count, all_keys = _sequence(row_start, key_start, sequence)
    first, context = (tl.program_id(0) % blocks) * N, all_keys - count
    if first >= all_keys:
        return
    KV_STRIDE: tl.constexpr = KV_HEADS * DIM
    STRIDE: tl.constexpr = HEADS * DIM
    GROUP: tl.constexpr = HEADS // KV_HEADS
    here = key_at * KV_STRIDE + kv_head * DIM
    keys = _block(k + here, first, all_keys, KV_STRIDE, N, DIM, WIDTH)
    values = _block(v + here, first, all_keys, KV_STRIDE, N, DIM, WIDTH)
    key_sum, value_sum = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    q += start * STRIDE + kv_head * (GROUP * DIM)
    dout += start * STRIDE + kv_head * (GROUP * DIM)
    heads_before = kv_head.to(tl.int64) * GROUP
    exponent += start + heads_before * rows
    inner += start + heads_before * rows
    # one loop over the blocks of queries of one head after the other
    lowest = tl.maximum(first - context, 0) // M
    highest = count
    if WINDOW is not None:
        highest = tl.minimum(count, tl.maximum(first + N + WINDOW - 1 - context, 0))
    blocks_of_head = tl.maximum((highest + M - 1) // M - lowest, 0)
    for index in range(numbers.steps(GROUP * blocks_of_head)):
        member, step = index // blocks_of_head, lowest + index % blocks_of_head
        at, row = member * DIM, tl.cast(member, tl.int64) * rows
        key_sum, value_sum = _dkv_step(
            key_sum, value_sum, keys, values, q + at, dout + at, exponent + row, inner + row, first,
            step, count,
            context, scale, STRIDE, M, N, DIM, WIDTH, WINDOW,
        )  # fmt: skip
    _keep(dk + here, key_sum * scale, first, all_keys, KV_STRIDE, N, DIM, WIDTH)
    _keep(dv + here, value_sum, first, all_keys, KV_STRIDE, N, DIM, WIDTH)

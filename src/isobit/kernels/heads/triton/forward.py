"""Heads between the linear layers and attention: norm, rotary embedding, and storing of keys and
values, one kernel.

A program takes a few heads of one token, all of them queries, keys or values, so the bits of a head
depend on that head and its position alone. Heads are read as their two halves, which the rotation
combines element by element. Every value is rounded where the operators in turn would round it
(`tests/kernels/triton/test_heads.py`): after the norm, after the rotation, and to codes. The norm's
sum is float32.

Memory bounds these kernels: qkv is read once; q, k and what is stored are written. Left out: the
backward (`backward.py`), the norm of whole rows, and the products before and after.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.layout import Layout
from isobit.kernels.ops import Heads
from isobit.kernels.stores import KVStore
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch
from isobit.precision import E4M3, INT8

_HEADS = 8
"""Heads of a program, at most: with 2 warps a thread then reads 16 bytes of each half of a head of
128."""


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Rotate x [T, heads, D] by the rows [P, D/2] (float32) of `cos` and `sin` at `positions` [T]
    int64; `inverse` rotates back (Su et al. 2021). The bits of the reference."""
    rows, heads, dim = x.shape
    x, stride = strided(x)
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    tile = heads_at_once(heads)
    launch(
        _rotary, (rows, num_groups(heads, tile)), x, out, cos, sin, positions, num_warps=2,
        STRIDE=stride, HEADS=heads, DIM=dim, TILE=tile, WIDTH=half_width(dim), INVERSE=inverse,
    )  # fmt: skip
    return out


def kv_write(store: KVStore, k: Tensor, v: Tensor, layout: Layout, flag: Tensor) -> None:
    """Store k, v [T, KV, D] at the layout's slots: codes with a scale per token and head, or under
    calibrated scales, whose clamping is counted; or cast. `flag` [1] int32 becomes 1 where they are
    quantized and not finite."""
    rows, heads, dim = k.shape
    (k, k_stride), (v, v_stride) = strided(k), strided(v)
    tile = heads_at_once(heads)
    launch(
        _kv_write, (rows, 2 * num_groups(heads, tile)), k, v, *_stored(store), layout.slots, flag,
        rows,
        num_warps=2, K_STRIDE=k_stride, V_STRIDE=v_stride, HEADS=heads, DIM=dim, TILE=tile,
        WIDTH=half_width(dim),
        **_how(store),
    )  # fmt: skip


def attention_inputs(
    qkv: Tensor, how: Heads, store: KVStore, layout: Layout, flag: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q [T, H, D], k, v [T, KV, D]) of qkv [T, H + 2 KV, D]: q and k normed per head and
    rotated, as `how` says, to the layout's positions; k and v stored as by `kv_write`. v is a view
    of qkv, q and k are new and contiguous."""
    qkv = qkv.contiguous()
    rows, heads, dim = qkv.shape
    kv_heads = store.k.shape[1]
    q_heads = heads - 2 * kv_heads
    q, k = (
        torch.empty((rows, count, dim), dtype=qkv.dtype, device=qkv.device)
        for count in (q_heads, kv_heads)
    )
    tile = heads_at_once(max(q_heads, kv_heads))
    grid = (rows, num_groups(q_heads, tile) + 2 * num_groups(kv_heads, tile))
    q_norm, k_norm = how.norms if how.norms is not None else (None, None)
    launch(
        _attention_inputs, grid, qkv, q, k, q_norm, k_norm, *how.tables, layout.rotated,
        *_stored(store),
        layout.slots, flag, rows, how.eps, num_warps=2, Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim,
        TILE=tile,
        WIDTH=half_width(dim), **_how(store),
    )  # fmt: skip
    return q, k, qkv[:, q_heads + kv_heads :]


def heads_at_once(heads: int) -> int:
    """Return the number of heads in a program's tile: a power of two."""
    return min(_HEADS, triton.next_power_of_2(heads))


def num_groups(heads: int, tile: int) -> int:
    """Return the number of tiles that cover all heads of a kind."""
    return -(-heads // tile)


def half_width(dim: int) -> int:
    """Return the number of columns that hold half a head; the first half is the longer one, where a
    head can only be stored."""
    return triton.next_power_of_2(-(-dim // 2))


def strided(x: Tensor) -> tuple[Tensor, int]:
    """Return (x, elements from a token to the next), its heads of a token being contiguous; a copy
    only if they are not."""
    _, heads, dim = x.shape
    if x.shape[0] <= 1 or x.stride(2) != 1 or x.stride(1) != dim:
        return x.contiguous(), heads * dim
    return x, x.stride(0)


def _stored(store: KVStore) -> tuple[Tensor | None, ...]:
    return store.k, store.v, store.k_scale, store.v_scale, store.counts


def _how(store: KVStore) -> dict[str, Any]:
    """Return the constants of `_put`."""
    if store.kv is None:
        return {"QUANTIZED": False, "CALIBRATED": False, "UE8M0": False}
    if store.kv.format not in (E4M3, INT8) or store.kv.scale not in ("fp32", "ue8m0"):
        raise IsobitError(
            "the triton backend stores keys and values in e4m3 or int8 with fp32 or ue8m0 "
            f"scales, not {store.kv}"
        )
    return {"QUANTIZED": True, "CALIBRATED": store.calibrated, "UE8M0": store.kv.scale == "ue8m0"}


@triton.jit
def places(head, HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Return (offsets of the first halves of `TILE` heads from `head` on, within a token; which are
    there; the same of the second halves)."""
    HALF: tl.constexpr = (DIM + 1) // 2
    heads = head + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    at = heads * DIM + column
    first, second = heads < HEADS, heads < HEADS
    if HALF != WIDTH:
        first = first & (column < HALF)
    if DIM - HALF != WIDTH:
        second = second & (column < DIM - HALF)
    return at, first, second


@triton.jit
def load(pointer, at, first, second, DIM: tl.constexpr):
    """Return the two halves of heads, float32; 0 where there is none."""
    low = tl.load(pointer + at, mask=first, other=0.0).to(tl.float32)
    high = tl.load(pointer + at + (DIM + 1) // 2, mask=second, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def save(pointer, at, first, second, low, high, DIM: tl.constexpr):
    """Store both halves of heads, each rounded once to the pointer's type."""
    tl.store(pointer + at, numbers.cast(low, pointer.dtype.element_ty), mask=first)
    tl.store(
        pointer + at + (DIM + 1) // 2, numbers.cast(high, pointer.dtype.element_ty), mask=second
    )


@triton.jit
def vector(pointer, DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the two halves of a vector [DIM], float32 [TILE, WIDTH].

    Loaded for every head again: a single row would be spread over the threads in another way, and
    the heads moved through shared memory to meet it.
    """
    column = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (TILE, WIDTH))
    return load(pointer, column, column < DIM // 2, column < DIM // 2, DIM)


@triton.jit
def inverse_norm(low, high, eps, DIM: tl.constexpr):
    """Return 1 / sqrt(mean square + eps) of heads [TILE, 1]."""
    mean = tl.div_rn(tl.sum(low * low + high * high, axis=1, keep_dims=True), DIM * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def rounded_to(x, DTYPE: tl.constexpr):
    """Return float32 rounded to DTYPE and back: what another operator would have read."""
    return numbers.cast(x, DTYPE).to(tl.float32)


@triton.jit
def turns(cos, sin, positions, token, DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Return cosines and sines [TILE, WIDTH] at a token's position, for every head again as in
    `vector`."""
    column = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (TILE, WIDTH))
    at = tl.load(positions + token) * (DIM // 2) + column
    inside = column < DIM // 2
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def turned(low, high, c, s):
    """Return both halves of heads, rotated by angles of cosine c and sine s."""
    return low * c - high * s, high * c + low * s


@triton.jit
def _normed_rotated(
    x, norm, eps, cos, sin, positions, token, at, first, second, DIM: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return heads of a token, normed if there is a norm, then rotated; not yet rounded for the
    second time."""
    low, high = load(x, at, first, second, DIM)
    c, s = turns(cos, sin, positions, token, DIM, TILE, WIDTH)
    if norm is not None:
        DTYPE: tl.constexpr = x.dtype.element_ty
        w_low, w_high = vector(norm, DIM, TILE, WIDTH)
        rstd = inverse_norm(low, high, eps, DIM)
        low, high = rounded_to(low * rstd * w_low, DTYPE), rounded_to(high * rstd * w_high, DTYPE)
    return turned(low, high, c, s)


@triton.jit
def _clamped(low, high, limit):
    """Return how many elements exceed the limit."""
    return tl.sum((tl.abs(low) > limit).to(tl.int32)) + tl.sum((tl.abs(high) > limit).to(tl.int32))


@triton.jit
def _put(
    low, high, data, scales, counts, flag, slot, head, HEADS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr, QUANTIZED: tl.constexpr, CALIBRATED: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    """Store heads of a token, float32 values [TILE, WIDTH] of the rounded operand, in a slot."""
    FORM: tl.constexpr = data.dtype.element_ty
    at, first, second = places(head, HEADS, DIM, TILE, WIDTH)
    data += slot * (HEADS * DIM)
    if QUANTIZED:
        # NaN counts as infinite: the hardware's maximum would drop it
        magnitude = tl.maximum(
            tl.where(low == low, tl.abs(low), float("inf")),
            tl.where(high == high, tl.abs(high), float("inf")),
        )
        amax = tl.max(magnitude, axis=1, keep_dims=True)
        tl.store(flag, 1, mask=tl.max(tl.max(amax, axis=1), axis=0) == float("inf"))
        heads = head + tl.arange(0, TILE)[:, None]
        if CALIBRATED:
            scale = tl.load(scales)
            clamped = _clamped(low, high, scale * 448.0 * (1 + 2**-20))
            tl.atomic_add(counts, clamped.to(tl.int64), mask=clamped > 0, sem="relaxed")
            scale = tl.where(amax < float("inf"), scale, float("nan"))
        else:
            scale = numbers.block_scale(amax, UE8M0, FORM)
            tl.store(scales + slot * HEADS + heads, scale, mask=heads < HEADS)
        tl.store(data + at, numbers.quantize_block(low, scale, FORM), mask=first)
        tl.store(data + at + (DIM + 1) // 2, numbers.quantize_block(high, scale, FORM), mask=second)
    else:
        save(data, at, first, second, low, high, DIM)


@triton.jit
def _count_all(counts, rows, HEADS: tl.constexpr, DIM: tl.constexpr, CALIBRATED: tl.constexpr):
    """Count the elements of keys and values, once for all programs."""
    if CALIBRATED:
        mine = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.atomic_add(counts + 1, rows.to(tl.int64) * (2 * HEADS * DIM), mask=mine, sem="relaxed")


@triton.jit
def _rotary(
    x, out, cos, sin, positions, STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, first, second = places(tl.program_id(1) * TILE, HEADS, DIM, TILE, WIDTH)
    low, high = load(x + token * STRIDE, at, first, second, DIM)
    c, s = turns(cos, sin, positions, token, DIM, TILE, WIDTH)
    if INVERSE:
        s = -s
    low, high = turned(low, high, c, s)
    save(out + token * (HEADS * DIM), at, first, second, low, high, DIM)


@triton.jit(do_not_specialize=["rows"])
def _kv_write(
    k, v, k_data, v_data, k_scale, v_scale, counts, slots, flag, rows, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr, CALIBRATED: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (HEADS + TILE - 1) // TILE
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    head = (group % GROUPS) * TILE
    at, first, second = places(head, HEADS, DIM, TILE, WIDTH)
    _count_all(counts, rows, HEADS, DIM, CALIBRATED)
    if group < GROUPS:
        low, high = load(k + token * K_STRIDE, at, first, second, DIM)
        _put(
            low, high, k_data, k_scale, counts, flag, slot, head, HEADS, DIM, TILE, WIDTH,
            QUANTIZED, CALIBRATED,
            UE8M0,
        )  # fmt: skip
    else:
        low, high = load(v + token * V_STRIDE, at, first, second, DIM)
        _put(
            low, high, v_data, v_scale, counts, flag, slot, head, HEADS, DIM, TILE, WIDTH,
            QUANTIZED, CALIBRATED,
            UE8M0,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _attention_inputs(
    qkv, q, k, q_norm, k_norm, cos, sin, positions, k_data, v_data, k_scale, v_scale, counts, slots,
    flag, rows, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr, CALIBRATED: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    KV_GROUPS: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = qkv + token * ((Q_HEADS + 2 * KV_HEADS) * DIM)
    _count_all(counts, rows, KV_HEADS, DIM, CALIBRATED)
    if group < Q_GROUPS:
        at, first, second = places(group * TILE, Q_HEADS, DIM, TILE, WIDTH)
        low, high = _normed_rotated(
            x, q_norm, eps, cos, sin, positions, token, at, first, second, DIM, TILE, WIDTH
        )  # fmt: skip
        save(q + token * (Q_HEADS * DIM), at, first, second, low, high, DIM)
    else:
        slot = tl.load(slots + token)
        head = ((group - Q_GROUPS) % KV_GROUPS) * TILE
        at, first, second = places(head, KV_HEADS, DIM, TILE, WIDTH)
        if group < Q_GROUPS + KV_GROUPS:
            low, high = _normed_rotated(
                x + Q_HEADS * DIM, k_norm, eps, cos, sin, positions, token, at, first, second, DIM,
                TILE, WIDTH
            )  # fmt: skip
            low, high = rounded_to(low, DTYPE), rounded_to(high, DTYPE)
            save(k + token * (KV_HEADS * DIM), at, first, second, low, high, DIM)
            _put(
                low, high, k_data, k_scale, counts, flag, slot, head, KV_HEADS, DIM, TILE, WIDTH,
                QUANTIZED,
                CALIBRATED, UE8M0,
            )  # fmt: skip
        else:
            low, high = load(x + (Q_HEADS + KV_HEADS) * DIM, at, first, second, DIM)
            _put(
                low, high, v_data, v_scale, counts, flag, slot, head, KV_HEADS, DIM, TILE, WIDTH,
                QUANTIZED,
                CALIBRATED, UE8M0,
            )  # fmt: skip

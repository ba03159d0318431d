"""Back through rotary embedding and norm of the heads, into the one gradient of qkv.

A program takes a few heads of its share of the tokens, all of them queries, keys or values, one
token after the other; so it can keep the sums of the norms' gradients in registers. A second kernel
adds what the programs found, in order. The norm's statistic is computed again from qkv, as the
forward does. Memory bounds it: qkv and the gradients are read once, and one gradient is written.
Left out: the forward (`forward.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.heads.triton.forward import (
    half_width,
    heads_at_once,
    inverse_norm,
    load,
    num_groups,
    places,
    rounded_to,
    save,
    strided,
    turned,
    turns,
    vector,
)
from isobit.kernels.ops import Heads
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch

_CHUNKS = 512
"""Shares of the tokens, at most: 16 programs of 2 warps a multiprocessor for 16 + 2 * 8 heads."""
_SUM_ROWS = tl.constexpr(64)


def attention_inputs_backward(
    gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor, heads: Heads, positions: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (gradient of qkv [T, H + 2 KV, D], of the two norms' weights [D] float32) of dq [T, H,
    D], dk, dv [T, KV, D].

    Straight through the store. The weights' gradients are partial sums over fixed shares of the
    tokens, added in order: they repeat, but their bits depend on the batch.
    """
    qkv = qkv.contiguous()
    rows, total, dim = qkv.shape
    (dq, q_stride), (dk, k_stride), (dv, v_stride) = (strided(dx) for dx in gradients)
    q_heads, kv_heads = dq.shape[1], dk.shape[1]
    assert q_heads + 2 * kv_heads == total, "the gradients are those of qkv"
    dqkv = torch.empty_like(qkv)
    tile = heads_at_once(max(q_heads, kv_heads))
    q_groups, kv_groups = num_groups(q_heads, tile), num_groups(kv_heads, tile)
    q_norm, k_norm = heads.norms if heads.norms is not None else (None, None)
    chunks = min(rows, _CHUNKS)
    normed_groups = q_groups + kv_groups
    partial = (
        torch.empty((normed_groups, chunks, dim), dtype=torch.float32, device=qkv.device)
        if heads.norms
        else None
    )
    launch(
        _attention_inputs_backward, (chunks, normed_groups + kv_groups), dq, dk, dv, qkv, dqkv,
        q_norm, k_norm,
        *heads.tables, positions, partial, rows, -(-rows // max(chunks, 1)), heads.eps, num_warps=2,
        Q_STRIDE=q_stride,
        K_STRIDE=k_stride, V_STRIDE=v_stride, Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim,
        TILE=tile,
        WIDTH=half_width(dim),
    )  # fmt: skip
    if partial is None:
        return dqkv, None, None
    dweights = torch.empty((2, dim), dtype=torch.float32, device=qkv.device)
    columns = min(32, triton.next_power_of_2(dim))
    launch(
        _sum_partials, (2, -(-dim // columns)), partial, dweights, q_groups * chunks,
        kv_groups * chunks,
        -(-max(q_groups, kv_groups) * chunks // _SUM_ROWS.value), num_warps=4, DIM=dim,
        COLUMNS=columns,
    )  # fmt: skip
    return dqkv, dweights[0], dweights[1]


@triton.jit
def _heads_backward(
    gradient, x, dx, norm, eps, cos, sin, positions, partial, rows, steps, head,
    X_HEAD: tl.constexpr,
    STRIDE: tl.constexpr, TOKEN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Differentiate rotation and norm, for heads from `head` on of the tokens that are this
    program's; these heads are in qkv from head `X_HEAD` on."""
    at, first, second = places(head, HEADS, DIM, TILE, WIDTH)
    DTYPE: tl.constexpr = gradient.dtype.element_ty
    if norm is not None:
        w_low, w_high = vector(norm, DIM, TILE, WIDTH)
        dw_low, dw_high = tl.zeros((TILE, WIDTH), tl.float32), tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(numbers.steps(steps)):
        token = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        there = token < rows
        low, high = load(gradient + token * STRIDE, at, first & there, second & there, DIM)
        c, s = turns(cos, sin, positions, tl.where(there, token, 0), DIM, TILE, WIDTH)
        low, high = turned(low, high, c, -s)
        if norm is not None:
            low, high = rounded_to(low, DTYPE), rounded_to(high, DTYPE)
            n_low, n_high = load(
                x + token * TOKEN + X_HEAD * DIM, at, first & there, second & there, DIM
            )
            rstd = inverse_norm(n_low, n_high, eps, DIM)
            n_low, n_high = n_low * rstd, n_high * rstd
            dw_low, dw_high = dw_low + low * n_low, dw_high + high * n_high
            low, high = low * w_low, high * w_high
            mean = tl.div_rn(tl.sum(low * n_low + high * n_high, axis=1, keep_dims=True), DIM * 1.0)
            low, high = rstd * (low - n_low * mean), rstd * (high - n_high * mean)
        save(dx + token * TOKEN + X_HEAD * DIM, at, first & there, second & there, low, high, DIM)
    if norm is not None:
        column = tl.arange(0, WIDTH)
        half = partial + tl.program_id(0) * DIM + column
        tl.store(half, tl.sum(dw_low, axis=0), mask=column < DIM // 2)
        tl.store(half + DIM // 2, tl.sum(dw_high, axis=0), mask=column < DIM // 2)


@triton.jit(do_not_specialize=["rows", "steps"])
def _attention_inputs_backward(
    dq, dk, dv, qkv, dqkv, q_norm, k_norm, cos, sin, positions, partial, rows, steps, eps,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    KV_GROUPS: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    TOKEN: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * DIM
    group = tl.program_id(1)
    if partial is not None:
        partial += group * tl.num_programs(0) * DIM
    if group < Q_GROUPS:
        _heads_backward(
            dq, qkv, dqkv, q_norm, eps, cos, sin, positions, partial, rows, steps, group * TILE, 0,
            Q_STRIDE, TOKEN,
            Q_HEADS, DIM, TILE, WIDTH,
        )  # fmt: skip
    elif group < Q_GROUPS + KV_GROUPS:
        _heads_backward(
            dk, qkv, dqkv, k_norm, eps, cos, sin, positions, partial, rows, steps,
            (group - Q_GROUPS) * TILE, Q_HEADS,
            K_STRIDE, TOKEN, KV_HEADS, DIM, TILE, WIDTH,
        )  # fmt: skip
    else:
        at, first, second = places(
            (group - Q_GROUPS - KV_GROUPS) * TILE, KV_HEADS, DIM, TILE, WIDTH
        )
        for step in range(numbers.steps(steps)):
            token = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
            there = token < rows
            low, high = load(dv + token * V_STRIDE, at, first & there, second & there, DIM)
            out = dqkv + token * TOKEN + (Q_HEADS + KV_HEADS) * DIM
            save(out, at, first & there, second & there, low, high, DIM)


@triton.jit(do_not_specialize=["q_rows", "k_rows", "steps"])
def _sum_partials(
    partial, dweights, q_rows, k_rows, steps, DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add the partial sums of a norm, which stand one after the other, in a fixed order."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((_SUM_ROWS, COLUMNS), tl.float32)
    keys = tl.program_id(0) == 1
    start, count = tl.where(keys, q_rows, 0), tl.where(keys, k_rows, q_rows)
    for step in range(numbers.steps(steps)):
        row = step * _SUM_ROWS + tl.arange(0, _SUM_ROWS)[:, None]
        inside = (row < count) & (column < DIM)
        total += tl.load(partial + (start + row) * DIM + column, mask=inside, other=0.0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(dweights + tl.program_id(0) * DIM + column, tl.sum(total, axis=0), mask=column < DIM)

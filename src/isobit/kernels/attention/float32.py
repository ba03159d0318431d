"""Attention in float32 in the order `rows32-v1` (`norms/float32.py`), forward and backward: the
definition, slow and plain.

Codes are taken without their scales, and those of E4M3 times 2^-8. A score is the sum of query ·
key over the head in 16 lanes, times ((key's scale · 2^8) · scale), rounded after every operation;
INT8 has no 2^8, here and below; without quantization, times `scale`. Then

    w = exp(score - peak)            over the keys that the row sees, peak the largest of them
    total = Σ w                      in 16 lanes by position: lane l adds the keys l, l + 16 ... in ascending order
    out = Σ (w · (value's scale · 2^8)) · value / total     in chains of 32 keys (`rows32.blocked_sum`)

and the log-sum-exp is peak + log(total) in float64, rounded to float32. A head's sink is one score
more, which the peak may be, and exp(sink - peak) is added to the total after the lanes.
Probabilities in E4M3 are w rounded as `probabilities.to_e4m3` does, after it was added to the total
and before its value's scale. A row's keys stand at its own sequence's positions, so its bits depend
on no other row, chunk or page. Lanes and chains stay at those positions also under a window; a key
below it has weight 0, which adds nothing, so an implementation may leave out whole chains of such
keys.

Error. With u = 2^-24, D the head dimension, S = |scale| · Σ|q·k|: a score is within E = γ(⌈D / 16⌉
+ 8) · S; with t = peak - score a weight is relatively within η = E + t·u + 2^-22, plus e^-87 of the
peak's where exp ends; so to first order out is within Σ p·|v|·(η + γ(36 + ⌈K / 32⌉)) + |out| · (Σ
p·η + γ(⌈K / 16⌉ + 5)) before its rounding, and the log-sum-exp within Σ p·η + γ(⌈K / 16⌉ + 4) + u ·
|lse|.

The backward adds a score over the head in one ascending chain, and with dequantized keys and values
(code · scale, in float32): P = exp(s · scale - lse), dS = P · (dO·Vᵀ - Σ dO·O) · scale. dQ is
summed in chains of 32 keys; dK and dV in chains of 32 rows of the sequence, one query head after
the other. Rows of a gradient need the whole sequence, no other. Held by
`tests/kernels/test_rows32.py`.
"""

from itertools import pairwise

import torch
from torch import Tensor

from isobit.kernels.attention.definition import assert_whole
from isobit.kernels.attention.probabilities import to_e4m3
from isobit.kernels.codes import decode
from isobit.kernels.layout import Layout
from isobit.kernels.norms.float32 import CHAIN, HEAD_LANES, blocked_sum, dot, exp, fma, log, tree
from isobit.kernels.stores import KVStore
from isobit.precision import INT8, Format

_ELEMENTS = 1 << 21  # products at a time


def attention(
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    probabilities: Format | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
    group = q.shape[1] // store.k.shape[1]
    for sequence, (start, stop) in enumerate(_bounds(layout)):
        position = layout.positions[start:stop]
        slots = _slots(layout, sequence, stop - start + int(layout.context[sequence]))
        step = max(1, _ELEMENTS // (group * max(len(slots) * HEAD_LANES, 1)))
        for head in range(store.k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            keys, key_factor = _read(store.k, store.k_scale, store, slots, head, scale)
            values, value_factor = _read(store.v, store.v_scale, store, slots, head, 1.0)
            for first in range(start, stop, step):
                rows = slice(first, min(first + step, stop))
                scores = dot(q[rows, heads].float().unsqueeze(2), keys, HEAD_LANES) * key_factor
                visible = _visible(len(slots), position[first - start :][:step], window).unsqueeze(
                    1
                )
                scores = scores.masked_fill(~visible, -torch.inf)
                peak = scores.amax(-1)
                peak = peak if sinks is None else torch.maximum(peak, sinks[heads])
                weights = exp(scores - peak.unsqueeze(-1))
                total = _lane_sum(weights)
                total = total if sinks is None else total + exp(sinks[heads] - peak)
                weights = weights if probabilities is None else to_e4m3(weights)
                mixed = blocked_sum(
                    (weights * value_factor).permute(2, 0, 1).unsqueeze(-1), values[:, None, None]
                )
                out[rows, heads] = (mixed / total.unsqueeze(-1)).to(q.dtype)
                lse[rows, heads] = (peak.double() + log(total.double())).float()
    return out, lse


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
    assert_whole(layout)
    kv_heads = store.k.shape[1]
    dq, dk = torch.empty_like(q), q.new_empty(len(layout.key_slots), kv_heads, q.shape[2])
    dv = torch.empty_like(dk)
    group = q.shape[1] // kv_heads
    factor = torch.tensor(scale, device=q.device)
    for sequence, (start, stop) in enumerate(_bounds(layout)):
        own = slice(*layout.key_start[sequence : sequence + 2].tolist())
        slots = layout.key_slots[own]
        chains = _ELEMENTS // (
            CHAIN * max(1, len(slots)) * HEAD_LANES
        )  # a sequence may have no rows
        step = CHAIN * max(1, chains)  # whole chains, so sums keep their order
        for head in range(kv_heads):
            keys, values = (x[:, head] for x in store.gather(slots))
            sums = [torch.zeros_like(keys) for _ in range(2)]
            places = [
                (h, at)
                for h in range(head * group, (head + 1) * group)
                for at in range(start, stop, step)
            ]
            for h, at in places:
                rows = slice(at, min(at + step, stop))
                visible = _visible(len(slots), layout.positions[rows], window)
                query, gradient = q[rows, h].float(), dout[rows, h].float()
                inner = dot(gradient, out[rows, h].float(), HEAD_LANES).unsqueeze(-1)
                weights = exp(_chain(query, keys) * factor - lse[rows, h].unsqueeze(-1))
                weights = weights.masked_fill(~visible, 0.0)
                dscores = weights * (_chain(gradient, values) - inner) * factor
                dq[rows, h] = blocked_sum(dscores.t().unsqueeze(-1), keys.unsqueeze(1)).to(q.dtype)
                for place, (left, right) in enumerate(((dscores, query), (weights, gradient))):
                    for x, y in zip(left.split(CHAIN), right.split(CHAIN)):
                        sums[place] = sums[place] + blocked_sum(x.unsqueeze(-1), y.unsqueeze(1))
            dk[own, head], dv[own, head] = (x.to(q.dtype) for x in sums)
    return dq, dk, dv


def _bounds(layout: Layout) -> list[tuple[int, int]]:
    return list(pairwise(layout.row_start.tolist()))


def _visible(keys: int, positions: Tensor, window: int | None) -> Tensor:
    """Return whether rows at `positions` [R] see each of the keys: [R, keys]."""
    key, row = torch.arange(keys, device=positions.device), positions.unsqueeze(-1)
    return key <= row if window is None else (key <= row) & (key > row - window)


def _slots(layout: Layout, sequence: int, count: int) -> Tensor:
    """Return the slots of the first `count` keys of a sequence."""
    position = torch.arange(count, device=layout.page_table.device)
    pages = layout.page_table[sequence, position // layout.page_size].long()
    return pages * layout.page_size + position % layout.page_size


def _read(
    data: Tensor, scales: Tensor | None, store: KVStore, slots: Tensor, head: int, by: float
) -> tuple[Tensor, Tensor]:
    """Return (values [K, D], those of E4M3 codes times 2^-8; what their scores or weights are
    multiplied by [K]), float32."""
    picked, factor = data[slots, head], torch.tensor(by, device=data.device)
    if store.kv is None or scales is None:
        return picked.float(), factor.expand(len(slots))
    off = 1.0 if store.kv.format is INT8 else 256.0
    return decode(picked, store.kv.format.dtype, torch.float32) / off, scales[
        slots, head
    ] * off * factor


def _lane_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in 16 lanes."""
    missing = -x.shape[-1] % HEAD_LANES
    lanes = torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, HEAD_LANES))
    total = torch.zeros_like(lanes[..., 0, :])
    for i in range(lanes.shape[-2]):
        total = total + lanes[..., i, :]
    return tree(total)


def _chain(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, D] · b [N, D]ᵀ, each sum one ascending chain."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for d in range(a.shape[1]):
        total = fma(a[:, d, None], b[:, d], total)
    return total

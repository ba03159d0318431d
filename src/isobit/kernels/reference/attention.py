"""Causal grouped-query attention over stored keys and values, forward and backward, in float64 with one rounding.

A row at position p attends to keys 0 to p of its own sequence, wherever their pages are. Sequences of like length are
batched and padded; a padded key has probability exactly 0. The forward is the same for decoding, chunked prefill and
the learner's packed rows; the backward takes packed rows only. Quantized keys and values are read as code times scale
in float32, and the gradient goes straight through the quantization (Bengio et al. 2013).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from isobit.kernels.reference.rounding import round_once
from isobit.kernels.types import KVStore, Layout
from isobit.precision import quantize

_PADDED_ELEMENTS = 1 << 22  # rows times keys of one padded batch, which bounds its memory


def kv_write(store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Put the rows' keys and values into their slots."""
    for data, scale, rows in ((store.k, store.k_scale, k), (store.v, store.v_scale, v)):
        if store.kv is None or scale is None:
            data[layout.slots] = rows.to(data.dtype)
            continue
        quantized = quantize(rows.reshape(-1, rows.shape[-1]), store.kv, "keys and values")
        data[layout.slots] = quantized.data.view(torch.uint8).view(rows.shape)
        scale[layout.slots] = quantized.scale.view(rows.shape[:2])


def attention(q: Tensor, store: KVStore, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ·scale)·v and the log-sum-exp of the scores (Vaswani et al. 2017, eq. 1)."""
    out = torch.empty(q.shape, dtype=torch.float64)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    for batch in _batches(layout):
        keys, values, visible = batch.read(store, q.shape[1])
        scores = batch.scores(q, keys, scale, visible)
        peak = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True)
        mixed = torch.matmul(weights, values) / total
        batch.scatter(mixed, out)
        batch.scatter((peak + torch.log(total)), lse.unsqueeze(-1))
    return round_once(out, q.dtype), lse.float()


def attention_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, store: KVStore, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from recomputed probabilities (Dao et al. 2022, section 3.1): dS = P·(dP - Σ dO·O)."""
    kv_heads = store.k.shape[1]
    dq = torch.empty(q.shape, dtype=torch.float64)
    dk = torch.empty((q.shape[0], kv_heads, q.shape[2]), dtype=torch.float64)
    dv = torch.empty_like(dk)
    for batch in _batches(layout):
        keys, values, visible = batch.read(store, q.shape[1])
        weights = torch.exp(batch.scores(q, keys, scale, visible) - batch.gather(lse.unsqueeze(-1)))
        gradient = batch.gather(dout) * batch.valid.view(batch.valid.shape[0], 1, -1, 1)
        inner = (gradient * batch.gather(out)).sum(-1, keepdim=True)
        dscores = weights * (torch.matmul(gradient, values.transpose(-1, -2)) - inner) * scale
        batch.scatter(torch.matmul(dscores, keys), dq)
        batch.scatter(_group_sum(torch.matmul(dscores.transpose(-1, -2), batch.gather(q)), kv_heads), dk)
        batch.scatter(_group_sum(torch.matmul(weights.transpose(-1, -2), gradient), kv_heads), dv)
    return round_once(dq, q.dtype), round_once(dk, q.dtype), round_once(dv, q.dtype)


class _Batch:
    """Some sequences, padded: R rows and K keys each. Tensors are [S, heads, R or K, D] float64."""

    def __init__(self, layout: Layout, sequences: Tensor, num_rows: int, num_keys: int) -> None:
        start, length = layout.row_start[sequences], layout.row_start[sequences + 1] - layout.row_start[sequences]
        offset = torch.arange(num_rows)
        self.valid = offset < length.unsqueeze(1)
        self.rows = torch.where(self.valid, start.unsqueeze(1) + offset, start.unsqueeze(1))
        self.positions = layout.context[sequences].unsqueeze(1) + offset
        end = layout.context[sequences] + length
        key = torch.arange(num_keys)
        present = key < end.unsqueeze(1)
        pages = layout.page_table[sequences][:, key // layout.page_size].long()
        self.slots = torch.where(
            present, pages * layout.page_size + key % layout.page_size, layout.slots[start].unsqueeze(1)
        )
        self.present = present

    def read(self, store: KVStore, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values for every query head [S, H, K, D], and which key each row sees [S, 1, R, K]."""
        repeat = num_heads // store.k.shape[1]
        keys, values = (t.double().transpose(1, 2).repeat_interleave(repeat, 1) for t in store.gather(self.slots))
        causal = torch.arange(self.slots.shape[1]) <= self.positions.unsqueeze(-1)
        return keys, values, (causal & self.present.unsqueeze(1)).unsqueeze(1)

    def gather(self, rows: Tensor) -> Tensor:
        return rows[self.rows].double().transpose(1, 2)

    def scores(self, q: Tensor, keys: Tensor, scale: float, visible: Tensor) -> Tensor:
        scores = torch.matmul(self.gather(q), keys.transpose(-1, -2)) * scale
        return scores.masked_fill(~visible, float("-inf"))

    def scatter(self, padded: Tensor, out: Tensor) -> None:
        """Write the valid rows of [S, heads, R.., D] into `out` [T, heads, D]."""
        padded = padded.transpose(1, 2)[:, : self.valid.shape[1]]
        out[self.rows[self.valid]] = padded[self.valid]


def _batches(layout: Layout) -> Iterator[_Batch]:
    """Sequences sorted by length, in batches whose padding stays within a factor of two."""
    length = layout.row_start[1:] - layout.row_start[:-1]
    keys = layout.context + length
    order = sorted((s for s in range(len(length)) if length[s]), key=lambda s: (int(length[s]), int(keys[s])))
    batch: list[int] = []
    most_keys = 0
    for sequence in order:
        rows, wanted = int(length[sequence]), max(most_keys, int(keys[sequence]))
        full = batch and ((len(batch) + 1) * rows * wanted > _PADDED_ELEMENTS or rows > 2 * int(length[batch[0]]))
        if full:
            yield _Batch(layout, torch.tensor(batch), int(length[batch[-1]]), most_keys)
            batch, wanted = [], int(keys[sequence])
        batch.append(sequence)
        most_keys = wanted
    if batch:
        yield _Batch(layout, torch.tensor(batch), int(length[batch[-1]]), most_keys)


def _group_sum(per_query_head: Tensor, kv_heads: int) -> Tensor:
    """Add the gradients of the query heads that share a key head: [S, H, K, D] to [S, KV, K, D]."""
    shape = per_query_head.shape
    return per_query_head.reshape(shape[0], kv_heads, -1, *shape[2:]).sum(2)

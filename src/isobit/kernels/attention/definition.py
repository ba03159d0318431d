"""Causal grouped-query attention over stored keys and values, forward and backward, in float64 with
one rounding.

A row at position p attends to keys 0 to p of the same sequence, or to the last `window` of these,
wherever their pages are. Rows are taken in *pieces*, at most 256 consecutive rows of a sequence;
pieces of like size are batched and padded, and a padded key has probability exactly 0. The forward
is the same for decoding, chunked prefill and the learner's packed rows; the backward takes packed
rows only. Quantized keys and values are read as code times scale in float32, and the gradient goes
straight through the quantization (Bengio et al. 2013), that of probabilities too.

The sums of the forward are float64 trees (`sums.tree_sum`): a score's over the head dimension, the
denominator's and P·V's over the keys by position, so that padded keys, whose probability is exactly
0, change nothing. A BLAS computes them wherever that is shown to lead to the same rounding of the
output and of the log-sum-exp, and to the same codes of probabilities in E4M3, whose scores are
summed in lanes (`probabilities.py`). So a row's bits are the same in every batch: *proven* for
finite keys and values, if exp and log are right to 4 units in the last place and return the same
number for the same number (`tests/kernels/test_attention.py`, `test_attention_order.py`). The
backward only has to repeat: its sums are in the order of the BLAS.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from isobit.kernels.attention.probabilities import lane_sum, uncertain, weigh
from isobit.kernels.layout import Layout
from isobit.kernels.ops import Ops
from isobit.kernels.reference.rounding import round_once
from isobit.kernels.reference.sums import UNIT, norm_bound, tree_sum, undecided
from isobit.kernels.stores import KVStore
from isobit.precision import Format, QTensor, QuantSpec

_PIECE_ROWS = 256
_BATCH_ELEMENTS = (
    1 << 22
)  # of scores, or of keys and values, in a padded batch: bounds its memory to some 100 MB
_CHUNK_ELEMENTS = 1 << 17  # of products of a tree at a time
_SINK_ROWS = 1024  # that are in float64 at a time, of all heads
_FEW_KEYS = 32  # pieces with fewer keys than this count as alike


def attention(
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    probabilities: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(q·kᵀ·scale)·v and the log-sum-exp of the scores (Vaswani et al. 2017, eq. 1),
    a head's sink among them, whose weight is the last that is added to the sum of weights."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty((*q.shape[:2], 1), dtype=torch.float64, device=q.device)
    for batch in _batches(layout, q.shape[1], store, torch.float64, window):
        inputs = _Operands(
            batch.gather(q), *batch.read(store), scale, batch.of_heads(sinks), probabilities
        )
        error = _error(inputs)
        mixed, normalizer, unsure = _mix(
            batch.scores(inputs.queries, inputs.keys, scale), inputs, error
        )
        _in_order(batch, inputs, error, mixed, normalizer, unsure, q.dtype)
        batch.scatter(mixed, out)
        batch.scatter(normalizer, lse)
    return round_once(out, q.dtype), lse.squeeze(-1).float()


def attend(
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    dtype: torch.dtype,
    probabilities: Format | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, D], lse [T, H]) computed in `dtype`, with sums in the order of the BLAS.
    `probabilities`: the format to which unnormalized probabilities are rounded before P·V, but not
    in their sum."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty((*q.shape[:2], 1), dtype=dtype, device=q.device)
    for batch in _batches(layout, q.shape[1], store, dtype, window):
        inputs = _Operands(
            batch.gather(q), *batch.read(store), scale, batch.of_heads(sinks), probabilities
        )
        mixed, normalizer, _ = _mix(batch.scores(inputs.queries, inputs.keys, scale), inputs, None)
        batch.scatter(mixed, out)
        batch.scatter(normalizer, lse)
    return out, lse.squeeze(-1)


class _Operands(NamedTuple):
    """The inputs of a batch's rows: queries [S, KV, G·R, D], keys and values [S, KV, K, D], a sink
    for each row of queries, and the format of unnormalized probabilities."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    sink: Tensor | None
    probabilities: Format | None


def _mix(
    scores: Tensor, operands: _Operands, error: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (mixed values [S, KV, G·R, D], log-sum-exp [S, KV, G·R, 1], rows [S, KV, G·R] of which
    scores within `error` might have probabilities of other codes) of scores, which are
    overwritten."""
    peak = _highest(scores, operands.sink)
    shifted = scores.sub_(peak)
    unsure = None if error is None or operands.probabilities is None else uncertain(shifted, error)
    weights, rounded = weigh(shifted, operands.probabilities)
    total = _with_sink(weights.sum(-1, keepdim=True), peak, operands.sink)
    return torch.matmul(rounded, operands.values).div_(total), peak.add_(total.log()), unsure


def _highest(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the largest score along the last dimension (kept, with size 1), or the attention
    sink's score where that is larger."""
    peak = scores.amax(-1, keepdim=True)
    return peak if sink is None else torch.maximum(peak, sink)


def _with_sink(total: Tensor, peak: Tensor, sink: Tensor | None) -> Tensor:
    return total if sink is None else total + torch.exp(sink - peak)


def _error(operands: _Operands) -> Tensor:
    """Return how far two orders of sums may be apart: in the log-sum-exp, in score - peak, and in
    the output over the largest value that it is a mean of [S, KV, G·R, 1].

    To first order, in units of 2^-53 and with B the largest |q|·|k|·scale: two orders of a score
    are (D + 12) B apart; a weight, relatively, twice that, 4 B for the roundings of its exponent
    and 16 for those of exp; numerator and denominator both that and K + 32 for their own sums; and
    P·V is a mean of values below the largest. That is (4 D + 56) B + 2 K + 96, which bounds the
    log-sum-exp too; an eighth more covers the higher orders. A sink is one key more, of a score
    that has no error, and B the largest magnitude of any score.
    """
    reach = norm_bound(operands.queries).unsqueeze(-1) * (
        norm_bound(operands.keys).amax(-1)[..., None, None] * abs(operands.scale)
    )
    reach = reach if operands.sink is None else reach + operands.sink.abs()
    error = (
        (4.5 * operands.queries.shape[-1] + 64) * reach + (2.25 * operands.keys.shape[-2] + 128)
    ) * UNIT
    return error.masked_fill_(error > 2.0**-10, torch.inf)


def _in_order(
    batch: "_Batch",
    operands: _Operands,
    error: Tensor,
    mixed: Tensor,
    normalizer: Tensor,
    unsure: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Replace the results of rows whose rounding, or a code of whose probabilities, might change
    with the order of sums by those of the trees. A code's value is at most twice the weight, so
    those of a row add up to at most two."""
    largest = operands.values.abs().amax(-2, keepdim=True)
    largest.add_(largest.sign(), alpha=2.0**-66)
    if unsure is not None:
        largest.mul_(2)
    results = torch.cat(
        (undecided(mixed, error * largest, dtype), undecided(normalizer, error, torch.float32))
    )[:, :3]
    results = results if unsure is None else torch.cat((results, unsure.nonzero()))
    groups, owner = torch.unique(results[:, :2], dim=0, return_inverse=True)
    for index, (piece, head) in enumerate(groups.tolist()):
        rows = torch.unique(results[owner == index, 2])
        rows = rows[batch.valid[piece, rows % batch.valid.shape[1]]]
        transposed = operands.keys[piece, head].t().contiguous()
        v = operands.values[piece, head].contiguous()
        for chunk in rows.split(max(1, _CHUNK_ELEMENTS // v.numel())):
            products = operands.queries[piece, head, chunk].unsqueeze(-1) * transposed
            scores = (
                tree_sum(products, dim=1) if operands.probabilities is None else lane_sum(products)
            )
            scores.mul_(operands.scale)
            scores.masked_fill_(~batch.visible[piece, chunk % batch.valid.shape[1]], float("-inf"))
            own_sink = None if operands.sink is None else operands.sink[0, head, chunk]
            peak = _highest(scores, own_sink)
            weights, rounded = weigh(scores.sub_(peak), operands.probabilities)
            total = _with_sink(tree_sum(weights).unsqueeze(-1), peak, own_sink)
            mixed[piece, head, chunk] = tree_sum(rounded.unsqueeze(-1) * v, dim=1).div_(total)
            normalizer[piece, head, chunk] = peak.add_(total.log_())


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
    """Compute `Ops.attention_backward` from recomputed probabilities (Dao et al. 2022, section
    3.1): dS = P·(dP - Σ dO·O)."""
    assert_whole(layout)
    dq = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    dk = torch.zeros(
        (len(layout.key_slots), *store.k.shape[1:]), dtype=torch.float64, device=q.device
    )
    dv = torch.zeros_like(dk)
    for batch in _batches(layout, q.shape[1], store, torch.float64, window):
        keys, values = batch.read(store)
        queries, gradient = batch.gather(q), batch.gather(dout)
        # padded rows: exp(score - inf) is 0, so that they give nothing to dk and dv
        normalizer = batch.gather(lse.unsqueeze(-1), padding=float("inf"))
        weights = batch.scores(queries, keys, scale).sub_(normalizer).exp_()
        inner = (gradient * batch.gather(out)).sum(-1, keepdim=True)
        dscores = (
            torch.matmul(gradient, values.transpose(-1, -2)).sub_(inner).mul_(weights).mul_(scale)
        )
        batch.scatter(torch.matmul(dscores, keys), dq)
        batch.add_to_keys(torch.matmul(dscores.transpose(-1, -2), queries), dk)
        batch.add_to_keys(torch.matmul(weights.transpose(-1, -2), gradient), dv)
    return round_once(dq, q.dtype), round_once(dk, q.dtype), round_once(dv, q.dtype)


def assert_whole(layout: Layout) -> None:
    """Assert that the batch has the rows that stored the keys, which a backward needs."""
    assert layout.keys is not None or not layout.context.any(), (
        "a backward takes packed layouts, or such with keys"
    )


class _Piece(NamedTuple):
    """Consecutive `rows` of one sequence, from row `first` of the batch on; the last of them sees
    `keys` keys. The sequence's own keys begin at `start`."""

    sequence: int
    first: int
    rows: int
    keys: int
    start: int


def _pieces(layout: Layout) -> Iterator[_Piece]:
    start = layout.row_start.tolist()
    context = layout.context.tolist()
    key_start = layout.key_start.tolist()
    for sequence, stored in enumerate(context):
        for first in range(start[sequence], start[sequence + 1], _PIECE_ROWS):
            last = min(first + _PIECE_ROWS, start[sequence + 1])
            yield _Piece(
                sequence, first, last - first, stored + last - start[sequence], key_start[sequence]
            )


def _batches(
    layout: Layout, num_heads: int, store: KVStore, dtype: torch.dtype, window: int | None
) -> Iterator["_Batch"]:
    """Yield pieces whose rows and keys are alike within a factor of two, in batches of bounded
    memory, to compute in `dtype`. The order of the pieces of one sequence, and so of the sums in
    `add_to_keys`, depends on that sequence alone."""
    kv_heads, dim = store.k.shape[1:]

    def likeness(piece: _Piece) -> tuple[int, int]:
        return piece.rows.bit_length(), max(piece.keys, _FEW_KEYS).bit_length()

    for _, alike in groupby(sorted(_pieces(layout), key=likeness), likeness):
        pieces = list(alike)
        rows, keys = max(piece.rows for piece in pieces), max(piece.keys for piece in pieces)
        size = max(1, _BATCH_ELEMENTS // (keys * max(num_heads * rows, 2 * kv_heads * dim)))
        for start in range(0, len(pieces), size):
            yield _Batch(layout, pieces[start : start + size], kv_heads, dtype, window)


class _Batch:
    """Some pieces, padded: S pieces of R rows and K keys each.

    Tensors are of `dtype`. Those of queries are [S, KV, G·R, ...], where G query heads share a key
    head, so that all of them are one product with keys and values [S, KV, K, D].
    """

    def __init__(
        self,
        layout: Layout,
        pieces: list[_Piece],
        kv_heads: int,
        dtype: torch.dtype,
        window: int | None,
    ) -> None:
        device = layout.positions.device
        sequence, first, count, keys, _ = (
            torch.tensor(column, device=device).unsqueeze(1) for column in zip(*pieces)
        )
        row = torch.arange(max(piece.rows for piece in pieces), device=device)
        key = torch.arange(max(piece.keys for piece in pieces), device=device)
        self.pieces, self.kv_heads, self.dtype = pieces, kv_heads, dtype
        self.valid = row < count
        self.rows = torch.where(self.valid, first + row, first)
        present = key < keys
        page = torch.where(present, key // layout.page_size, 0)
        slots = layout.page_table[sequence, page].long() * layout.page_size + key % layout.page_size
        self.slots = torch.where(present, slots, layout.slots[first])
        position = (keys - count + row).unsqueeze(-1)
        self.visible = present.unsqueeze(1) & (key <= position)
        if window is not None:  # a padded row would see none, and have no probabilities
            self.visible &= (key > position - window) | ~self.valid.unsqueeze(-1)

    def read(self, store: KVStore) -> tuple[Tensor, Tensor]:
        """Return the keys and values [S, KV, K, D] of the batch's sequences."""
        keys, values = store.gather(self.slots)
        return keys.to(self.dtype).transpose(1, 2), values.to(self.dtype).transpose(1, 2)

    def gather(self, rows: Tensor, padding: float | None = None) -> Tensor:
        """Return rows [T, H, D] as [S, KV, G·R, D]; padded rows repeat the first one, or are
        `padding`."""
        picked = rows[self.rows].to(self.dtype)
        if padding is not None:
            picked.masked_fill_(~self.valid[:, :, None, None], padding)
        pieces, count, heads, dim = picked.shape
        grouped = picked.view(pieces, count, self.kv_heads, heads // self.kv_heads, dim).permute(
            0, 2, 3, 1, 4
        )
        return grouped.reshape(pieces, self.kv_heads, -1, dim)

    def scores(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Return queries·keysᵀ·scale [S, KV, G·R, K], -inf where a row does not see the key."""
        scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale)
        pieces, rows, count = self.visible.shape
        scores.view(pieces, self.kv_heads, -1, rows, count).masked_fill_(
            ~self.visible[:, None, None], float("-inf")
        )
        return scores

    def of_heads(self, values: Tensor | None) -> Tensor | None:
        """Return one number for each head [H], as [1, KV, G·R, 1]."""
        if values is None:
            return None
        grouped = values.to(self.dtype).view(1, self.kv_heads, -1, 1)
        return grouped.expand(-1, -1, -1, self.valid.shape[1]).reshape(1, self.kv_heads, -1, 1)

    def scatter(self, padded: Tensor, out: Tensor) -> None:
        """Write the valid rows of [S, KV, G·R, D] into `out` [T, H, D]."""
        pieces, _, _, dim = padded.shape
        ungrouped = padded.view(pieces, self.kv_heads, -1, self.valid.shape[1], dim).permute(
            0, 3, 1, 2, 4
        )
        out[self.rows[self.valid]] = ungrouped.reshape(pieces, self.valid.shape[1], -1, dim)[
            self.valid
        ]

    def add_to_keys(self, padded: Tensor, out: Tensor) -> None:
        """Add [S, KV, K, D] to `out` [all keys, KV, D], piece by piece."""
        for piece, gradient in zip(self.pieces, padded.transpose(1, 2)):
            out[piece.start : piece.start + piece.keys] += gradient[: piece.keys]


def sinks_backward(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute `Ops.sinks_backward`: the value of a sink is 0, so that of dS = P · (dO·V - Σ dO·O)
    the second term is left."""
    rows = zip(dout.split(_SINK_ROWS), out.split(_SINK_ROWS))
    inner = torch.cat([(gradient.double() * values.double()).sum(-1) for gradient, values in rows])
    return -(torch.exp(sinks.double() - lse.double()) * inner).sum(0).float()


def attention_quantized(
    ops: Ops, q: Tensor, store: KVStore, layout: Layout, scale: float, window: int | None,
    sinks: Tensor | None, probabilities: Format | None, spec: QuantSpec, name: str, keep: bool,
) -> tuple[Tensor | None, QTensor, Tensor]:  # fmt: skip
    """Compute `Ops.attention_quantized`: the two operators in turn."""
    out, lse = ops.attention(q, store, layout, scale, window, sinks, probabilities)
    return out if keep else None, ops.quantize(out.flatten(1), spec, name), lse

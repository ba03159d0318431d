"""Attention: against one loop per row, paged against packed bit for bit, gradients against float64
autograd."""

import math

import pytest
import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels import KVStore, Layout, get_ops
from isobit.kernels.attention import definition as implementation
from isobit.precision import BF16, E4M3, FP32, INT8, QuantSpec, quantize

from .helpers import draw, ordinals, same, threads

OPS = get_ops("reference", "exact")
CACHES = {
    "bf16": (BF16, None),
    "fp32": (FP32, None),
    "e4m3 ue8m0": (BF16, QuantSpec(E4M3, "row", "ue8m0")),
    "e4m3 fp32": (BF16, QuantSpec(E4M3, "row", "fp32")),
    "int8": (BF16, QuantSpec(INT8, "row", "fp32")),
}
HEADS = ((6, 2, 16), (3, 3, 7), (4, 1, 40))
"""Query heads, key heads, head dimension."""


def inputs(
    cache: str, rows: int, heads: tuple[int, int, int], spread: float = 0.0
) -> tuple[Tensor, ...]:
    """q, k, v, dout."""
    num_heads, kv_heads, dim = heads
    dtype = CACHES[cache][0].dtype
    return tuple(
        draw(seed, rows, count, dim, dtype=dtype, spread=spread)
        for seed, count in enumerate((num_heads, kv_heads, kv_heads, num_heads))
    )


def filled(cache: str, k: Tensor, v: Tensor, layout: Layout) -> KVStore:
    compute, kv = CACHES[cache]
    store = KVStore.allocate(layout.num_slots, k.shape[1], k.shape[2], kv, compute)
    OPS.kv_write(store, k, v, layout)
    return store


def read_back(cache: str, rows: Tensor) -> Tensor:
    """What a store makes of keys or values [T, KV, D], in float64."""
    kv = CACHES[cache][1]
    if kv is None:
        return rows.double()
    return quantize(rows.reshape(-1, rows.shape[-1]), kv).dequantize().view(rows.shape).double()


def one_row(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [H, D] over keys and values [K, KV, D], all float64: (out [H, D], lse [H])."""
    group = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("hd,khd->hk", q, keys) * scale
    return torch.einsum("hk,khd->hd", torch.softmax(scores, -1), values), torch.logsumexp(
        scores, -1
    )


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", HEADS)
def test_every_row_attends_to_the_keys_before_it(cache: str, heads: tuple[int, int, int]) -> None:
    lengths = [5, 0, 1, 40, 17, 33]
    q, k, v, _ = inputs(cache, sum(lengths), heads, spread=0.5)
    layout = Layout.packed(lengths)
    out, lse = OPS.attention(q, filled(cache, k, v, layout), layout, 0.3)
    keys, values = read_back(cache, k), read_back(cache, v)
    row = 0
    for length in lengths:
        for position in range(length):
            seen = slice(row - position, row + 1)
            expected, normalizer = one_row(q[row].double(), keys[seen], values[seen], 0.3)
            assert int((ordinals(out[row]) - ordinals(expected.to(out.dtype))).abs().max()) <= 1
            torch.testing.assert_close(lse[row].double(), normalizer, rtol=2**-24, atol=1e-9)
            row += 1
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)


def test_known_answers() -> None:
    """Equal scores average the values; a score far above the others picks its value; one key is
    returned as it is."""
    layout = Layout.packed([3])
    store = KVStore.allocate(16, 1, 2, None, FP32)
    k = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 100.0]]])
    v = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]], [[-1.0, 5.0]]])
    OPS.kv_write(store, k, v, layout)
    out, lse = OPS.attention(torch.tensor([[[0.0, 1.0]]] * 3), store, layout, 1.0)
    assert out.squeeze(1).tolist() == [[1.0, 2.0], [2.0, 4.0], [-1.0, 5.0]]
    assert lse.squeeze(1).tolist() == [0.0, pytest.approx(math.log(2)), 100.0]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_paged_chunks_are_packed_rows_bit_for_bit(cache: str, num_threads: int) -> None:
    """Decoding, prefill in chunks and both at once, over scattered pages of several sizes, in
    changing batches."""
    lengths = [1, 90, 17, 33, 300]
    starts = [0, 1, 91, 108, 141]
    q, k, v, _ = inputs(cache, sum(lengths), (6, 2, 24))
    packed = Layout.packed(lengths)
    random = torch.Generator().manual_seed(1)
    with threads(num_threads):
        out, lse = OPS.attention(q, filled(cache, k, v, packed), packed, 0.2)
        for page_size, chunks in ((16, [300]), (16, [1, 40]), (4, [7, 1, 60]), (1, [64, 33])):
            pages = -(-max(lengths) // page_size)
            table = torch.randperm(pages * len(lengths), generator=random).view(len(lengths), pages)
            compute, kv = CACHES[cache]
            store = KVStore.allocate(table.numel() * page_size, 2, 24, kv, compute)
            done, step = [0] * len(lengths), 0
            while live := [s for s in range(len(lengths)) if done[s] < lengths[s]]:
                live = [live[i] for i in torch.randperm(len(live), generator=random).tolist()]
                counts = [min(chunks[(step + s) % len(chunks)], lengths[s] - done[s]) for s in live]
                parts = [torch.arange(n) + starts[s] + done[s] for s, n in zip(live, counts)]
                rows = torch.cat(parts)
                layout = Layout.build(counts, [done[s] for s in live], table[live].int(), page_size)
                OPS.kv_write(store, k[rows], v[rows], layout)
                part, part_lse = OPS.attention(q[rows], store, layout, 0.2)
                assert same(part, out[rows])
                assert same(part_lse, lse[rows])
                for s, n in zip(live, counts):
                    done[s] += n
                step += 1


def test_a_changed_key_is_noticed() -> None:
    """A negative control of the test above: with another key 20, rows 20 and later differ, and no
    earlier one does."""
    q, k, v, _ = inputs("bf16", 40, (6, 2, 24))
    layout = Layout.packed([40])
    before, _ = OPS.attention(q, filled("bf16", k, v, layout), layout, 0.2)
    k[20] *= 1.01
    after, _ = OPS.attention(q, filled("bf16", k, v, layout), layout, 0.2)
    assert same(before[:20], after[:20])
    assert bool((before[20:] != after[20:]).flatten(1).any(-1).all())


@pytest.mark.parametrize(("granularity", "depends"), [("row", False), ("tensor", True)])
def test_one_scale_for_all_tokens_is_noticed(granularity: str, depends: bool) -> None:
    """Another one: keys quantized with one scale for the whole chunk depend on the chunk; one per
    head does not."""
    rows = inputs("bf16", 40, (6, 2, 24), spread=1.0)[1].reshape(-1, 24)
    spec = QuantSpec(E4M3, granularity, "fp32")
    whole = quantize(rows, spec).dequantize()
    halves = torch.cat([quantize(half, spec).dequantize() for half in rows.chunk(2)])
    assert same(whole, halves) != depends


def test_float32_scores_are_noticed() -> None:
    """And a third: the same rows in float32 arithmetic do depend on the batch, or differ from the
    definition."""
    q, k, v, _ = inputs("fp32", 300, (6, 6, 24))
    layout = Layout.packed([300])
    out, _ = OPS.attention(q, filled("fp32", k, v, layout), layout, 0.2)
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    other = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.2)
    other = other.squeeze(0).transpose(0, 1)
    assert not same(out, other)
    torch.testing.assert_close(out, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", HEADS)
def test_gradients_are_those_of_float64_autograd(cache: str, heads: tuple[int, int, int]) -> None:
    """With respect to the dequantized keys and values: straight through the quantization."""
    lengths = [5, 1, 300, 17, 0, 33]
    q, k, v, dout = inputs(cache, sum(lengths), heads)
    layout = Layout.packed(lengths)
    store = filled(cache, k, v, layout)
    out, lse = OPS.attention(q, store, layout, 0.3)
    gradients = OPS.attention_backward(dout, q, out, lse, store, layout, 0.3)

    leaves = [x.requires_grad_() for x in (q.double(), read_back(cache, k), read_back(cache, v))]
    parts, start = [], 0
    for length in lengths:
        queries, keys, values = (x[start : start + length].transpose(0, 1) for x in leaves)
        keys, values = (x.repeat_interleave(heads[0] // heads[1], 0) for x in (keys, values))
        scores = (queries @ keys.transpose(1, 2) * 0.3).masked_fill(
            torch.ones(length, length).triu(1) > 0, -math.inf
        )
        parts.append((torch.softmax(scores, -1) @ values).transpose(0, 1))
        start += length
    expected = torch.autograd.grad(torch.cat(parts), leaves, dout.double())
    # lse and out come rounded: to float32, and to the compute type, whose error enters through Σ
    # dO·O
    tolerance = 2e-6 if cache == "fp32" else 6e-3
    for ours, theirs, like in zip(gradients, expected, (q, k, v)):
        assert ours.dtype == q.dtype
        assert ours.shape == like.shape
        assert float((ours.double() - theirs).norm()) <= tolerance * float(theirs.norm())
        assert float((ours.double() - theirs).abs().max()) <= 4 * tolerance * float(
            theirs.abs().max()
        )


@pytest.mark.parametrize("cache", ["bf16", "e4m3 ue8m0"])
def test_gradients_of_a_sequence_do_not_depend_on_the_others(cache: str) -> None:
    lengths = [50, 1, 33, 300]
    q, k, v, dout = inputs(cache, sum(lengths), (6, 2, 24))

    def gradients(rows: slice, parts: list[int]) -> tuple[Tensor, ...]:
        layout = Layout.packed(parts)
        store = filled(cache, k[rows], v[rows], layout)
        out, lse = OPS.attention(q[rows], store, layout, 0.2)
        return OPS.attention_backward(dout[rows], q[rows], out, lse, store, layout, 0.2)

    together, start = gradients(slice(None), lengths), 0
    for length in lengths:
        rows = slice(start, start + length)
        for whole, alone in zip(together, gradients(rows, [length])):
            assert same(whole[rows], alone)
        start += length


def test_scores_beyond_the_range_of_exp() -> None:
    """Scores in the thousands, sequences padded beside each other: finite, and the largest score
    takes all."""
    lengths = [9, 12, 8]
    q, k, v, dout = inputs("fp32", 29, (2, 2, 8))
    q, k = q * 100, k * 100
    layout = Layout.packed(lengths)
    store = filled("fp32", k, v, layout)
    out, lse = OPS.attention(q, store, layout, 1.0)
    assert float(lse.max() - lse.min()) > 10_000
    for x in (out, lse, *OPS.attention_backward(dout, q, out, lse, store, layout, 1.0)):
        assert bool(torch.isfinite(x).all())
    winner = int(torch.einsum("hd,khd->hk", q[8], k[:9])[0].argmax())
    torch.testing.assert_close(out[8, 0], v[winner, 0])


def test_batches_of_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter pieces and smaller batches, which bound the memory, give the same forward."""
    lengths = [130, 1, 64, 90, 64]
    q, k, v, _ = inputs("e4m3 ue8m0", sum(lengths), (6, 2, 24))
    layout = Layout.packed(lengths)
    store = filled("e4m3 ue8m0", k, v, layout)
    whole = OPS.attention(q, store, layout, 0.2)
    for rows, elements in ((7, 1), (64, 40_000), (1, 1 << 22)):
        monkeypatch.setattr(implementation, "_PIECE_ROWS", rows)
        monkeypatch.setattr(implementation, "_BATCH_ELEMENTS", elements)
        for ours, theirs in zip(OPS.attention(q, store, layout, 0.2), whole):
            assert same(ours, theirs)


@pytest.mark.parametrize("cache", ["e4m3 ue8m0", "e4m3 fp32", "int8"])
def test_keys_and_values_are_quantized_per_token_and_head(cache: str) -> None:
    _, k, v, _ = inputs(cache, 20, (2, 2, 24), spread=2.0)
    layout = Layout.build([20], [3], torch.tensor([[2, 0]]), 16)
    store = filled(cache, k, v, layout)
    keys, values = store.gather(layout.slots)
    for rows, stored, scale in ((k, keys, store.k_scale), (v, values, store.v_scale)):
        assert scale is not None
        for token in range(20):
            for head in range(2):
                alone = quantize(rows[token, head : head + 1], CACHES[cache][1])
                assert same(stored[token, head], alone.dequantize()[0])
                assert same(scale[layout.slots[token], head], alone.scale[0, 0])
    untouched = torch.ones(store.k.shape[0], dtype=torch.bool)
    untouched[layout.slots] = False
    assert not store.k[untouched].any()


def test_quantizing_what_is_not_finite_is_refused() -> None:
    _, k, v, _ = inputs("e4m3 ue8m0", 3, (2, 2, 8))
    v[1, 1, 5] = math.nan
    with pytest.raises(NonFiniteError, match="cannot quantize keys and values to e4m3"):
        filled("e4m3 ue8m0", k, v, Layout.packed([3]))


def test_the_backward_refuses_a_continued_sequence() -> None:
    q, k, v, dout = inputs("bf16", 4, (2, 2, 8))
    layout = Layout.build([4], [2], torch.tensor([[0]]), 16)
    store = filled("bf16", k, v, layout)
    out, lse = OPS.attention(q, store, layout, 1.0)
    with pytest.raises(AssertionError, match="packed layouts"):
        OPS.attention_backward(dout, q, out, lse, store, layout, 1.0)

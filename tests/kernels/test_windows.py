"""Sliding windows in attention, on a CPU: against plain PyTorch with a mask, C++ against the
definition bit for bit, and a row's bits in chunks and in decoding, where blocks of keys that no row
sees are left out."""

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, Ops, get_ops, inference_engine_ops
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.native import available
from isobit.precision import BF16, E4M3, FP32, QuantSpec

from .helpers import draw, same, threads

STORES = {"fp32": (FP32, None), "bf16": (BF16, None), "e4m3": (BF16, QuantSpec(E4M3, "row"))}
LENGTHS = [5, 0, 1, 100]
SCALE = 0.3
LEARNERS = [
    ("reference", "exact"),
    ("native", "exact"),
    ("native", "bitwise"),
]  # of whose bits there is a definition
ENGINES = [
    *LEARNERS,
    ("reference", "bitwise"),
    ("native", "fast"),
    ("reference", "separate"),
    ("native", "separate"),
]


def operators(backend: str, level: str) -> Ops:
    if backend == "native" and not available()[0]:
        pytest.skip(f"native backend: {available()[1]}")
    return (
        get_ops(backend, level)
        if level != "separate"
        else inference_engine_ops(get_ops(backend, "bitwise"))
    )


def problem(
    cache: str, heads: tuple[int, int, int], lengths: list[int]
) -> tuple[Tensor, Tensor, KVStore, Layout]:
    """(q, dout, store, layout) of packed rows."""
    (compute, kv), (num_heads, kv_heads, dim), rows = STORES[cache], heads, sum(lengths)
    counts = (num_heads, kv_heads, kv_heads, num_heads)
    q, k, v, dout = (draw(i, rows, n, dim, dtype=compute.dtype) for i, n in enumerate(counts))
    layout = Layout.packed(lengths)
    store = KVStore.allocate(layout.num_slots, kv_heads, dim, kv, compute)
    get_ops("reference").kv_write(store, k, v, layout)
    return q, dout, store, layout


def masked(
    q: Tensor, dout: Tensor, store: KVStore, layout: Layout, window: int
) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) in float64: every pair of rows that see each other is one entry of a
    mask."""
    group = q.shape[1] // store.k.shape[1]
    query, key, value = (x.double().requires_grad_() for x in (q, *store.gather(layout.slots)))
    sequence = torch.repeat_interleave(torch.arange(len(layout.context)), layout.row_start.diff())
    ahead = layout.positions.unsqueeze(1) - layout.positions
    seen = (sequence.unsqueeze(1) == sequence) & (ahead >= 0) & (ahead < window)
    scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(group, 1)) * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), value.repeat_interleave(group, 1))
    gradients = torch.autograd.grad(out, (query, key, value), dout.double())
    return (out.detach(), scores.detach().logsumexp(-1).t(), *gradients)


def computed(
    ops: Ops, problem: tuple[Tensor, Tensor, KVStore, Layout], window: int | None
) -> tuple[Tensor, ...]:
    q, dout, store, layout = problem
    out, lse = ops.attention(q, store, layout, SCALE, window)
    return (out, lse, *ops.attention_backward(dout, q, out, lse, store, layout, SCALE, window))


@pytest.mark.parametrize(("backend", "level"), LEARNERS)
@pytest.mark.parametrize("cache", STORES)
def test_a_row_attends_to_the_last_keys(backend: str, level: str, cache: str) -> None:
    """Values and gradients, to some roundings of the largest. The control is a window that is one
    key longer."""
    given = problem(cache, (2, 1, 16), LENGTHS)
    ops, rounding = operators(backend, level), 2.0**-20 if cache == "fp32" else 2.0**-7
    for window in (2, 7, 70):
        wanted, longer = (masked(*given, size) for size in (window, window + 1))
        for found, right, wrong in zip(computed(ops, given, window), wanted, longer, strict=True):
            bound = rounding * float(right.abs().max())
            assert float((found.double() - right).abs().max()) <= bound
            assert float((wrong - right).abs().max()) > 2 * bound


@pytest.mark.parametrize(("backend", "level"), ENGINES)
def test_a_window_as_long_as_the_sequence_is_none(backend: str, level: str) -> None:
    """The same bits. The control: of a shorter one only rows that it hides nothing from keep
    theirs."""
    q, _, store, layout = problem("e4m3", (2, 1, 16), [100])
    ops = operators(backend, level)
    out, lse = ops.attention(q, store, layout, SCALE)
    for window in (100, 101, 10_000):
        found = ops.attention(q, store, layout, SCALE, window)
        assert same(found[0], out)
        assert same(found[1], lse)
    short = ops.attention(q, store, layout, SCALE, 70)[0]
    if (backend, level) != ("reference", "separate"):  # whose sums are of a BLAS
        assert same(short[:70], out[:70])
    assert not bool((short[70:] == out[70:]).flatten(1).all(1).any())


@pytest.mark.parametrize("level", ["exact", "bitwise"])
@pytest.mark.parametrize("cache", STORES)
def test_gradients_of_a_long_window_are_those_of_none(level: str, cache: str) -> None:
    given = problem(cache, (2, 1, 16), LENGTHS)
    ops = operators("native", level)
    for found, wanted in zip(computed(ops, given, 100), computed(ops, given, None), strict=True):
        assert same(found, wanted)
    assert not same(computed(ops, given, 99)[2], computed(ops, given, None)[2])


@pytest.mark.slow
@pytest.mark.parametrize("cache", STORES)
def test_native_windows_are_the_definition_bit_for_bit(cache: str) -> None:
    """Blocks below every window are left out in C++ and added as zeros in the definition. Signs
    count: of zeros too."""
    native, reference = operators("native", "bitwise"), operators("reference", "bitwise")
    for heads, window in (((2, 1, 16), 1), ((1, 1, 20), 33), ((1, 1, 16), 64)):
        given = problem(cache, heads, LENGTHS)
        for found, wanted in zip(
            computed(native, given, window), computed(reference, given, window), strict=True
        ):
            assert same(found, wanted), (heads, window)


@pytest.mark.parametrize(("backend", "level"), LEARNERS)
@pytest.mark.parametrize("heads", [(2, 2, 32), (4, 1, 20)])
def test_decoding_chunks_and_packed_rows_agree(
    backend: str, level: str, heads: tuple[int, int, int]
) -> None:
    """One row at a time and in chunks, over pages of 3 keys in any order; keys below the window are
    others there, so what a row does not see changes no bit. The control: a key that it sees."""
    ops, length, window = operators(backend, level), 200, 50
    q, _, store, layout = problem("e4m3", heads, [length])
    out, lse = ops.attention(q, store, layout, SCALE, window)
    table = torch.randperm(70, generator=torch.Generator().manual_seed(2)).view(1, -1).int()
    paged = KVStore.allocate(210, heads[1], heads[2], store.kv, BF16)
    everything = Layout.build([length], [0], table, 3)
    for name in ("k", "v", "k_scale", "v_scale"):
        getattr(paged, name)[everything.slots] = getattr(store, name)[layout.slots]
    for first, count in ((199, 1), (64, 1), (113, 1), (130, 37), (49, 2), (0, 200)):
        below = everything.slots[: max(0, first - window + 1)]
        changed = KVStore(paged.k.clone(), paged.v.clone(), paged.k_scale, paged.v_scale, paged.kv)
        changed.k[below], changed.v[below] = (x[below].flip(-1) ^ 0x80 for x in (paged.k, paged.v))
        rows = slice(first, first + count)
        part = Layout.build([count], [first], table, 3)
        with threads(1 + first % 2):
            found = ops.attention(q[rows], changed, part, SCALE, window)
        assert same(found[0], out[rows]), (first, count)
        assert same(found[1], lse[rows]), (first, count)
        changed.k[everything.slots[max(0, first - window + 1)]] ^= 0x80
        assert not same(ops.attention(q[rows], changed, part, SCALE, window)[1], lse[rows])


def test_gradients_of_a_sequence_do_not_depend_on_the_others() -> None:
    for level in ("exact", "bitwise"):
        ops = operators("native", level)
        assert isinstance(ops, NativeOps)
        given = problem("bf16", (2, 1, 16), [90, 70])
        together = computed(ops, given, 40)
        q, dout, store, layout = given
        alone = Layout.build([70], [0], layout.page_table[1:], layout.page_size)
        for whole, part in zip(
            together, computed(ops, (q[90:], dout[90:], store, alone), 40), strict=True
        ):
            assert same(whole[90:], part)

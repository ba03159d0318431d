"""Attention sinks on a CPU: against plain PyTorch with one more column of scores, C++ against the
definition bit for bit, and a row's bits in chunks and in decoding."""

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, Ops, get_ops, inference_engine_ops
from isobit.kernels.native import available
from isobit.precision import BF16

from .helpers import draw, same, threads
from .test_windows import ENGINES, LEARNERS, LENGTHS, SCALE, STORES, problem

EXTREME = torch.tensor([-1e30, -80.0, -1.5, 0.0, 0.75, 3.0, 40.0, 300.0])
"""From a sink that takes nothing to one that takes everything."""
Problem = tuple[Tensor, Tensor, KVStore, Layout]


def operators(backend: str, level: str) -> Ops:
    if backend == "native" and not available()[0]:
        pytest.skip(f"native backend: {available()[1]}")
    return (
        get_ops(backend, level)
        if level != "separate"
        else inference_engine_ops(get_ops(backend, "bitwise"))
    )


def with_a_column(given: Problem, sinks: Tensor, window: int) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv, gradient of the sinks) in float64, as transformers has it: a column of
    scores more, which the softmax takes and the values do not."""
    q, dout, store, layout = given
    group = q.shape[1] // store.k.shape[1]
    query, key, value = (x.double().requires_grad_() for x in (q, *store.gather(layout.slots)))
    sink = sinks.double().requires_grad_()
    sequence = torch.repeat_interleave(torch.arange(len(layout.context)), layout.row_start.diff())
    ahead = layout.positions.unsqueeze(1) - layout.positions
    seen = (sequence.unsqueeze(1) == sequence) & (ahead >= 0) & (ahead < window)
    scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(group, 1)) * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    scores = torch.cat((scores, sink.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), -1)
    weights = scores.softmax(-1)[..., :-1]
    out = torch.einsum("hts,shd->thd", weights, value.repeat_interleave(group, 1))
    gradients = torch.autograd.grad(out, (query, key, value, sink), dout.double())
    return (out.detach(), scores.detach().logsumexp(-1).t(), *gradients)


def computed(
    ops: Ops, given: Problem, sinks: Tensor | None, window: int | None
) -> tuple[Tensor, ...]:
    q, dout, store, layout = given
    out, lse = ops.attention(q, store, layout, SCALE, window, sinks)
    found = (out, lse, *ops.attention_backward(dout, q, out, lse, store, layout, SCALE, window))
    return found if sinks is None else (*found, ops.sinks_backward(dout, out, lse, sinks))


@pytest.mark.parametrize(("backend", "level"), LEARNERS)
@pytest.mark.parametrize("cache", STORES)
def test_a_sink_is_one_column_of_scores_more(backend: str, level: str, cache: str) -> None:
    """Values and gradients, to some roundings of the largest. The control are the sinks of other
    heads."""
    given = problem(cache, (4, 2, 16), LENGTHS)
    ops, rounding = operators(backend, level), 2.0**-20 if cache == "fp32" else 2.0**-6
    sinks = torch.tensor([-2.0, 0.3, 1.0, 4.0])
    for window in (7, 200):
        wanted, others = (with_a_column(given, values, window) for values in (sinks, sinks.flip(0)))
        for found, right, wrong in zip(
            computed(ops, given, sinks, window), wanted, others, strict=True
        ):
            bound = rounding * float(right.abs().max())
            assert float((found.double() - right).abs().max()) <= bound
            assert float((wrong - right).abs().max()) > 2 * bound


@pytest.mark.parametrize(("backend", "level"), LEARNERS)
def test_sinks_of_any_size(backend: str, level: str) -> None:
    """One that is far below every score is none, bit for bit; one that is far above takes all."""
    given = problem("bf16", (8, 1, 16), LENGTHS)
    ops = operators(backend, level)
    found, none = computed(ops, given, EXTREME, None), computed(ops, given, None, None)
    assert all(bool(torch.isfinite(x).all()) for x in found)
    for ours, theirs in zip(found[:2], none[:2]):
        assert same(ours[:, 0], theirs[:, 0])
        assert not same(ours[:, 3], theirs[:, 3])
    assert not bool(found[0][:, 7].any())
    assert same(found[1][:, 7], torch.full((sum(LENGTHS),), 300.0))
    assert float(found[5][0]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("cache", STORES)
def test_native_sinks_are_the_definition_bit_for_bit(cache: str) -> None:
    native, reference = operators("native", "bitwise"), operators("reference", "bitwise")
    for heads, window in (((8, 1, 16), None), ((8, 4, 20), 33), ((8, 8, 16), 1)):
        given = problem(cache, heads, LENGTHS)
        found, wanted = (computed(ops, given, EXTREME, window) for ops in (native, reference))
        assert all(map(same, found, wanted)), (heads, window)
        assert not same(found[0], computed(native, given, EXTREME.flip(0), window)[0])


@pytest.mark.parametrize(("backend", "level"), LEARNERS)
@pytest.mark.parametrize("heads", [(2, 2, 32), (4, 1, 20)])
def test_decoding_chunks_and_packed_rows_agree(
    backend: str, level: str, heads: tuple[int, int, int]
) -> None:
    """Also where scores are near their sinks, and where the order of sums decides a rounding. The
    control: a sink that is a last place larger."""
    ops, length, window = operators(backend, level), 200, 50
    q, _, store, layout = problem("e4m3", heads, [length])
    sinks = torch.linspace(-1.0, 5.0, heads[0])
    out, lse = ops.attention(q, store, layout, SCALE, window, sinks)
    table = torch.randperm(70, generator=torch.Generator().manual_seed(2)).view(1, -1).int()
    paged = KVStore.allocate(210, heads[1], heads[2], store.kv, BF16)
    everything = Layout.build([length], [0], table, 3)
    for name in ("k", "v", "k_scale", "v_scale"):
        getattr(paged, name)[everything.slots] = getattr(store, name)[layout.slots]
    for first, count in ((199, 1), (64, 1), (130, 37), (49, 2), (0, 200)):
        rows, part = slice(first, first + count), Layout.build([count], [first], table, 3)
        with threads(1 + first % 2):
            found = ops.attention(q[rows], paged, part, SCALE, window, sinks)
        assert same(found[0], out[rows]), (first, count)
        assert same(found[1], lse[rows]), (first, count)
    moved = ops.attention(
        q, store, layout, SCALE, window, torch.nextafter(sinks, torch.tensor(9.0))
    )
    assert not same(moved[1], lse)


@pytest.mark.parametrize(("backend", "level"), ENGINES)
def test_other_heads_and_engines(backend: str, level: str) -> None:
    """Every engine is near the exact one, and a head knows of no other's sink."""
    q, dout, store, layout = problem("bf16", (4, 2, 16), [60, 9])
    sinks, ops = torch.tensor([0.5, -1.0, 2.0, 3.0]), operators(backend, level)
    out, lse = ops.attention(q, store, layout, SCALE, None, sinks)
    wanted = with_a_column((q, dout, store, layout), sinks, 100)
    assert float((out.double() - wanted[0]).abs().max()) < 2.0**-6
    assert float((lse.double() - wanted[1]).abs().max()) < 2.0**-10
    sinks[1] += 1.0
    other, other_lse = ops.attention(q, store, layout, SCALE, None, sinks)
    kept = [0, 2, 3]
    assert same(other[:, kept], out[:, kept])
    assert same(other_lse[:, kept], lse[:, kept])
    assert not same(other_lse[:, 1], lse[:, 1])


def test_the_exact_levels_sums_do_not_depend_on_padding() -> None:
    """The reference's trees decide roundings near sinks too: rows alone and beside a long
    sequence."""
    ops = get_ops("reference", "exact")
    q, _, store, layout = problem("bf16", (4, 1, 20), [7, 230])
    sinks = draw(5, 4, dtype=torch.float32) * 3
    whole = ops.attention(q, store, layout, SCALE, None, sinks)
    alone = Layout.build([7], [0], layout.page_table[:1], layout.page_size)
    for together, part in zip(whole, ops.attention(q[:7], store, alone, SCALE, None, sinks)):
        assert same(together[:7], part)

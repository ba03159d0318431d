"""Linear attention's kernels: float64 to a bound, the same bits however tokens are divided,
gradients."""

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels import DeltaHeads, Layout, StateStore
from isobit.kernels.delta import definition as reference
from isobit.kernels.delta.triton import backward as delta_backward
from isobit.kernels.delta.triton import convolution
from isobit.kernels.delta.triton import forward as delta
from isobit.precision import BF16, FP32
from tests.models import slow_where

from ..helpers import draw, same
from .helpers import DEVICE

DTYPES = (torch.bfloat16, torch.float32)
UNIT = 2.0**-24
LAST = {torch.bfloat16: 2.0**-8, torch.float32: UNIT}
WIDTH, PAGE = 4, 4
SIZES = (1, 2, 12, 12)
"""Heads of keys and values, and their dimensions: two blocks of columns, whose last is not whole,
nor are the rows."""
CHANNELS = 2 * 12 + 2 * 12
LENGTHS = (11, 1, 6)


def heads(device: torch.device | str = DEVICE) -> DeltaHeads:
    return DeltaHeads(
        *SIZES, torch.tensor([0.3, -1.0], device=device), torch.tensor([-0.5, 0.7], device=device)
    )


def weight() -> Tensor:
    return draw(1, CHANNELS, WIDTH, dtype=torch.float32)


def drawn(dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    """(inputs of the convolution or of the delta rule, its gates), with hard rows: zeros, and gates
    far out."""
    x, gates = draw(2, rows, CHANNELS, dtype=dtype), 2 * draw(3, rows, 4, dtype=torch.float32)
    x[1] = 0.0
    gates[2], gates[3] = -25.0, 25.0
    return x, gates


def allocated(
    num_pages: int, dtype: torch.dtype, device: torch.device | str = DEVICE
) -> StateStore:
    compute = BF16 if dtype == torch.bfloat16 else FP32
    return StateStore.allocate(
        num_pages, (WIDTH - 1, CHANNELS), (SIZES[1], *SIZES[2:]), compute, device
    )


@triton.jit
def _sums(x_ptr, y_ptr, LEVELS: tl.constexpr, B: tl.constexpr):
    column = tl.arange(0, B)[None, :]
    x = tl.load(x_ptr + tl.arange(0, 2**LEVELS)[:, None] * B + column)
    tl.store(y_ptr + column, delta.column_sums(x, LEVELS))


def test_sums_over_keys_are_neighbours_in_pairs() -> None:
    x = draw(4, 64, 8, dtype=torch.float32, spread=2.0)
    found = torch.empty(8, device=DEVICE)
    _sums[(1,)](x.to(DEVICE), found, LEVELS=6, B=8)
    wanted = x
    while len(wanted) > 1:
        wanted = wanted[::2] + wanted[1::2]
    assert same(found.cpu(), wanted[0])
    halves = x
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    assert not same(found.cpu(), halves[0]), "the control: another order"


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_is_float64s_to_a_bound(dtype: torch.dtype) -> None:
    """The sum has two roundings a term, where multiply-adds are not fused; the slope of silu is at
    most 1.1; its own error is that of exp (two units in the last place, and 2 |s| from its
    argument), of a sum and of a quotient."""
    x, _ = drawn(dtype, sum(LENGTHS))
    layout = Layout.packed(LENGTHS, PAGE)
    found = convolution.short_convolution(
        x.to(DEVICE), weight().to(DEVICE), None, layout.to(DEVICE)
    ).cpu()
    total, size, start = torch.zeros(2, *x.shape, dtype=torch.float64), 0, 0
    for length in LENGTHS:
        seen = torch.nn.functional.pad(x[start : start + length].double(), (0, 0, WIDTH - 1, 0))
        for j in range(WIDTH):
            term = seen[j : j + length] * weight()[:, j].double()
            total[0, start : start + length] += term
            total[1, start : start + length] += term.abs()
        start += length
    exact, size = total[0] * torch.sigmoid(total[0]), total[1]
    inner = 2.2 * WIDTH * UNIT * size + (8 + 2.01 * total[0].abs()) * UNIT * exact.abs()
    bound = 1.01 * inner + LAST[dtype] * (exact.abs() + inner) + 2.0**-126
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= bound).all())
    assert not bool(((found.double() - 1.01 * exact).abs() <= bound).all()), (
        "the control: one percent off"
    )


def normed(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale / (x.square().sum(-1, keepdim=True) + reference.EPS).sqrt()


def recurrence(
    qkv: Tensor, gates: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """(out, bound of its error, the last state of each sequence, bounds of the errors of its
    columns' lengths), of float64. The error of a column of the state is never enlarged by a token,
    as |I - b k kᵀ| is at most 1, and fades with it; a token adds the errors of what it fades,
    recalls and writes. Of an element of a query or key 8 roundings, of a sum over keys 6, of a
    strength 7 and its exponential's, of the exponent of fading those of two exponentials, a sum
    (times |a|), a logarithm, two quotients and three products."""
    own, (key_heads, value_heads, dim, columns) = heads("cpu"), SIZES
    q, k, v = qkv.double().split((key_heads * dim, key_heads * dim, value_heads * columns), -1)
    q, k = (
        x.unflatten(-1, (key_heads, dim)).repeat_interleave(value_heads // key_heads, 1)
        for x in (q, k)
    )
    q, k, v = normed(q, dim**-0.5), normed(k), v.unflatten(-1, (value_heads, columns))
    b, a = gates.double().chunk(2, -1)
    shifted, strength = a + own.step_bias.double(), torch.sigmoid(b)
    exponent = own.decay.double().exp() * torch.nn.functional.softplus(shifted, threshold=100.0)
    kept = torch.exp(-exponent)
    of_exponent = 20 + 2.01 * own.decay.double().abs() + 3.01 * shifted.abs()
    fading = (exponent * (of_exponent + 2.01) + 5) * UNIT
    writing = (7 + 2.01 * b.abs()) * UNIT
    out, bound = torch.zeros(2, *v.shape, dtype=torch.float64)
    states, errors, start = [], [], 0
    for length in lengths:
        state = torch.zeros(value_heads, dim, columns, dtype=torch.float64)
        error = torch.zeros(value_heads, columns, dtype=torch.float64)
        for t in range(start, start + length):
            g, s = kept[t, :, None], strength[t, :, None]
            faded = state * g[..., None]
            wanted = v[t] - torch.einsum("hk,hkv->hv", k[t], faded)
            state = faded + k[t].unsqueeze(-1) * (wanted * s).unsqueeze(1)
            long, after = faded.norm(dim=1), state.norm(dim=1)
            error = (
                g * error + fading[t, :, None] * long + s * (16 * UNIT * long + UNIT * wanted.abs())
            )
            error += (writing[t, :, None] + 12 * UNIT) * s * wanted.abs() + UNIT * after
            out[t] = torch.einsum("hk,hkv->hv", q[t], state)
            bound[t] = q[t].norm(dim=-1, keepdim=True) * (1.01 * error + 18 * UNIT * after)
        states, errors, start = [*states, state], [*errors, 1.01 * error], start + length
    return out, bound, states, errors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_rule_is_float64s_to_a_bound(dtype: torch.dtype) -> None:
    qkv, gates = drawn(dtype, sum(LENGTHS))
    layout = Layout.packed(LENGTHS, PAGE)
    store = allocated(layout.num_slots // PAGE, dtype)
    there = layout.to(DEVICE)
    found = delta.delta_rule(qkv.to(DEVICE), gates.to(DEVICE), heads(), store, there).cpu()
    exact, bound, states, errors = recurrence(qkv, gates, LENGTHS)
    bound = bound + LAST[dtype] * (exact.abs() + bound) + 2.0**-126
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= bound).all())
    assert not bool(((found.double() - 1.01 * exact).abs() <= bound).all()), (
        "the control: one percent off"
    )
    for s, (state, error) in enumerate(zip(states, errors)):
        page = layout.page_table[s, (LENGTHS[s] - 1) // PAGE]
        kept = store.states[page].double().cpu()
        assert bool(((kept - state).norm(dim=1) <= error).all())
        assert not bool(((kept.bfloat16().double() - state).norm(dim=1) <= error).all()), (
            "the control: rounded"
        )


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_pages_keep_the_inputs_that_the_references_do(page_size: int) -> None:
    """Also where pages are shorter than the convolution, and a sequence touches more of them than
    are written at once; with the bits of whole sequences. The control: the store of one row
    more."""
    length, random = 29, torch.Generator().manual_seed(page_size)
    x, _ = drawn(torch.bfloat16, length)
    table = torch.randperm(length, generator=random)[: -(-length // page_size)].unsqueeze(0)
    whole = convolution.short_convolution(
        x.to(DEVICE), weight().to(DEVICE), None, Layout.packed([length]).to(DEVICE)
    ).cpu()
    ours = allocated(length, torch.bfloat16)
    theirs = allocated(length, torch.bfloat16, "cpu")
    done = 0
    for count in (1, 1, 2, 17, 1, 3, 4):
        layout, rows = Layout.build([count], [done], table, page_size), x[done : done + count]
        found = convolution.short_convolution(
            rows.to(DEVICE), weight().to(DEVICE), ours, layout.to(DEVICE)
        ).cpu()
        assert same(found, whole[done : done + count])
        if done == 21:
            assert not same(ours.inputs.cpu(), theirs.inputs)
        reference.short_convolution(rows, weight(), theirs, layout)
        assert same(ours.inputs.cpu(), theirs.inputs)
        done += count
    assert done == length


class Sequences:
    """Sequences that are computed in parts, each with its pages in a store that is not in their
    order."""

    def __init__(self, dtype: torch.dtype) -> None:
        x, gates = drawn(dtype, sum(LENGTHS))
        self.x, self.gates = x.split(LENGTHS), gates.split(LENGTHS)
        self.table = torch.tensor([[5, 2, 7], [4, 0, 0], [1, 6, 0]], dtype=torch.int32)
        self.store, self.done = allocated(8, dtype), [0] * len(LENGTHS)
        self.found: list[list[Tensor]] = [[] for _ in LENGTHS]

    def run(self, order: Sequence[int], counts: Sequence[int]) -> None:
        """The next `counts` rows of the sequences `order`, in one batch."""
        layout = Layout.build(counts, [self.done[s] for s in order], self.table[list(order)], PAGE)
        rows = [slice(self.done[s], self.done[s] + count) for s, count in zip(order, counts)]
        x, gates = (
            torch.cat([of[s][row] for s, row in zip(order, rows)]).to(DEVICE)
            for of in (self.x, self.gates)
        )
        layout = layout.to(DEVICE)
        given = weight().to(DEVICE), self.store, layout
        mixed = convolution.short_convolution(x, *given)
        out = delta.delta_rule(mixed, gates, heads(), self.store, layout)
        both = torch.cat((mixed, out.flatten(1)), 1).cpu()
        for s, count, part in zip(order, counts, both.split(list(counts))):
            self.found[s].append(part)
            self.done[s] += count

    def results(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in self.found if parts]

    def kept(self) -> list[Tensor]:
        return [x[[5, 2, 7, 4, 1, 6]].cpu() for x in (self.store.inputs, self.store.states)]


def all_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_where(DTYPES, lambda dtype: dtype == torch.float32))
def test_bits_do_not_depend_on_how_tokens_are_divided(dtype: torch.dtype) -> None:
    """A learner's whole sequences, a prompt at once, chunks that end anywhere in a page, decoded
    tokens, alone and in batches with sequences that have no rows: results and all that the pages
    keep. The controls: states and inputs that are not quite those that were kept."""
    whole, divided = Sequences(dtype), Sequences(dtype)
    whole.run((0, 1, 2), LENGTHS)
    layout = Layout.packed(LENGTHS, PAGE).to(DEVICE)
    x, gates = (torch.cat(parts).to(DEVICE) for parts in (whole.x, whole.gates))
    mixed = convolution.short_convolution(x, weight().to(DEVICE), None, layout)
    out = delta.delta_rule(mixed, gates, heads(), None, layout)
    learned = torch.cat((mixed, out.flatten(1)), 1).cpu().split(LENGTHS)
    assert all_same(whole.results(), learned)
    divided.run((2, 0), (2, 3))
    divided.run((0, 2), (2, 1))
    divided.run((1,), (1,))
    for _ in range(3):  # decoding, beside a sequence that is done
        divided.run((0, 1, 2), (1, 0, 1))
    divided.run((0,), (3,))
    assert divided.done == list(LENGTHS)
    assert all_same(divided.results(), learned)
    assert all_same(divided.kept(), whole.kept())
    for spoil in (
        lambda store: store.states.copy_(store.states.bfloat16()),
        lambda store: store.inputs[5].copy_(store.inputs[5].flip(0)),
    ):
        control = Sequences(dtype)
        control.run((0,), (4,))
        spoil(control.store)
        control.run((0,), (2,))
        assert same(control.results()[0][:4], learned[0][:4])
        assert not same(control.results()[0][4:], learned[0][4:6])


def near(found: Tensor, wanted: Tensor) -> bool:
    """Of results whose terms have the size of the largest: float32 sums in other orders, within 2⁸
    units of it; then both sides are rounded to their type."""
    bound = 2.0**-16 * wanted.abs().max().float() + 2.0 * LAST[wanted.dtype] * wanted.abs().float()
    assert found.dtype == wanted.dtype
    return bool(((found.float() - wanted.float()).abs() <= bound).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_the_references(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several segments of a sequence, whose last is not whole. One program at a time gives the
    same bits as all of them, as each adds up its own. The control: gradients two percent off."""
    monkeypatch.setattr(delta_backward, "_SEGMENT", 4)
    rows, layout = sum(LENGTHS), Layout.packed(LENGTHS, PAGE)
    x, gates = drawn(dtype, rows)
    dy, dout = draw(5, rows, CHANNELS, dtype=dtype), draw(6, rows, *SIZES[1::2], dtype=dtype)
    dy_there, x_there, weight_there = (each.to(DEVICE) for each in (dy, x, weight()))
    layout_there = layout.to(DEVICE)
    found = [*convolution.short_convolution_backward(dy_there, x_there, weight_there, layout_there)]
    wanted = [*reference.short_convolution_backward(dy, x, weight(), layout)]
    given = dout.to(DEVICE), x.to(DEVICE), gates.to(DEVICE), heads(), layout_there
    found += delta_backward.delta_rule_backward(*given)
    wanted += reference.delta_rule_backward(dout, x, gates, heads("cpu"), layout)
    for ours, theirs in zip(found, wanted, strict=True):
        assert near(ours.cpu(), theirs)
        assert not near(1.02 * ours.cpu(), theirs)
    monkeypatch.setattr(delta_backward, "_SCRATCH", 1)
    assert all_same(delta_backward.delta_rule_backward(*given), found[2:])

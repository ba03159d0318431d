"""Unnormalized probabilities in E4M3 on a CPU: against plain float64, C++ against the definition
bit for bit, and rows in chunks and in decoding, also where the last place of a score decides a
code."""

import math
from decimal import Decimal, getcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, Ops, get_ops
from isobit.kernels.attention import definition as implementation
from isobit.kernels.attention import float32 as attention32
from isobit.kernels.attention import probabilities
from isobit.kernels.attention.probabilities import boundaries, to_e4m3
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.native import recipe
from isobit.kernels.reference.sums import tree_sum
from isobit.precision import BF16, E4M3, FP32

from .helpers import draw, same, threads
from .libraries import ROWS, library_of
from .test_windows import ENGINES, LEARNERS, LENGTHS, SCALE, STORES, operators, problem

VALUES = [
    float(x) / 256 for x in torch.arange(121, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
]
"""What a weight may become: the numbers of E4M3 up to 2^8, over 2^8."""
Problem = tuple[Tensor, KVStore, Layout]


def plain(
    given: tuple[Tensor, Tensor, KVStore, Layout], window: int, rounded: bool
) -> tuple[Tensor, ...]:
    """(out, dq, dk) in float64 from every pair of rows that see each other; straight through the
    rounding."""
    q, dout, store, layout = given
    group = q.shape[1] // store.k.shape[1]
    query, key, value = (x.double().requires_grad_() for x in (q, *store.gather(layout.slots)))
    sequence = torch.repeat_interleave(torch.arange(len(layout.context)), layout.row_start.diff())
    ahead = layout.positions.unsqueeze(1) - layout.positions
    seen = (sequence.unsqueeze(1) == sequence) & (ahead >= 0) & (ahead < window)
    scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(group, 1)) * SCALE
    weights = scores.masked_fill(~seen, -torch.inf)
    weights = (weights - weights.detach().amax(-1, keepdim=True)).exp()
    mixing = weights
    if rounded:
        values = torch.tensor(VALUES, dtype=torch.float64)
        middles = (values[1:] + values[:-1]) / 2
        mixing = weights + (values[torch.bucketize(weights.detach(), middles)] - weights.detach())
    out = torch.einsum("hts,shd->thd", mixing, value.repeat_interleave(group, 1)) / weights.sum(
        -1
    ).t().unsqueeze(-1)
    return out.detach(), *torch.autograd.grad(out, (query, key), dout.double())


def hard(cache: str = "fp32", dim: int = 48, heads: int = 4, length: int = 48) -> Problem:
    """Every score but the first is within some units in the last place of a boundary between two
    codes, and is a sum of large numbers that cancel; values are unit vectors, so that a result
    shows one weight."""
    random = torch.Generator().manual_seed(3)
    count = (dim - 3) // 2
    ends = boundaries()[torch.randint(0, 120, (length, heads), generator=random)]
    parts, rest = [], ends.clone()
    for _ in range(3):
        parts.append(rest.float())
        rest -= parts[-1].double()
    factors = draw(random, heads, count, dtype=torch.float32).repeat_interleave(2, -1)
    noise = draw(random, length, heads, count, dtype=torch.float32, spread=1.0) * 64
    pairs = torch.stack((noise, -noise), -1).flatten(-2)
    q, k = torch.zeros(length, heads, dim), torch.zeros(length, heads, dim)
    q[..., :3], k[..., :3] = 1.0, torch.stack(parts, -1)
    order = torch.randperm(2 * count, generator=random) + 3
    q[..., order], k[..., order] = factors.expand(length, -1, -1), pairs
    k[0] = 0.0
    v = torch.eye(dim)[torch.arange(length) % dim].unsqueeze(1).expand(-1, heads, -1).contiguous()
    layout = Layout.packed([length])
    store = KVStore.allocate(layout.num_slots, heads, dim, None, FP32)
    get_ops("reference").kv_write(store, k, v, layout)
    return q, store, layout


def near(a: Tensor, b: Tensor) -> bool:
    """Equal to some units in the last place: another code is a sixteenth away at least."""
    return bool(((a.double() - b.double()).abs() <= 2.0**-22 * b.double().abs()).all())


def test_codes_begin_where_the_exact_exp_rounds_to_them() -> None:
    """The control: at the float64 number before, the exact exp rounds to the code before."""
    getcontext().prec = 60
    found = boundaries().tolist()
    assert len(found) == 120
    for end, below, above in zip(found, VALUES, VALUES[1:]):
        middle = (Decimal(below) + Decimal(above)) / 2
        assert Decimal(end).exp() > middle > Decimal(math.nextafter(end, -math.inf)).exp()


def test_float32_weights_become_the_nearest_e4m3() -> None:
    """Ties go to the even code; what is below half of the smallest becomes zero."""
    values = torch.tensor(VALUES, dtype=torch.float64)
    middles = ((values[1:] + values[:-1]) / 2).float()
    even = torch.arange(120) % 2 == 0
    assert same(to_e4m3(middles), torch.where(even, values[:-1], values[1:]).float())
    for towards, wanted in ((0.0, values[:-1]), (1.0, values[1:])):
        assert same(to_e4m3(torch.nextafter(middles, torch.tensor(towards))), wanted.float())
    assert same(to_e4m3(values.float()), values.float())


@pytest.mark.parametrize(("backend", "level"), ENGINES)
@pytest.mark.parametrize("cache", STORES)
def test_weights_are_rounded_after_their_sum(backend: str, level: str, cache: str) -> None:
    """Values, to the rounding of the result. The control are weights that are not rounded."""
    given = problem(cache, (4, 2, 16), LENGTHS)
    q, _, store, layout = given
    for window in (7, 200):
        right, wrong = (plain(given, window, rounded)[0] for rounded in (True, False))
        found, _ = operators(backend, level).attention(q, store, layout, SCALE, window, None, E4M3)
        bound = (2.0**-18 if cache == "fp32" else 2.0**-8) * float(right.abs().max())
        assert float((found.double() - right).abs().max()) <= bound
        assert float((wrong - right).abs().max()) > 1.5 * bound


@pytest.mark.parametrize(("backend", "level"), LEARNERS)
def test_the_gradient_goes_straight_through(backend: str, level: str) -> None:
    """That of queries and keys, where the result that was rounded is part of it. The control:
    without rounding."""
    given, ops = problem("fp32", (4, 2, 16), LENGTHS), operators(backend, level)
    q, dout, store, layout = given
    found = []
    for kind in (E4M3, None):
        out, lse = ops.attention(q, store, layout, SCALE, None, None, kind)
        found.append(ops.attention_backward(dout, q, out, lse, store, layout, SCALE)[:2])
    for mine, other, wanted in zip(*found, plain(given, 200, True)[1:], strict=True):
        bound = 2.0**-18 * float(wanted.abs().max())
        if wanted.shape == q.shape:
            assert float((mine.double() - wanted).abs().max()) <= bound
        assert float((other.double() - mine.double()).abs().max()) > 100 * bound


@pytest.mark.slow
@pytest.mark.parametrize("cache", STORES)
def test_native_is_the_definition_bit_for_bit(cache: str) -> None:
    """With sinks, under a window, and where one row is read as it is stored. The control: weights
    as they are."""
    native, reference = operators("native", "bitwise"), operators("reference", "bitwise")
    for heads, window in (((8, 1, 16), None), ((8, 4, 20), 33), ((8, 8, 16), 1)):
        q, _, store, layout = problem(cache, heads, LENGTHS)
        sinks = torch.tensor([-1e30, -80.0, -1.5, 0.0, 0.75, 3.0, 40.0, 300.0])
        for some in (sinks,) if window else (None, sinks):
            found, wanted = (
                ops.attention(q, store, layout, SCALE, window, some, E4M3)
                for ops in (native, reference)
            )
            assert all(map(same, found, wanted)), (heads, window)
            other = native.attention(q, store, layout, SCALE, window, some)
            assert same(found[1], other[1])
            assert window == 1 or not same(found[0], other[0])
        last = Layout.build([1], [LENGTHS[-1] - 1], layout.page_table[-1:], layout.page_size)
        alone = native.attention(q[-1:], store, last, SCALE, window, None, E4M3)
        assert same(alone[0], native.attention(q, store, layout, SCALE, window, None, E4M3)[0][-1:])


@pytest.mark.parametrize("heads", [1, 4])
def test_the_last_place_of_a_score_decides_in_one_order(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact level: C++ and the reference have the codes of scores in lanes, by the exact exp. The
    controls: in the order of a tree, or of the BLAS, some codes are others."""
    q, store, layout = hard(heads=heads)
    found, wanted = (
        operators(backend, "exact").attention(q, store, layout, 1.0, None, None, E4M3)[0]
        for backend in ("native", "reference")
    )
    assert near(found, wanted)
    assert near(wanted[-1], _by_hand(q[-1], store, layout))
    ops = operators("reference", "exact")
    monkeypatch.setattr(implementation, "lane_sum", partial(tree_sum, dim=1))
    assert not near(ops.attention(q, store, layout, 1.0, None, None, E4M3)[0], wanted)
    monkeypatch.setattr(
        implementation, "uncertain", lambda shifted, _: torch.zeros_like(shifted[..., 0]).bool()
    )
    assert not near(ops.attention(q, store, layout, 1.0, None, None, E4M3)[0], wanted)


def _by_hand(q: Tensor, store: KVStore, layout: Layout) -> Tensor:
    """The last row's weights over their sum, of one key after the other: scores in eight lanes of
    Python's numbers."""
    getcontext().prec = 40
    keys, _ = store.gather(layout.slots)
    rows = []
    for head in range(q.shape[0]):
        scores = []
        for key in keys[:, head].tolist():
            lane = [0.0] * 8
            for d, (a, b) in enumerate(zip(q[head].tolist(), key)):
                lane[d % 8] += a * b
            lane = [x + y for x, y in zip(lane[:4], lane[4:])]
            scores.append((lane[0] + lane[2]) + (lane[1] + lane[3]))
        exact = [Decimal(score - max(scores)).exp() for score in scores]
        nearest = [min(VALUES, key=lambda value: abs(Decimal(value) - weight)) for weight in exact]
        rows.append([value / float(sum(exact)) for value in nearest])
    return torch.tensor(rows, dtype=torch.float64).float()


@pytest.mark.parametrize(("backend", "level"), LEARNERS)
@pytest.mark.parametrize("case", ["hard", "e4m3"])
def test_decoding_chunks_and_packed_rows_agree(backend: str, level: str, case: str) -> None:
    """Also where the last place of a score decides a code. The control: weights that are not
    rounded."""
    ops, length = operators(backend, level), 200 if case == "e4m3" else 48
    if case == "hard":
        (q, store, layout), scale = hard(), 1.0
    else:
        (q, _, store, layout), scale = problem("e4m3", (4, 1, 20), [length]), SCALE
    out, lse = ops.attention(q, store, layout, scale, None, None, E4M3)
    table = torch.randperm(70, generator=torch.Generator().manual_seed(2)).view(1, -1).int()
    paged = KVStore.allocate(
        210, store.k.shape[1], q.shape[2], store.kv, BF16 if store.kv else FP32
    )
    everything = Layout.build([length], [0], table, 3)
    for name in ("k", "v", "k_scale", "v_scale"):
        if getattr(store, name) is not None:
            getattr(paged, name)[everything.slots] = getattr(store, name)[layout.slots]
    for first, count in ((length - 1, 1), (30, 1), (11, 37), (17, 2), (0, length)):
        rows, part = slice(first, first + count), Layout.build([count], [first], table, 3)
        with threads(1 + first % 2):
            found = ops.attention(q[rows], paged, part, scale, None, None, E4M3)
        assert same(found[0], out[rows]), (first, count)
        assert same(found[1], lse[rows]), (first, count)
    assert not same(ops.attention(q, store, layout, scale)[0], out)


def test_another_rounding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of bits: a definition without the factor 2^8 loses small weights."""
    native, reference = operators("native", "bitwise"), operators("reference", "bitwise")
    q, _, store, layout = problem("bf16", (2, 2, 16), [100])
    given = q, store, layout, SCALE, None, None, E4M3
    assert same(native.attention(*given)[0], reference.attention(*given)[0])
    monkeypatch.setattr(attention32, "to_e4m3", lambda w: w.to(torch.float8_e4m3fn).float())
    assert not same(native.attention(*given)[0], reference.attention(*given)[0])


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64", "-DISOBIT_PORTABLE"])
def test_other_builds_have_the_same_bits(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise in every bit; exact in every code. The control: a boundary that lies elsewhere."""
    if not recipe.on_x86():
        pytest.skip("flags of x86-64")
    here: dict[str, Ops] = {level: operators("native", level) for level in ("bitwise", "exact")}
    other = {level: get_ops("native", level) for level in here}
    library = library_of(ROWS, tmp_path, f"-O1 {flags}", monkeypatch)
    for ops in other.values():
        assert isinstance(ops, NativeOps)
        ops.lib = library
    for cache in STORES:
        q, _, store, layout = problem(cache, (4, 2, 20), LENGTHS)
        found, wanted = (
            at["bitwise"].attention(q, store, layout, SCALE, 33, None, E4M3) for at in (other, here)
        )
        assert all(map(same, found, wanted))
    q, store, layout = hard()
    given = q, store, layout, 1.0, None, None, E4M3
    wanted = here["exact"].attention(*given)[0]
    assert near(other["exact"].attention(*given)[0], wanted)
    moved = boundaries() + 2.0**-45
    monkeypatch.setattr(probabilities, "boundaries", lambda: moved)
    monkeypatch.setattr("isobit.kernels.attention.native.boundaries", lambda: moved)
    assert not near(other["exact"].attention(*given)[0], wanted)

"""The order `rows32-v1`: norms, gates and attention in float32. Its definition against rational
arithmetic, C++ against the definition, rows alone and in any batch, and the error against float64,
element by element; with negative controls."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError
from isobit.kernels import KVStore, Layout, Ops, get_ops
from isobit.kernels.attention import float32 as attention32
from isobit.kernels.backends.composed import Composed
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.native import available, build, recipe
from isobit.kernels.norms import float32 as rows32
from isobit.kernels.norms import native as rows
from isobit.precision import BF16, E4M3, FP32, INT8, QuantSpec

from .helpers import ACTIVATIONS, bits, draw, rounded, same, threads
from .libraries import ROWS, changed_copy, library_of

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

DTYPES = (torch.bfloat16, torch.float32)
CACHES = {
    "bf16": (BF16, None),
    "fp32": (FP32, None),
    "e4m3 ue8m0": (BF16, QuantSpec(E4M3, "row", "ue8m0")),
    "e4m3 fp32": (BF16, QuantSpec(E4M3, "row", "fp32")),
    "e4m3 calibrated": (FP32, QuantSpec(E4M3, "tensor", "fp32")),
    "int8": (BF16, QuantSpec(INT8, "row", "fp32")),
}
HEADS = ((8, 8, 64), (4, 2, 40), (6, 1, 16), (2, 2, 128), (3, 3, 7), (2, 2, 80))
U = 2.0**-24


@pytest.fixture(scope="module")
def exact() -> Ops:
    return get_ops("native", "exact")


# ---- data that is hard to add ----


def plain(random: torch.Generator, *shape: int) -> Tensor:
    return draw(random, *shape, dtype=torch.float32)


def wide(random: torch.Generator, *shape: int) -> Tensor:
    """Exponents of 2^-20 to 2^4: in most sums one term hides the others, and scores are large."""
    return torch.ldexp(plain(random, *shape), torch.randint(-20, 5, shape, generator=random))


def cancelling(random: torch.Generator, *shape: int) -> Tensor:
    """Few magnitudes of either sign, 2^8 apart: ties, and sums that vanish."""
    pick = torch.randint(0, 4, shape, generator=random) * 2.0**-7 + 1
    sign = torch.randint(0, 2, shape, generator=random) * 2 - 1
    return torch.ldexp(pick * sign, -8 * torch.randint(0, 3, shape, generator=random)).float()


def tiny(random: torch.Generator, *shape: int) -> Tensor:
    """Products and sums are subnormal numbers."""
    return torch.ldexp(plain(random, *shape), torch.randint(-70, -60, shape, generator=random))


DATA: list[Callable[..., Tensor]] = [plain, wide, cancelling, tiny]


class Problem(NamedTuple):
    """Rows of attention over stored keys and values."""

    q: Tensor
    dout: Tensor
    store: KVStore
    layout: Layout
    scale: float


def problem(
    data: Callable[..., Tensor],
    cache: str,
    heads: tuple[int, int, int],
    lengths: list[int],
    seed: int = 1,
    size: float = 1.0,
) -> Problem:
    random, (compute, kv) = torch.Generator().manual_seed(seed), CACHES[cache]
    count, (num_heads, kv_heads, dim) = sum(lengths), heads
    layout = Layout.packed(lengths)
    store = KVStore.allocate(layout.num_slots, kv_heads, dim, kv, compute)
    if store.calibrated:
        store.set_scales(torch.tensor([0.013, 0.02]))
    q, dout = ((size * data(random, count, num_heads, dim)).to(compute.dtype) for _ in range(2))
    k, v = (data(random, count, kv_heads, dim).to(compute.dtype) for _ in range(2))
    get_ops("native").kv_write(store, k, v, layout)
    return Problem(q, dout, store, layout, dim**-0.5)


# ---- the definition ----


@pytest.mark.parametrize("low", [-140, -60, -4])
def test_fused_multiply_adds_are_rounded_once(low: int) -> None:
    """Against rational arithmetic, subnormal results too. The control: without the correction a sum
    is wrong that float64 has rounded to what is halfway in float32."""
    random = torch.Generator().manual_seed(2)
    a, b = (
        torch.ldexp(plain(random, 3000), torch.randint(low // 2, 3, (3000,), generator=random))
        for _ in range(2)
    )
    c = torch.ldexp(plain(random, 3000), torch.randint(low, 3, (3000,), generator=random))
    a[:99], b[:99] = 2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23)  # 2^-24 - 2^-70
    c[:99] = 1 + 2.0**-23 * torch.arange(99)
    wanted = [
        rounded(Fraction(x) * Fraction(y) + Fraction(z), torch.float32)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())
    ]
    assert rows32.fma(a, b, c).tolist() == wanted
    twice = (a.double() * b.double() + c.double()).float()
    assert int((twice[:99] != torch.tensor(wanted[:99])).sum()) > 40


@pytest.mark.slow
def test_the_error_of_exp_is_bounded() -> None:
    """2^-22 where it is not 0, and exactly 1 at 0. The control: it is no correctly rounded exp."""
    random = torch.Generator().manual_seed(3)
    x = torch.cat(
        (torch.linspace(-87, 88, 2_000_001), torch.randn(1_000_000, generator=random) * 2.0**-8)
    )
    found, wanted = rows32.exp(x).double(), x.double().exp()
    error = ((found - wanted) / wanted).abs().max()
    assert 2.0**-24 < error < 2.0**-22
    ends = rows32.exp(torch.tensor([0.0, -0.0, -87.5, -torch.inf, 89.0, torch.inf, torch.nan]))
    assert ends[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert ends[4] == ends[5] == rows32.exp(torch.tensor([88.0]))
    assert ends[6].isnan()


def test_the_error_of_log_is_bounded() -> None:
    random = torch.Generator().manual_seed(4)
    x = torch.cat(
        (
            1 + torch.rand(200_000, generator=random).double(),
            4096 * torch.rand(1000, generator=random).double(),
        )
    )
    assert bool(((rows32.log(x) - x.log()).abs() <= 2.0**-51 * x.log().abs() + 2.0**-54).all())
    assert rows32.log(torch.tensor([1.0, torch.inf]).double()).tolist() == [0.0, torch.inf]
    assert rows32.log(torch.tensor([torch.nan]).double()).isnan().all()


# ---- C++ is the definition ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
def test_norms_and_gates_are_the_definition_bit_for_bit(
    native: Ops, reference: Ops, data: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(5)
    for count, columns in ((1, 1), (3, 64), (33, 512), (7, 100), (70, 130)):
        x, residual, dy = (data(random, count, columns).to(dtype) for _ in range(3))
        weight = plain(random, columns).to(dtype)
        gate_up = (data(random, count, 2 * columns) * 8).to(dtype)
        gate_up[0, 0] = 200.0 if columns > 64 else -200.0
        for added in (None, residual):
            for ours, theirs in zip(
                native.rms_norm(x, weight, 1e-6, added), reference.rms_norm(x, weight, 1e-6, added)
            ):
                assert same(ours, theirs)
        _, summed, rstd = native.rms_norm(x, weight, 1e-6, residual)
        for ours, theirs in zip(
            native.rms_norm_backward(dy, summed, weight, rstd),
            reference.rms_norm_backward(dy, summed, weight, rstd),
        ):
            assert same(ours, theirs)
        results = {}
        for activation in ACTIVATIONS:
            results[activation] = (
                native.gate_mul(activation, gate_up),
                native.gate_mul_backward(activation, dy, gate_up),
            )
            assert same(results[activation][0], reference.gate_mul(activation, gate_up))
            assert same(
                results[activation][1], reference.gate_mul_backward(activation, dy, gate_up)
            )
        pairs = [(a, b) for two in combinations(results.values(), 2) for a, b in zip(*two)]
        assert data is not plain or columns == 1 or not any(same(a, b) for a, b in pairs)


# INT8 differs by how codes are read, not by how they are added
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "data", "shapes"),
    [
        *(
            (cache, data, HEADS[1:] if data is plain and cache in ("fp32", "int8") else HEADS[1:3])
            for cache in CACHES
            for data in DATA
            if cache != "int8" or data is plain
        ),
        *(
            pytest.param(cache, plain, HEADS[3:], marks=pytest.mark.slow)
            for cache in CACHES
            if cache not in ("fp32", "int8")
        ),
    ],
)
def test_attention_is_the_definition_bit_for_bit(
    native: Ops,
    reference: Ops,
    cache: str,
    data: Callable[..., Tensor],
    shapes: tuple[tuple[int, int, int], ...],
) -> None:
    """What of a store is read does not depend on the heads: `make test` has every shape over two
    of them."""
    for heads in shapes:
        p = problem(data, cache, heads, [5, 1, 36])
        forward = reference.attention(p.q, p.store, p.layout, p.scale)
        for ours, theirs in zip(
            native.attention(p.q, p.store, p.layout, p.scale), forward, strict=True
        ):
            assert same(ours, theirs), heads
        arguments = (p.dout, p.q, *forward, p.store, p.layout, p.scale)
        for ours, theirs in zip(
            native.attention_backward(*arguments), reference.attention_backward(*arguments)
        ):
            assert same(ours, theirs), heads


@pytest.mark.slow
def test_the_definition_of_the_backward_takes_a_few_rows_at_a_time(
    reference: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it never holds the scores of a whole sequence. In chains of 32 rows the bits are those of
    all at once; the control's chains are of 16."""
    p = problem(plain, "fp32", (4, 2, 40), [5, 1, 100])
    arguments = (
        p.dout,
        p.q,
        *reference.attention(p.q, p.store, p.layout, p.scale),
        p.store,
        p.layout,
        p.scale,
    )
    whole = reference.attention_backward(*arguments)
    rows, chain = list[int](), attention32._chain
    monkeypatch.setattr(attention32, "_chain", lambda a, b: rows.append(len(a)) or chain(a, b))
    monkeypatch.setattr(attention32, "_ELEMENTS", 1)
    assert all(map(same, reference.attention_backward(*arguments), whole))
    assert max(rows) == attention32.CHAIN
    monkeypatch.setattr(attention32, "CHAIN", 16)
    dq, dk, dv = map(same, reference.attention_backward(*arguments), whole)
    assert (dq, dk, dv) == (True, False, False)


@pytest.mark.parametrize("cache", CACHES)
def test_decoding_over_a_long_context_is_the_definition(
    native: Ops, reference: Ops, cache: str
) -> None:
    """A row of up to 1,000 keys in each of some sequences, by the loop that reads stored keys, a
    key head of a sequence at a time, or several: as many chains side by side as a width has, and
    what is left of them."""
    for lengths, heads in (([1000], (2, 2, 64)), ([1000], (2, 1, 80)),
        ([31, 300, 128, 1, 190], (3, 3, 112)),
                           ([160, 290, 33, 129], (10, 5, 32)),
                           ([200, 1, 70, 150], (14, 2, 48))):  # fmt: skip
        p = problem(plain, cache, heads, lengths)
        count, last = len(lengths), p.layout.row_start[1:] - 1
        layout = Layout.build(
            [1] * count, [n - 1 for n in lengths], p.layout.page_table, p.layout.page_size
        )
        rows = p.q[last].contiguous()
        expected = reference.attention(rows, p.store, layout, p.scale)
        for number in (1, 2):
            with threads(number):
                assert all(map(same, native.attention(rows, p.store, layout, p.scale), expected))
        p.store.v[p.layout.slots[last[0]]] = p.store.v[p.layout.slots[last[0] - 1]]  # the control
        assert not same(native.attention(rows, p.store, layout, p.scale)[0], expected[0])


def test_negative_controls_other_orders(native: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many lanes, longer chains, keys from the last to the first, sums of channels in 16
    lanes, scales within the sums: each changes bits of many elements."""
    p = problem(plain, "e4m3 fp32", (2, 2, 80), [70])
    found = native.attention(p.q, p.store, p.layout, p.scale)[0]

    def differing() -> int:
        return int(
            (bits(found) != bits(attention32.attention(p.q, p.store, p.layout, p.scale)[0])).sum()
        )

    p = p._replace(q=p.q.float())
    found = native.attention(p.q, p.store, p.layout, p.scale)[0]
    assert differing() == 0
    blocked_sum, read = attention32.blocked_sum, attention32._read

    def within(data: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        values, factor = read(data, *rest)
        return values * factor.unsqueeze(-1), torch.ones_like(factor)

    for name, other in (
        ("HEAD_LANES", 8),
        ("blocked_sum", lambda a, b: blocked_sum(a.flip(0), b.flip(0))),
        ("_read", within),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(attention32, name, other)
            assert differing() > found.numel() // 20, name
    with monkeypatch.context() as patch:
        patch.setattr(rows32, "CHAIN", 64)
        assert differing() > found.numel() // 20
    x, weight = draw(6, 40, 512, dtype=torch.float32), torch.ones(512)
    with monkeypatch.context() as patch:
        patch.setattr(rows32, "CHANNEL_LANES", 16)
        assert not same(
            native.rms_norm(x, weight, 1e-6)[2], rows32.rms_norm(x, weight, 1e-6, None)[2]
        )


# ---- a row is the same in every batch ----


@pytest.mark.parametrize("seed", range(30))
def test_a_row_alone_in_any_chunk_and_batch_is_the_same(native: Ops, seed: int) -> None:
    """Random heads, cache, page size, lengths and chunks on one thread or two: the bits of packed
    rows, whose backward does not depend on the other sequences either. The control: with another
    key somewhere, later rows differ."""
    random = torch.Generator().manual_seed(50 + seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=random))

    kv_heads, group, dim = number(1, 3), number(1, 4), (16, 64, 80, 20, 48)[seed % 5]
    cache = list(CACHES)[seed % len(CACHES)]
    lengths = [number(1, 150) for _ in range(number(1, 4))]
    p = problem(DATA[seed % 3], cache, (kv_heads * group, kv_heads, dim), lengths, seed)
    with threads(1):
        out, lse = native.attention(p.q, p.store, p.layout, p.scale)
        gradients = native.attention_backward(p.dout, p.q, out, lse, p.store, p.layout, p.scale)
    start = 0
    for sequence, length in enumerate(lengths):
        done, table = 0, p.layout.page_table[sequence : sequence + 1]
        while done < length:
            count = min(1 if seed % 3 == 0 else number(1, 40), length - done)
            rows_here = slice(start + done, start + done + count)
            layout = Layout.build([count], [done], table, p.layout.page_size)
            with threads(1 + done % 2):
                part = native.attention(p.q[rows_here], p.store, layout, p.scale)
            assert same(part[0], out[rows_here])
            assert same(part[1], lse[rows_here])
            done += count
        whole = slice(start, start + length)
        layout = Layout.build([length], [0], table, p.layout.page_size)
        with threads(2):
            alone = native.attention_backward(
                p.dout[whole], p.q[whole], out[whole], lse[whole], p.store, layout, p.scale
            )
        assert all(same(ours, theirs[whole]) for ours, theirs in zip(alone, gradients, strict=True))
        start += length
    slot = int(p.layout.slots[lengths[0] // 2])
    p.store.k[slot] = p.store.k[slot].flip(-1)
    changed = native.attention(p.q, p.store, p.layout, p.scale)[0]
    assert same(changed[: lengths[0] // 2], out[: lengths[0] // 2])
    assert lengths[0] < 3 or not same(changed[: lengths[0]], out[: lengths[0]])


def test_the_order_of_keys_is_noticed(native: Ops) -> None:
    """The negative control: the same keys at other positions are the same softmax, in other
    bits."""
    p = problem(plain, "fp32", (2, 2, 64), [100])
    found = native.attention(p.q, p.store, p.layout, p.scale)[0][-1]
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(7))
    for data in (p.store.k, p.store.v):
        data[:100] = data[:100][shuffled]
    moved = native.attention(p.q, p.store, p.layout, p.scale)[0][-1]
    assert not same(moved, found)
    torch.testing.assert_close(moved, found)


# ---- errors ----


def gamma(count: float) -> float:
    return count * U / (1 - count * U)


def halved(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place at most, and of the smallest number."""
    part, smallest = (2.0**-8, 2.0**-134) if dtype == torch.bfloat16 else (U, 2.0**-149)
    return x.abs() * part + smallest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA[:3])
def test_the_error_of_norms_and_gates_is_bounded(
    native: Ops, data: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """Against float64, element by element. The control: a norm in BF16 is not within the bound."""
    random = torch.Generator().manual_seed(8)
    for columns in (64, 100, 2048):
        x, dy = ((data(random, 40, columns) * 4).to(dtype) for _ in range(2))
        weight, up = plain(random, columns).to(dtype), plain(random, 40, columns).to(dtype)
        s, w, d = x.double(), weight.double(), dy.double()
        exact_rstd = 1 / ((s * s).mean(-1, keepdim=True) + 1e-6).sqrt()
        y, _, rstd = native.rms_norm(x, weight, 1e-6)
        bound = gamma(-(-columns // 64) + 15) / 2 + 2.0**-22
        error = (rstd.double().unsqueeze(-1) / exact_rstd - 1).abs()
        assert bool((error <= bound).all())
        wanted = s * exact_rstd * w
        limit = wanted.abs() * (bound + 2.0**-23)
        allowed = limit + halved(wanted.abs() + limit, dtype)
        assert bool(((y.double() - wanted).abs() <= allowed).all())
        coarse = x * exact_rstd.bfloat16() * weight
        assert not bool(((coarse.double() - wanted).abs() <= allowed).all())
        # dx = r (g - n · mean(g n)) with g = dy · w, n = s · r: two roundings in each of g, n and
        # their products
        r = rstd.double().unsqueeze(-1)
        g, n = d * w, s * r
        mean, reach = (g * n).mean(-1, keepdim=True), (g * n).abs().mean(-1, keepdim=True)
        wanted = r * (g - n * mean)
        limit = r * (
            g.abs() * 4 * U + n.abs() * (gamma(-(-columns // 64) + 15) * reach + 5 * U * mean.abs())
        )
        dx, dweight = native.rms_norm_backward(dy, x, weight, rstd)
        assert bool(
            (
                (dx.double() - wanted).abs() <= limit * 1.01 + halved(wanted.abs() + limit, dtype)
            ).all()
        )
        limit = gamma(32 + 2 + 1) * (d * n).abs().sum(0) + 2.0**-140
        assert bool(((dweight.double() - (d * n).sum(0)).abs() <= limit).all())
        gate, wide_up = (x * 16).double(), up.double()
        cubic = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        bounded, more = gate.clamp(max=7.0), wide_up.clamp(-7.0, 7.0) + 1.0
        for activation, g, k, u, slack in (
            ("silu", gate, gate, wide_up, 0.0),
            ("gelu_pytorch_tanh", gate, cubic, wide_up, 2.0**-22),
            ("swiglu_clamped", bounded, 1.702 * bounded, more, 2.0**-22),
            ("sigmoid", torch.ones_like(gate), gate, wide_up, 0.0),
        ):
            found = native.gate_mul(activation, torch.cat((x * 16, up), 1)).double()
            wanted = g * torch.sigmoid(k) * u
            limit = wanted.abs() * (2.0**-21 + k.abs() * slack) + (g * u).abs() * 2.0**-125
            if activation == "swiglu_clamped":  # up + 1 is rounded too
                limit += wanted.abs() * 2.0**-24
            assert bool(
                ((found - wanted).abs() <= limit + halved(wanted.abs() + limit, dtype)).all()
            )
            assert not bool(
                ((1.01 * found - wanted).abs() <= limit + halved(wanted.abs() + limit, dtype)).all()
            )


def attention_in_float64(p: Problem, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one sequence's rows from `first` on: (out [T, H, D], lse [T, H]), and bounds of the
    float32 errors of both before their rounding, as in the docstring of attention32.py."""
    keys, values = (x.double() for x in p.store.gather(p.layout.slots))
    count, num_heads, dim = p.q.shape
    group = num_heads // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    q = p.q[first:].double()
    hidden = ~torch.ones(len(q), count, dtype=torch.bool).tril(first)
    scores = torch.einsum("thd,khd->htk", q, keys) * p.scale
    reach = torch.einsum("thd,khd->htk", q.abs(), keys.abs()) * p.scale
    scores, reach = scores.masked_fill(hidden, -torch.inf), reach.masked_fill(hidden, 0.0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    distance = (scores.amax(-1, keepdim=True) - scores).masked_fill(hidden, 0.0)
    score_error = gamma(-(-dim // 16) + 8) * reach
    slack = score_error.amax(-1, keepdim=True)  # of the peak, which is a score
    eta = torch.expm1(score_error + (distance + 2 * slack) * U) * (1 + 2.0**-22) + 2.0**-22
    ends = torch.where(distance > 86, math.exp(-86), 0.0) * weights.amax(-1, keepdim=True)
    eta_weights = weights * eta + ends
    chains = gamma(36 + -(-count // 32))
    mixed = torch.einsum("htk,khd->thd", weights, values)
    mean = eta_weights.sum(-1) + gamma(-(-count // 16) + 5)
    bound = torch.einsum(
        "htk,khd->thd", eta_weights * (1 + chains) + weights * chains, values.abs()
    )
    bound = (bound + mixed.abs() * mean.t().unsqueeze(-1)) / (
        1 - mean.t().unsqueeze(-1)
    ) + 2.0**-140
    return mixed, lse.t(), bound, (1.01 * mean + U * lse.abs()).t()


CASES = {
    "plain": (plain, 1.0, 300),
    "large scores": (plain, 40.0, 200),
    "wide": (wide, 1.0, 200),
    "cancelling": (cancelling, 2.0, 200),
    "4,096 keys": (plain, 1.0, 4096),
}


@pytest.mark.parametrize(
    ("case", "cache"),
    [
        *((case, cache) for cache in ("bf16", "fp32", "e4m3 fp32") for case in CASES),
        ("plain", "int8"),
        ("wide", "int8"),
    ],
)
def test_the_error_of_attention_is_bounded(native: Ops, exact: Ops, case: str, cache: str) -> None:
    """Against float64, element by element; so is its distance to `exact`. The control: float32
    results that are rounded to BF16 are not within the bound."""
    data, size, count = CASES[case]
    heads = (1, 1, 64) if count > 1000 else (4, 2, 80)
    p = problem(data, cache, heads, [count], 9, size)
    first = count - 64 if count > 1000 else 0
    out, lse = (x[first:] for x in native.attention(p.q, p.store, p.layout, p.scale))
    wanted, wanted_lse, bound, lse_bound = attention_in_float64(p, first)
    error = (out.double() - wanted).abs()
    allowed = bound + halved(wanted.abs() + bound, out.dtype)
    assert bool((error <= allowed).all())
    assert bool(
        ((lse.double() - wanted_lse).abs() <= lse_bound + halved(wanted_lse, torch.float32)).all()
    )
    nearest = exact.attention(p.q, p.store, p.layout, p.scale)[0].double()[first:]
    assert bool(((out.double() - nearest).abs() <= allowed + halved(nearest, out.dtype)).all())
    coarse = (out.bfloat16().double() - wanted).abs()
    assert cache != "fp32" or bool((coarse > allowed).any())


@pytest.mark.parametrize("cache", ["bf16", "e4m3 fp32", "int8"])
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_gradients_of_attention_are_near_float64(
    native: Ops, exact: Ops, cache: str, size: float
) -> None:
    """As vectors; the same out and lse are read. The control: without the last key they are not."""
    p = problem(plain, cache, (4, 2, 64), [300], 10, size)
    out, lse = native.attention(p.q, p.store, p.layout, p.scale)
    arguments = (p.dout, p.q, out, lse, p.store, p.layout, p.scale)
    found, wanted = native.attention_backward(*arguments), exact.attention_backward(*arguments)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double() - theirs.double()).norm() <= 2.0**-10 * theirs.double().norm()
    p.store.k[int(p.layout.slots[0])] = 0
    other = native.attention_backward(*arguments)
    assert (other[0].double() - wanted[0].double()).norm() > 2.0**-10 * wanted[0].double().norm()


# ---- a result quantized in one call ----


@pytest.mark.parametrize("consistency", ["exact", "bitwise", "fast"])
@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
@pytest.mark.parametrize("granularity", ["row", "1x128", "128x128", "tensor"])
def test_quantized_norms_and_gates_are_the_two_operators_in_turn(
    granularity: str, scale: str, consistency: str
) -> None:
    ops, spec = get_ops("native", consistency), QuantSpec(E4M3, granularity, scale)
    random = torch.Generator().manual_seed(11)
    for dtype in DTYPES:
        for count, columns in ((1, 1), (1, 130), (3, 64), (33, 512), (7, 100), (129, 257)):
            x, residual = (wide(random, count, columns).to(dtype) for _ in range(2))
            x[0] = 0.0
            weight = plain(random, columns).to(dtype)
            gate_up = wide(random, count, 2 * columns).to(dtype)
            for added in (None, residual):
                ours = ops.rms_norm_quantized(x, weight, 1e-6, added, spec, "x")
                theirs = Composed.rms_norm_quantized(ops, x, weight, 1e-6, added, spec, "x")
                assert same(ours[0].data, theirs[0].data)
                assert same(ours[0].scale, theirs[0].scale)
                assert same(ours[1], theirs[1])
                assert same(ours[2], theirs[2])
            for activation in ACTIVATIONS:
                gated = ops.gate_mul_quantized(activation, gate_up, spec, "x")
                composed = Composed.gate_mul_quantized(ops, activation, gate_up, spec, "x")
                assert same(gated.data, composed.data)
                assert same(gated.scale, composed.scale)


def test_a_row_whose_squares_overflow_is_nan_and_no_other(native: Ops) -> None:
    """Zeros in its place would hide weights that blew up; the control: a row just below."""
    x = torch.ones(3, 128)
    x[1], x[2] = 1e20, 1e18
    for ops in (native, get_ops("reference")):
        y, _, rstd = ops.rms_norm(x, torch.ones(128), 1e-6)
        assert y.isnan().all(1).tolist() == [False, True, False]
        assert rstd.isnan().tolist() == [False, True, False]


def test_quantized_norms_and_gates_name_what_is_not_finite(native: Ops) -> None:
    """The control: without the infinity nothing is raised."""
    spec = QuantSpec(E4M3, "1x128")
    x, weight = torch.ones(5, 256).bfloat16(), torch.ones(256).bfloat16()
    for bad in (False, True):
        x[4, 200] = torch.inf if bad else 1.0
        for call in (
            lambda: native.rms_norm_quantized(x, weight, 1e-6, None, spec, "layers.3.qkv"),
            lambda: native.gate_mul_quantized("silu", x, spec, "layers.3.qkv"),
        ):
            if bad:
                with pytest.raises(NonFiniteError, match=r"layers\.3\.qkv"):
                    call()
            else:
                call()


# ---- the self-test, and other builds ----


def test_the_self_test_passes() -> None:
    assert build.library().isobit_rows32_self_test() == 0


def test_a_failed_self_test_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = SimpleNamespace(_name=str(tmp_path / "library.so"), isobit_rows32_self_test=lambda: 7)
    monkeypatch.setattr(rows, "library", lambda: wrong)
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path))
    rows.check_rows.cache_clear()
    try:
        with pytest.raises(
            IsobitError, match="7 results of norms, gates and attention differ from scalar ones"
        ):
            rows.check_rows()
        assert not list(tmp_path.rglob("*.passed"))  # nothing is marked as passed
    finally:
        rows.check_rows.cache_clear()


_FUSED = "INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {"
CHANGES = {
    "lanes of a head": (
        "native/vectors.h",
        "h[0] + h[4]) + (h[2] + h[6])) + ((h[1]",
        "h[0] + h[2]) + (h[4] + h[6])) + ((h[1]",
    ),
    "lanes of a state": (
        "delta/delta.h",
        "(lane[0][n] + lane[2][n]) + (lane[1][n] + lane[3][n])",
        "(lane[0][n] + lane[1][n]) + (lane[2][n] + lane[3][n])",
    ),
    "chains of keys": (
        "native/tile.h",
        "constexpr int64_t CHAIN = 32",
        "constexpr int64_t CHAIN = 16",
    ),
    "exp": ("native/native.h", "splat(-0.693359375f), x);", "splat(-0.69314718f), x);"),
    "two roundings": ("native/vectors.h", _FUSED, f"{_FUSED} return a * b + c;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_the_self_test_notices_another_order(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its negative controls: libraries that compute in another order, or with other roundings."""
    file, right, wrong = CHANGES[change]
    changed_copy(tmp_path, [file], right, wrong)
    assert library_of(ROWS, tmp_path, "-O0", monkeypatch, tmp_path).isobit_rows32_self_test() > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64", "-DISOBIT_PORTABLE"])
def test_other_builds_have_the_same_bits(
    native: Ops, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AVX2; no fused multiply-add at all; no intrinsics. The control is the change `two roundings`
    above."""
    if not recipe.on_x86():
        pytest.skip("flags of x86-64")
    other = get_ops("native")
    assert isinstance(other, NativeOps)
    other.lib = library_of(ROWS, tmp_path, f"-O1 {flags}", monkeypatch)
    assert other.lib.isobit_rows32_self_test() == 0
    random = torch.Generator().manual_seed(12)
    for data in DATA:
        for dtype in DTYPES:
            x, dy = ((data(random, 20, 300) * 3).to(dtype) for _ in range(2))
            weight = plain(random, 300).to(dtype)
            results = []
            for ops in (native, other):
                normed = ops.rms_norm(x, weight, 1e-6, dy)
                gated = ops.gate_mul("silu", x), ops.gate_mul_backward("silu", dy[:, :150], x)
                results.append(
                    [*normed, *ops.rms_norm_backward(dy, normed[1], weight, normed[2]), *gated]
                )
            assert all(same(ours, theirs) for ours, theirs in zip(*results, strict=True))
        for cache in CACHES:
            for heads in HEADS:
                p = problem(data, cache, heads, [5, 1, 70, 33])
                results = []
                k = data(random, len(p.q), *heads[1:]).to(CACHES[cache][0].dtype)
                for ops in (native, other):
                    if not p.store.calibrated:
                        ops.kv_write(p.store, k, k.flip(0), p.layout)
                        stored = (p.store.k, p.store.v, p.store.k_scale, p.store.v_scale)
                        results.append([part.clone() for part in stored if part is not None])
                assert not results or all(
                    same(ours, theirs) for ours, theirs in zip(*results, strict=True)
                )
                results = []
                for ops in (native, other):
                    forward = ops.attention(p.q, p.store, p.layout, p.scale)
                    arguments = (p.dout, p.q, *forward, p.store, p.layout, p.scale)
                    results.append([*forward, *ops.attention_backward(*arguments)])
                assert all(same(ours, theirs) for ours, theirs in zip(*results, strict=True))

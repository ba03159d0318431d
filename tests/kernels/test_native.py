"""The native operators against the reference: bit for bit where the arithmetic is exact, else
within an ulp. What `bitwise` adds in float32 is in `test_ordered.py` and `test_rows32.py`.

Sums that are not exact run in another order in float64, so a result can differ only where the
float64 sum lies within about 2^-50 of a rounding boundary: the count of differing elements is
asserted, not only their size.
"""

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import KVStore, Layout, Ops, get_ops
from isobit.kernels.native import available
from isobit.precision import BF16, E4M3, E5M2, FP32, INT8, QuantSpec, quantize

from .helpers import ACTIVATIONS, draw, ordinals, same

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

DTYPES = (torch.bfloat16, torch.float32)
SCALES = ("ue8m0", "fp32")
SHAPES = (
    (1, 512, 512),
    (7, 33, 100),
    (33, 96, 300),
    (64, 130, 512),
    (257, 48, 640),
    (5, 7, 1),
    (130, 512, 1000),
)
"""M, N, K: single rows, ragged tiles, ragged blocks of K, more rows than a slice."""
CACHES = {
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "e4m3 ue8m0": (torch.bfloat16, QuantSpec(E4M3, "row", "ue8m0")),
    "e4m3 fp32": (torch.bfloat16, QuantSpec(E4M3, "row", "fp32")),
    "int8": (torch.bfloat16, QuantSpec(INT8, "row", "fp32")),
}


@pytest.fixture(scope="module")
def exact() -> tuple[Ops, Ops]:
    return get_ops("native", "exact"), get_ops("reference", "exact")


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20)


def assert_close(a: Tensor, b: Tensor, ulps: int = 1, differing: float = 1e-3) -> None:
    """At most `ulps` apart, and at most the fraction `differing` (and one element) at all."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    distance = (ordinals(a) - ordinals(b)).abs()
    assert int(distance.max()) <= ulps
    assert int((distance > 0).sum()) <= 1 + differing * distance.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("granularity", ["1x128", "128x128", "128x1", "row", "column", "tensor"])
def test_quantize_is_the_reference_bit_for_bit(
    native: Ops,
    reference: Ops,
    random: torch.Generator,
    granularity: str,
    scale: str,
    dtype: torch.dtype,
) -> None:
    spec = QuantSpec(E4M3, granularity, scale)
    for rows, columns in ((1, 1), (3, 130), (129, 257), (64, 512), (7, 100), (300, 16)):
        x = draw(random, rows, columns, dtype=dtype, spread=5.0)
        x[0] = 0.0
        x[-1] *= 1e-36  # towards float32's subnormals, and below the smallest scale
        ours, theirs = native.quantize(x, spec), reference.quantize(x, spec)
        assert same(ours.data, theirs.data)
        assert same(ours.scale, theirs.scale)


@pytest.mark.parametrize("scale", SCALES)
def test_quantize_of_every_finite_bfloat16(native: Ops, reference: Ops, scale: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[torch.isfinite(every)][: 510 * 128].view(-1, 128)
    for granularity in ("1x128", "128x128", "128x1"):
        spec = QuantSpec(E4M3, granularity, scale)
        ours, theirs = native.quantize(x, spec), reference.quantize(x, spec)
        assert same(ours.data, theirs.data)
        assert same(ours.scale, theirs.scale)


def test_the_cast_is_round_to_nearest_even(native: Ops, random: torch.Generator) -> None:
    """With 448 in every block the scale is 1, and codes must be PyTorch's: all bfloat16, random and
    halfway float32."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([halfway, halfway.nextafter(codes[1:]), halfway.nextafter(codes[:-1])])
    scattered = torch.randn(100_000, generator=random) * torch.exp(
        3 * torch.randn(100_000, generator=random)
    )
    values = torch.cat([every[every.abs() <= 448], near, -near, scattered.clamp(-448, 448)])
    values = torch.cat([values, values.new_zeros(-len(values) % 127)]).view(-1, 127)
    x = torch.cat([values, torch.full((len(values), 1), 448.0)], 1)
    quantized = native.quantize(x, QuantSpec(E4M3, "1x128", "ue8m0"))
    assert bool((quantized.scale == 1).all())
    assert same(quantized.data, x.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_input_raises_as_the_reference_does(
    native: Ops, reference: Ops, random: torch.Generator, bad: float
) -> None:
    for dtype in DTYPES:
        for granularity in ("1x128", "128x128", "128x1"):
            x = draw(random, 130, 200, dtype=dtype)
            x[129, 199] = bad
            messages = []
            for ops in (native, reference):
                with pytest.raises(IsobitError, match="qkv") as caught:
                    ops.quantize(x, QuantSpec(E4M3, granularity), "layers.0.qkv")
                messages.append((type(caught.value), str(caught.value)))
            assert messages[0] == messages[1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_product_is_the_reference_bit_for_bit(
    exact: tuple[Ops, Ops], random: torch.Generator, shape: tuple[int, int, int], scale: str
) -> None:
    native, reference = exact
    rows, columns, inner = shape
    bias = draw(random, columns)
    a = quantize(draw(random, rows, inner, spread=3.0), QuantSpec(E4M3, "1x128", scale))
    along = QuantSpec(E4M3, "128x1", scale)
    transposed_a = quantize(draw(random, inner, rows), along).transpose()
    for granularity in ("128x128", "1x128", "row", "tensor"):
        b = quantize(draw(random, columns, inner, spread=2.0), QuantSpec(E4M3, granularity, scale))
        for out in DTYPES:
            for added in (None, bias):
                assert same(native.product(a, b, added, out), reference.product(a, b, added, out))
    for b in (
        quantize(draw(random, inner, columns), along).transpose(),
        quantize(draw(random, inner, columns), QuantSpec(E4M3, "128x128", scale)).transpose(),
    ):
        for left in (a, transposed_a):
            assert same(
                native.product(left, b, None, torch.float32),
                reference.product(left, b, None, torch.float32),
            )


def test_fp8_product_of_the_largest_and_smallest_codes(
    exact: tuple[Ops, Ops], random: torch.Generator
) -> None:
    """Blocks that mix 448 · 448 with 2^-9 · 2^-9: the sum needs all of its 43 bits."""
    native, reference = exact
    spec = QuantSpec(E4M3, "1x128", "fp32")
    choice = torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-9), 240.0, 0.0])
    a, b = (
        quantize(choice[torch.randint(0, 6, (n, 384), generator=random)], spec) for n in (65, 48)
    )
    assert same(
        native.product(a, b, None, torch.float32), reference.product(a, b, None, torch.float32)
    )


def test_a_broken_scale_is_noticed(native: Ops, reference: Ops, random: torch.Generator) -> None:
    """The negative control of the comparisons above: one scale per tensor instead of one per
    block."""
    x = draw(random, 33, 512, spread=2.0)
    w = quantize(draw(random, 64, 512), QuantSpec(E4M3, "128x128"))
    per_block, per_tensor = (
        native.quantize(x, QuantSpec(E4M3, granularity)) for granularity in ("1x128", "tensor")
    )
    assert not same(native.product(per_tensor, w), reference.product(per_block, w))


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_product(
    exact: tuple[Ops, Ops], random: torch.Generator, shape: tuple[int, int, int]
) -> None:
    native, reference = exact
    rows, columns, inner = shape
    for dtype_a, dtype_b in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32,) * 2,
        (torch.bfloat16, torch.float32),
    ):
        a, b = draw(random, rows, inner, dtype=dtype_a), draw(random, columns, inner, dtype=dtype_b)
        for out in DTYPES:
            for bias in (None, draw(random, columns, dtype=dtype_a)):
                assert_close(
                    native.product(a, b, bias, out),
                    reference.product(a, b, bias, out),
                    differing=1e-6,
                )
        assert_close(
            native.product(a, b[:, :].t().contiguous().t(), None, torch.float32),
            native.product(a, b, None, torch.float32),
            ulps=0,
            differing=0,
        )


def test_one_rounding_to_bfloat16(exact: tuple[Ops, Ops]) -> None:
    """Sums just above and below halfway between two bfloat16, which a detour through float32 would
    round wrongly."""
    native, reference = exact
    tiny = [0.0, 2.0**-40, -(2.0**-40), 2.0**-24]
    b = torch.tensor([[1.0, 2.0**-8, t] for t in tiny] + [[1.0, 3 * 2.0**-8, t] for t in tiny])
    a = torch.tensor(
        [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [2.0**-130, 2.0**-130, 2.0**-130], [2.0**127] * 3]
    )
    ours = native.product(a, b)
    assert same(ours, reference.product(a, b))
    assert ours[0, :4].tolist() == [1.0, 1.0078125, 1.0, 1.0078125]


def test_mixed_and_e5m2_operands(exact: tuple[Ops, Ops], random: torch.Generator) -> None:
    native, reference = exact
    x, w = draw(random, 9, 256), quantize(draw(random, 40, 256), QuantSpec(E4M3, "128x128"))
    wanted = reference.product(x, w, None, torch.float32)
    assert_close(native.product(x, w, None, torch.float32), wanted)
    coarse = quantize(x, QuantSpec(E5M2, "1x128"))
    wanted = reference.product(coarse, w, None, torch.float32)
    assert_close(native.product(coarse, w, None, torch.float32), wanted)
    assert same(native.quantize(x, QuantSpec(E5M2, "1x128")).data, coarse.data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (33, 512), (7, 100)])
def test_pointwise(
    exact: tuple[Ops, Ops], random: torch.Generator, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    native, reference = exact
    rows, columns = shape
    x, residual, dy = (draw(random, rows, columns, dtype=dtype) for _ in range(3))
    weight = draw(random, columns, dtype=dtype)
    for added in (None, residual):
        for ours, theirs in zip(
            native.rms_norm(x, weight, 1e-5, added),
            reference.rms_norm(x, weight, 1e-5, added),
            strict=True,
        ):
            assert_close(ours, theirs)
    _, summed, rstd = reference.rms_norm(x, weight, 1e-5, residual)
    for ours, theirs in zip(
        native.rms_norm_backward(dy, summed, weight, rstd),
        reference.rms_norm_backward(dy, summed, weight, rstd),
        strict=True,
    ):
        assert (ours.double() - theirs.double()).norm() <= 1e-6 * theirs.double().norm()
    gate_up = draw(random, rows, 2 * columns, dtype=dtype) * 4
    dh = draw(random, rows, columns, dtype=dtype)
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    # two exponentials, each within half an ulp and a bit, then two or four more roundings in
    # float32
    ulps, differing = (1, 1e-3) if dtype == torch.bfloat16 else (8, 0.05)
    for activation in ACTIVATIONS:
        assert_close(
            native.gate_mul(activation, gate_up),
            reference.gate_mul(activation, gate_up),
            ulps,
            differing,
        )
        ours, theirs = (ops.gate_mul_backward(activation, dh, gate_up) for ops in exact)
        assert (ours.double() - theirs.double()).norm() <= 1e-6 * theirs.double().norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_the_reference_bit_for_bit(
    native: Ops, reference: Ops, random: torch.Generator, dtype: torch.dtype
) -> None:
    for heads, dim in ((6, 64), (1, 40), (3, 6)):
        x = draw(random, 33, heads + 2, dim, dtype=dtype)[
            :, :heads
        ]  # a slice of fused queries, keys and values
        angle = draw(random, 50, dim // 2, dtype=torch.float32)
        positions = torch.randint(0, 50, (33,), generator=random)
        for inverse in (False, True):
            ours, theirs = (
                ops.rotary(x, angle.cos(), angle.sin(), positions, inverse)
                for ops in (native, reference)
            )
            assert same(ours, theirs)


@pytest.mark.parametrize("vocabulary", [1, 5, 97, 4096, 50_000])
def test_logprobs_and_samples(
    native: Ops, reference: Ops, random: torch.Generator, vocabulary: int
) -> None:
    logits = draw(random, 24, vocabulary, dtype=torch.float32) * 5
    logits[0, vocabulary // 2 + 1 :] = float("-inf")
    logits[1] = 0.0
    logits[2, vocabulary // 3] = 80.0
    tokens = torch.randint(0, vocabulary // 2 + 1, (24,), generator=random)
    keys = torch.randint(-(2**60), 2**60, (24, 4), generator=random)
    for temperature in (1.0, 0.7, 3.0):
        for ours, theirs in zip(
            native.token_logprobs(logits, tokens, temperature),
            reference.token_logprobs(logits, tokens, temperature),
            strict=True,
        ):
            assert_close(ours, theirs)
        assert same(
            native.sample(logits, keys, temperature), reference.sample(logits, keys, temperature)
        )
    each = torch.tensor([0.3, 1.0, 2.5] * 8)
    assert same(native.sample(logits, keys, each), reference.sample(logits, keys, each))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_temperature_for_each_row(
    backend: str, request: pytest.FixtureRequest, random: torch.Generator
) -> None:
    """The bits of every row alone, with its temperature as one number; the next row's would be
    noticed."""
    ops: Ops = request.getfixturevalue(backend)
    logits, hidden = draw(random, 24, 997, dtype=torch.float32) * 3, draw(random, 24, 32)
    weight, tokens = draw(random, 997, 32), torch.randint(0, 997, (24,), generator=random)
    keys = torch.randint(-(2**60), 2**60, (24, 4), generator=random)
    each = torch.rand(24, generator=random) * 2 + 0.01

    def found(temperatures: Tensor) -> list[Tensor]:
        return [
            ops.sample(logits, keys, temperatures),
            *ops.token_logprobs(logits, tokens, temperatures),
            *ops.head_sample(hidden, weight, keys, temperatures),
        ]

    wanted = [
        (
            ops.sample(logits[i : i + 1], keys[i : i + 1], float(each[i])),
            *ops.token_logprobs(logits[i : i + 1], tokens[i : i + 1], float(each[i])),
            *ops.head_sample(hidden[i : i + 1], weight, keys[i : i + 1], float(each[i])),
        )
        for i in range(24)
    ]
    assert all(
        same(ours, torch.cat(theirs))
        for ours, theirs in zip(found(each), zip(*wanted), strict=True)
    )
    assert not any(
        same(ours, torch.cat(theirs)) for ours, theirs in zip(found(each.roll(1)), zip(*wanted))
    )


def test_many_samples_are_the_reference(
    native: Ops, reference: Ops, random: torch.Generator
) -> None:
    """20,000 draws from one distribution: the same tokens, and their frequencies are the
    probabilities."""
    logits = draw(random, 1, 33, dtype=torch.float32).expand(20_000, -1).contiguous()
    keys = torch.stack([torch.full((20_000,), 7), torch.zeros(20_000).long(),
        torch.arange(20_000) % 8,
                        torch.arange(20_000) // 8], 1)  # fmt: skip
    tokens = native.sample(logits, keys, 1.0)
    assert same(tokens, reference.sample(logits, keys, 1.0))
    expected = torch.softmax(logits[0].double(), -1) * 20_000
    statistic = ((torch.bincount(tokens, minlength=33) - expected) ** 2 / expected).sum()
    assert statistic < 70  # chi-squared with 32 degrees of freedom: above 70 once in 10,000


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [(8, 8, 64), (4, 2, 40), (6, 1, 16), (2, 2, 128), (3, 3, 7)])
def test_attention(
    exact: tuple[Ops, Ops], random: torch.Generator, cache: str, heads: tuple[int, int, int]
) -> None:
    native, reference = exact
    dtype, kv = CACHES[cache]
    num_heads, kv_heads, dim = heads
    lengths = [5, 1, 33, 70, 16]
    layout, rows = Layout.packed(lengths), sum(lengths)
    compute = BF16 if dtype == torch.bfloat16 else FP32
    stores = [KVStore.allocate(layout.num_slots, kv_heads, dim, kv, compute) for _ in range(2)]
    q = draw(random, rows, num_heads, dim, dtype=dtype)
    dout = draw(random, rows, num_heads, dim, dtype=dtype)
    k = draw(random, rows, kv_heads, dim, dtype=dtype)
    v = draw(random, rows, kv_heads, dim, dtype=dtype)
    for ops, store in zip((native, reference), stores, strict=True):
        ops.kv_write(store, k, v, layout)
    for name in ("k", "v") if kv is None else ("k", "v", "k_scale", "v_scale"):
        assert same(getattr(stores[0], name), getattr(stores[1], name))
    scale = dim**-0.5
    (out, lse), (expected, expected_lse) = (
        ops.attention(q, stores[1], layout, scale) for ops in (native, reference)
    )
    assert_close(out, expected)
    assert_close(lse, expected_lse)
    single, _ = get_ops("native", "fast").attention(q, stores[1], layout, scale)
    assert (single.double() - expected.double()).norm() <= 1e-3 * expected.double().norm()
    for ours, theirs in zip(
        native.attention_backward(dout, q, expected, expected_lse, stores[1], layout, scale),
        reference.attention_backward(dout, q, expected, expected_lse, stores[1], layout, scale),
        strict=True,
    ):
        # elements that cancel to zero keep the noise of the rounded lse, so the norm is what can be
        # compared
        assert (ours.double() - theirs.double()).norm() <= (
            1e-6 if dtype == torch.float32 else 1e-4
        ) * (theirs.double().norm())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_codes_are_the_references_at_the_edges(
    native: Ops, reference: Ops, random: torch.Generator, dtype: torch.dtype, scale: str
) -> None:
    """Ties, zeros, the smallest and the largest numbers, scales that are rounded, and rows of
    ragged length. The controls: what rounds half up, what divides by 128, and what multiplies by
    the reciprocal has other codes."""
    steps = (
        torch.rand(50, 1, generator=random) + 0.1
    ) / 127  # of rows whose quotients are halves once rounded
    k = torch.cat([
        torch.arange(102).reshape(2, 51) - 50.5,
        torch.tensor([[127.0], [-127.0]]).expand(2, 51),
        torch.arange(51).repeat(2, 1) * 2.0**-149,
        torch.arange(51).repeat(2, 1) * 2.0**-126,
        torch.linspace(-torch.finfo(dtype).max, torch.finfo(dtype).max, 102,
            dtype=torch.float64).view(2, 51).to(dtype),
        torch.zeros(2, 51),
        torch.cat((127 * steps, (torch.arange(50) - 0.5) * steps), 1),
        draw(random, 400, 51, dtype=torch.float32, spread=1.0),
    ]).to(dtype).view(-1, 2, 51)  # fmt: skip
    k[0, :, 0] = 127.0  # the scale is 1, and the others are halves
    layout, spec = Layout.packed([len(k)]), QuantSpec(INT8, "row", scale)
    stores = [KVStore.allocate(layout.num_slots, 2, 51, spec, BF16) for _ in range(2)]
    for ops, store in zip((native, reference), stores, strict=True):
        ops.kv_write(store, k, k.flip(0), layout)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert same(getattr(stores[0], name), getattr(stores[1], name))
    codes, scales = stores[0].k[: len(k)].float(), stores[0].k_scale[: len(k)].unsqueeze(-1)
    assert (int(codes.min()), int(codes.max())) == (-127, 127)
    scaled = (k.float() / scales).clamp(-127, 127)
    assert same(codes, scaled.round() + 0.0)
    assert int((codes != (scaled + 0.5).floor()).sum()) > 40
    if scale == "fp32":
        assert (
            int((codes != (k.float() / (scales * 127 / 128)).round()).sum()) > codes.numel() // 10
        )
        assert (
            dtype != torch.float32
            or int((codes != (k.float() * (1 / scales)).round().clamp(-127, 127)).sum()) > 40
        )


def test_kv_write_raises_on_nan(native: Ops, random: torch.Generator) -> None:
    for form in (E4M3, INT8):
        refuse_nan(native, random, KVStore.allocate(16, 2, 16, QuantSpec(form, "row"), BF16))


def refuse_nan(native: Ops, random: torch.Generator, store: KVStore) -> None:
    assert store.kv is not None
    layout = Layout.packed([4])
    k = draw(random, 4, 2, 16)
    k[3, 1, 5] = float("nan")
    with pytest.raises(
        IsobitError, match=f"cannot quantize keys and values to {store.kv.format}: it holds NaN"
    ):
        native.kv_write(store, draw(random, 4, 2, 16), k, layout)


def test_fast_products(random: torch.Generator) -> None:
    native, reference = get_ops("native", "fast"), get_ops("reference", "fast")
    x, w = draw(random, 33, 300), draw(random, 48, 300)
    assert same(native.product(x, w), reference.product(x, w))
    a, b = quantize(x, QuantSpec(E4M3, "1x128")), quantize(w, QuantSpec(E4M3, "128x128"))
    first = native.product(a, b)
    assert same(first, reference.product(a, b))
    assert same(native.product(a, b), first)

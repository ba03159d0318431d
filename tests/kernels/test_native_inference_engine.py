"""The separate engine's operators in C++ against their definition in PyTorch
(`InferenceEngineOps`): elementwise ones bit for bit, sums within the bound of any order, and never
the learner's own order or rounding."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels import Activation, KVStore, Layout, Operand, Ops, get_ops, inference_engine_ops
from isobit.kernels.backends.composed import Composed
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.inference_engine.definition import InferenceEngineOps
from isobit.kernels.inference_engine.native import NativeInferenceEngineOps
from isobit.kernels.native import available, build
from isobit.kernels.ops import Heads
from isobit.kernels.product import ordered_native as ordered
from isobit.precision import BF16, E4M3, FP32, INT8, QTensor, QuantSpec, quantize
from tests.models import tiny_model

from .helpers import ACTIVATIONS, draw, normal, same, threads

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

REFERENCE = get_ops("reference")
DEFINITION = InferenceEngineOps(REFERENCE)
HERE = [
    (order, isa)
    for number, order in enumerate(ordered.ORDERS)
    for i, isa in enumerate(ordered.ISAS)
    if build.library().isobit_ordered_isa(i, number) == i
]
UNIT = 2.0**-24
SCALES = {
    "1x128 fp32": ("1x128", "128x128", "fp32"),
    "1x128": ("1x128", "128x128", "ue8m0"),
    "1x32": ("1x32",) * 2 + ("ue8m0",),
}
SHAPES = ((1, 96, 512), (5, 40, 128), (21, 33, 300), (300, 70, 256), (7, 20, 48))


@pytest.fixture(scope="module")
def separate() -> Ops:
    found = inference_engine_ops(get_ops("native"))
    assert isinstance(found, NativeInferenceEngineOps)
    assert found.backend == DEFINITION.backend == "separate"
    return found


def operands(rows: int, columns: int, inner: int, scales: str) -> tuple[QTensor, QTensor]:
    left, right, kind = SCALES[scales]
    a = quantize(draw(1, rows, inner, dtype=torch.float32, spread=2.0), QuantSpec(E4M3, left, kind))
    return a, quantize(
        draw(2, columns, inner, dtype=torch.float32, spread=2.0), QuantSpec(E4M3, right, kind)
    )


def reversed_columns(x: QTensor) -> QTensor:
    """The blocks of 128 columns in reverse, and so are the columns within; a shorter last block
    stays the last one."""
    columns = x.shape[1]
    order = [
        *range(columns // 128 * 128 - 1, -1, -1),
        *range(columns - 1, columns // 128 * 128 - 1, -1),
    ]
    block = x.block[1]
    if block < columns:
        scale = torch.stack([x.scale[:, order[k] // block] for k in range(0, columns, block)], 1)
    else:
        scale = x.scale
    return QTensor(
        x.data.view(torch.uint8)[:, order].contiguous().view(x.data.dtype), scale, x.spec
    )


def error_bound(a: Operand, b: Operand) -> Tensor:
    """Of a float32 sum of K scaled products in any order: γ(K + 4) Σ|a·b| (Higham 2002, section
    4.2), four roundings being those of scales, product and bias."""
    left, right = (x.dequantize() if isinstance(x, QTensor) else x for x in (a, b))
    steps = (left.shape[1] + 4) * UNIT
    return steps / (1 - steps) * (left.double().abs() @ right.double().abs().t())


# ---- products ----


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_products_are_near_those_in_pytorch(
    separate: Ops, scales: str, shape: tuple[int, int, int]
) -> None:
    """Both are float32 sums of the same terms, so they are two bounds apart at most; the control is
    a product that lacks the smallest of its terms that would show."""
    a, b = operands(*shape, scales)
    found = separate.product(a, b, None, torch.float32)
    limit = 2 * error_bound(a, b)
    assert bool(
        (
            (found.double() - DEFINITION.product(a, b, None, torch.float32).double()).abs() <= limit
        ).all()
    )
    codes = a.data.view(torch.uint8).clone()
    codes[:, 3] ^= 0x80  # the sign of a column
    flipped = separate.product(
        QTensor(codes.view(a.data.dtype), a.scale, a.spec), b, None, torch.float32
    )
    assert bool(((flipped.double() - found.double()).abs() > limit).any())


@pytest.mark.parametrize(("order", "isa"), HERE)
@pytest.mark.parametrize("scales", SCALES)
def test_fp8_products_have_the_order_of_the_learner_in_reverse(
    monkeypatch: pytest.MonkeyPatch, order: str, isa: str, scales: str
) -> None:
    """Bit for bit, with a bias and in both types; the control is the learner's own order."""
    monkeypatch.setenv("ISOBIT_ISA", isa)
    separate, bias = inference_engine_ops(get_ops("native", f"bitwise-{order}")), normal(96, seed=3)
    differing = 0
    for rows, columns, inner in SHAPES:
        a, b = operands(rows, columns, inner, scales)
        if scales == "1x32" and inner % 32:
            continue  # columns with one scale would not stay together: left to the definition
        for dtype in (torch.bfloat16, torch.float32):
            found = separate.product(a, b, bias[:columns], dtype)
            wanted = defined(order, scales, (rows, columns, inner), True, dtype)
            assert same(found, wanted), (rows, columns, inner)
        own = defined(order, scales, (rows, columns, inner), False, torch.float32)
        differing += int((found != own).sum())
    assert differing > 100


@functools.cache
def defined(
    order: str, scales: str, sizes: tuple[int, int, int], turned: bool, dtype: torch.dtype
) -> Tensor:
    """The product as the reference adds it, which no instruction set changes."""
    a, b = operands(*sizes, scales)
    if turned:
        a, b = reversed_columns(a), reversed_columns(b)
    ops = get_ops("reference", f"bitwise-{order}")
    return ops.product(a, b, normal(96, seed=3)[: sizes[1]], dtype)


def test_bf16_products_are_rounded_sums(separate: Ops) -> None:
    for rows, columns, inner in SHAPES:
        a, b, bias = draw(1, rows, inner), draw(2, columns, inner), draw(3, columns)
        exact = a.double() @ b.double().t() + bias.double()
        for weight in (b, separate.prepare(b)):
            found = separate.product(a, weight, bias, torch.float32)
            assert same(found, found.bfloat16().float())
            limit = error_bound(a, b) + UNIT * bias.abs()
            assert bool(
                ((found.double() - exact).abs() <= limit + 2.0**-8 * (exact.abs() + limit)).all()
            )
    a, b = (quantize(normal(9, 96, seed=s), QuantSpec(E4M3, "1x32", "fp32")) for s in (1, 2))
    assert same(separate.product(a, b), DEFINITION.product(a, b))  # not in C++
    x, w = normal(9, 96), normal(5, 96)
    assert same(
        separate.product(x, w, None, torch.float32), DEFINITION.product(x, w, None, torch.float32)
    )


@pytest.mark.parametrize("scales", [*SCALES, None])
def test_a_prepared_weight_multiplies_as_the_weight_itself(
    separate: Ops, scales: str | None
) -> None:
    """Also after it was overwritten and prepared again; until then, the control, packs are
    stale."""
    weights: list[Operand] = [
        operands(3, 70, 256, scales)[1] if scales else draw(s, 70, 256) for s in (1, 2)
    ]
    if isinstance(weights[1], QTensor):
        weights[1] = quantize(normal(70, 256, seed=9), weights[1].spec)
    x = operands(33, 70, 256, scales)[0] if scales else draw(4, 33, 256)
    prepared = separate.prepare(weights[0])
    assert prepared is not weights[0]
    assert same(separate.product(x, prepared), separate.product(x, weights[0]))
    for old, new in zip(*((w.data, w.scale) if isinstance(w, QTensor) else (w,) for w in weights)):
        old.copy_(new)
    assert not same(separate.product(x, prepared), separate.product(x, weights[1]))
    assert separate.prepare(weights[0], prepared) is prepared
    assert same(separate.product(x, prepared), separate.product(x, weights[1]))


@pytest.mark.parametrize("preset", ["fp8-rollout", "fp8-e2e", "fp8[engines=separate]"])
def test_a_sync_packs_weights_for_the_rollouts_operators(preset: str) -> None:
    """The control: packs of the learner's operators, which read columns in their own order."""
    model = tiny_model(preset, backend="native")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    model.sync()
    ops = model.transformer.ops
    flipped = 0
    for weight in model.transformer.rollout_weights():
        x: Operand = normal(33, weight.working.shape[1]).bfloat16()
        x = x if weight.activation is None else ops["learner"].quantize(x, weight.activation)
        assert same(
            ops["rollout"].product(x, weight.prepared), ops["rollout"].product(x, weight.working)
        )
        ops["learner"].prepare(weight.working, weight.prepared)
        flipped += not same(
            ops["rollout"].product(x, weight.prepared), ops["rollout"].product(x, weight.working)
        )
    assert flipped == len(list(model.transformer.rollout_weights()))


# ---- rows ----


def near_a_tie(x: Tensor, reach: float) -> Tensor:
    """Whether float64 numbers lie so near the middle of two BF16 numbers that a relative error of
    `reach` may decide the rounding."""
    low, high = (x * (1 - reach)).bfloat16(), (x * (1 + reach)).bfloat16()
    return low != high


@pytest.mark.parametrize("columns", [5, 64, 128, 200])
def test_the_norm_has_the_bits_of_pytorchs(separate: Ops, columns: int) -> None:
    """Given 1 / RMS, whose sum has another order: within γ(columns + 8). Without the rounding in
    between, the control, other bits."""
    x, residual = draw(1, 37, columns, spread=1.0), draw(2, 37, columns, spread=1.0)
    weight = (1 + 0.3 * normal(columns, seed=3)).bfloat16()
    for other in (None, residual):
        y, summed, rstd = separate.rms_norm(x, weight, 1e-6, other)
        expected = DEFINITION.rms_norm(x, weight, 1e-6, other)
        assert same(summed, expected[1])
        assert bool(((rstd - expected[2]).abs() <= 2 * (columns + 8) * UNIT * expected[2]).all())
        normalized = summed.float() * rstd.unsqueeze(-1)
        assert same(y, normalized.bfloat16() * weight)
        assert not same(y, (normalized * weight.float()).bfloat16())
    assert same(
        separate.rms_norm(x.float(), weight.float(), 1e-6)[0],
        DEFINITION.rms_norm(x.float(), weight.float(), 1e-6)[0],
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inner", [5, 64, 200])
def test_the_gate_has_the_bits_of_pytorchs(
    separate: Ops, inner: int, activation: Activation
) -> None:
    """Up to the last bits of exp, which decide where the activation is so near a tie; the control
    is one rounding."""
    gate_up = (3 * normal(300, 2 * inner)).bfloat16()
    found = separate.gate_mul(activation, gate_up)
    expected = DEFINITION.gate_mul(activation, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.double()
    multiplied = up.double()
    if activation == "swiglu_clamped":
        wide, multiplied = wide.clamp(max=7.0), (up.float().clamp(-7.0, 7.0) + 1.0).double()
    cubic = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    k = {"gelu_pytorch_tanh": cubic, "swiglu_clamped": 1.702 * wide}.get(activation, wide)
    activated = torch.sigmoid(k) if activation == "sigmoid" else wide * torch.sigmoid(k)
    decided = ~near_a_tie(activated, 2.0**-20 + k.abs() * 2.0**-22) & (
        k > -87
    )  # where exp ends in float32
    assert float(decided.double().mean()) > 0.99
    assert torch.equal(found[decided], expected[decided])
    once = (activated * multiplied).float().bfloat16()
    assert float((found != once)[decided].double().mean()) > 0.1
    assert same(
        separate.gate_mul(activation, gate_up.float()),
        DEFINITION.gate_mul(activation, gate_up.float()),
    )


def test_probabilities_are_rounded_to_bf16_before_they_meet_values(separate: Ops) -> None:
    """Two keys, values (0, 1): the result is w / (1 + w) with w = exp(score) rounded to BF16, but
    not in the sum; the control leaves w as it is."""
    layout = Layout.packed([2] * 400)
    q, k = torch.zeros(800, 1, 16), torch.zeros(800, 1, 16)
    q[:, 0, 0] = 1.0
    k[1::2, 0, 0] = -torch.rand(400, generator=torch.Generator().manual_seed(0)) * 4
    v = torch.zeros(800, 1, 16)
    v[1::2] = 1.0
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    store = KVStore.allocate(layout.num_slots, 1, 16, None, BF16)
    separate.kv_write(store, k, v, layout)
    found = separate.attention(q, store, layout, 1.0)[0][1::2, 0, 0]
    weight = torch.exp(k[1::2, 0, 0].double())
    rounded, whole = weight.bfloat16().double() / (1 + weight), weight / (1 + weight)
    decided = ~(near_a_tie(weight, 2.0**-20) | near_a_tie(rounded, 2.0**-20))
    assert float(decided.double().mean()) > 0.95
    assert torch.equal(found[decided], rounded.bfloat16()[decided])
    assert float((found != whole.bfloat16()).double().mean()) > 0.1


@pytest.mark.parametrize(
    "kv",
    [
        None,
        QuantSpec(E4M3, "row", "fp32"),
        QuantSpec(E4M3, "tensor", "fp32"),
        QuantSpec(INT8, "row", "fp32"),
    ],
)
def test_attention_is_near_that_in_pytorch(separate: Ops, kv: QuantSpec | None) -> None:
    """A weight of P is off by a unit of BF16 at most, 2^-8 of itself, where the definition rounds
    it elsewhere; the result then rounds once more. The control is one more key."""
    layout = Layout.packed([37, 5, 1])
    q, k, v = (normal(43, heads, 48, seed=heads).bfloat16() for heads in (4, 2, 2))
    store = KVStore.allocate(
        layout.num_slots,
        2,
        48,
        kv,
        BF16,
        None if kv is None or kv.granularity == "row" else torch.tensor([0.01, 0.01]),
    )
    separate.kv_write(store, k, v, layout)
    found, lse = separate.attention(q, store, layout, 0.2)
    expected, expected_lse = DEFINITION.attention(q, store, layout, 0.2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    largest = float(v.abs().max()) * 2.0**-7
    assert float((found.double() - expected.double()).abs().max()) <= largest
    assert float((found != expected).double().mean()) < 0.02
    later = Layout.packed([36, 6, 1])
    assert (
        float(
            (separate.attention(q, store, later, 0.2)[0].double() - expected.double()).abs().max()
        )
        > largest
    )
    wide_q, wide_k, wide_v = (x.float() for x in (q, k, v))
    single = KVStore.allocate(layout.num_slots, 2, 48, None, FP32)
    separate.kv_write(single, wide_k, wide_v, layout)
    found, expected = (
        ops.attention(wide_q, single, layout, 0.2)[0] for ops in (separate, DEFINITION)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_drawn_tokens_have_the_log_probabilities_of_pytorch(separate: Ops) -> None:
    hidden, head = draw(1, 40, 64), draw(2, 300, 64)
    keys = torch.tensor([[7, i, 0, 3] for i in range(40)])
    tokens, logprobs = separate.head_sample(hidden, separate.prepare(head), keys, 0.7)
    logits = separate.product(hidden, head, None, torch.float32)
    assert torch.equal(tokens, REFERENCE.sample(logits, keys, 0.7))
    assert same(logprobs, DEFINITION.token_logprobs(logits, tokens, 0.7)[0])
    assert not same(logprobs, DEFINITION.token_logprobs(logits, tokens, 0.8)[0])


def parts_of(found: Any) -> list[Tensor]:
    """The tensors of a result, codes and scales of quantized ones."""
    if isinstance(found, QTensor):
        return [found.data.view(torch.uint8), found.scale]
    return [found] if isinstance(found, Tensor) else [t for each in found for t in parts_of(each)]


def test_composed_operators_have_the_roundings_of_their_parts(separate: Ops) -> None:
    """None of the learner's fused kernels computes for the rollout; the control is such a
    kernel."""
    x, weight, spec = draw(1, 40, 128), draw(2, 128), QuantSpec(E4M3, "1x128", "fp32")
    angles = torch.arange(40).float().outer(torch.arange(8) / 8)
    heads = Heads((draw(3, 16), draw(4, 16)), 1e-6, (angles.cos(), angles.sin()))
    layout = Layout.packed([40])
    store = KVStore.allocate(layout.num_slots, 2, 16, None, BF16)
    given = {
        "rms_norm_quantized": (x, weight, 1e-6, x, spec, "x"),
        "gate_mul_quantized": ("silu", x, spec, "x"),
        "attention_inputs": (x.view(40, 8, 16), heads, store, layout),
        "head_logprobs": (x, draw(5, 300, 128), torch.arange(40), 0.7),
    }
    for name, arguments in given.items():
        found = getattr(separate, name)(*arguments)
        parts = getattr(Composed, name)(separate, *arguments)
        assert all(same(a, b) for a, b in zip(parts_of(found), parts_of(parts), strict=True)), name
    fused = parts_of(NativeOps.rms_norm_quantized(separate, *given["rms_norm_quantized"]))
    assert not same(
        fused[0], parts_of(separate.rms_norm_quantized(*given["rms_norm_quantized"]))[0]
    )


# ---- determinism ----


def operators(ops: Ops) -> dict[str, Callable[[], Tensor]]:
    a, b = operands(300, 70, 256, "1x128 fp32")
    x, w = draw(1, 300, 256), draw(2, 70, 256)
    layout = Layout.packed([100, 150, 50])
    q, k, v = (draw(s, 300, heads, 32) for s, heads in enumerate((4, 2, 2)))
    store = KVStore.allocate(layout.num_slots, 2, 32, None, BF16)
    ops.kv_write(store, k, v, layout)
    return {
        "fp8 product": lambda: ops.product(a, b),
        "bf16 product": lambda: ops.product(x, ops.prepare(w)),
        "rms_norm": lambda: ops.rms_norm(x, w[0], 1e-6, x)[0],
        "gate_mul": lambda: ops.gate_mul("silu", x),
        "attention": lambda: ops.attention(q, store, layout, 0.2)[0],
    }


def test_threads_change_no_bit(separate: Ops) -> None:
    with threads(1):
        alone = {name: call() for name, call in operators(separate).items()}
    for count in (2, 3):
        with threads(count):
            for name, call in operators(separate).items():
                assert same(call(), alone[name]), (name, count)
    assert not same(
        alone["rms_norm"], DEFINITION.rms_norm(draw(1, 300, 256), draw(2, 70, 256)[1], 1e-6)[0]
    )

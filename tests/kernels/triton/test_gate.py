"""The gates' kernels: float64 to a bound, fused and unfused, rows alone and in a batch,
gradients."""

import math

import pytest
import torch
from torch import Tensor

from isobit.kernels import Activation
from isobit.kernels.norms.triton import gate
from isobit.kernels.quantize.triton import quantize, quantize_both_ways
from isobit.precision import E4M3, QTensor, QuantSpec
from tests.models import slow_where

from ..helpers import ACTIVATIONS, draw, same
from .helpers import DEVICE
from .test_quantize import equal, flag, host

DTYPES = (torch.bfloat16, torch.float32)
UNIT = 2.0**-24
LAST = {torch.bfloat16: 2.0**-8, torch.float32: UNIT}
TINY = 2.0**-126
"""Below it float32 has fewer digits, and a GPU's exponential is zero."""


def drawn(rows: int, inner: int, dtype: torch.dtype) -> Tensor:
    x = draw(0, rows, 2 * inner, dtype=dtype, spread=1.0)
    x[0, :4] = torch.tensor([0.0, -0.0, 30.0, -30.0])
    return x


def terms(activation: Activation, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a float64 gate (k, gate · k', relative error of float32 exp(-k)): two units in the last
    place, and the rounding of its argument in base 2, which is the product with log2(e): |k| ·
    log2(e) · ln(2) for the argument and as much for the constant; the cubic k of GELU has three
    roundings, and its constants'."""
    if activation in ("silu", "sigmoid"):
        return gate, gate, (4 + 2.01 * gate.abs()) * UNIT
    if activation == "swiglu_clamped":  # k is a product by a rounded constant
        return 1.702 * gate, 1.702 * gate, (4 + 4.01 * 1.702 * gate.abs()) * UNIT
    first = 2 * math.sqrt(2 / math.pi)
    k, slope = (first * (gate + factor * 0.044715 * gate**3) for factor in (1, 3))
    return k, slope, (4 + 7.01 * k.abs()) * UNIT


def bounded(activation: Activation, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up in float64 as they are multiplied."""
    left, up = x.double().chunk(2, -1)
    return (
        (left, up)
        if activation != "swiglu_clamped"
        else (left.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0)
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 48), (19, 200)])
def test_gate_mul_is_float64s_to_a_bound(
    rows: int, inner: int, dtype: torch.dtype, activation: Activation
) -> None:
    """The exponential's relative error, of which the share exp / (1 + exp) reaches the sum; then
    sum, quotient, product and the last rounding."""
    x = drawn(rows, inner, dtype)
    found = gate.gate_mul(activation, x.to(DEVICE)).cpu()
    assert found.dtype == dtype
    left, up = bounded(activation, x)
    k, _, error = terms(activation, left)
    exact = (1.0 if activation == "sigmoid" else left) / (1 + torch.exp(-k)) * up
    bound = (error + 4.01 * UNIT + LAST[dtype]) * exact.abs() * 1.01 + TINY * (1 + up.abs())
    assert bool(((found.double() - exact).abs() <= bound).all())
    assert not bool(((found.double() - 1.01 * exact).abs() <= bound).all()), (
        "the control: one percent off"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "scale"),
    [("silu", "ue8m0"), ("silu", "fp32"), *((name, "ue8m0") for name in tuple(ACTIVATIONS)[1:])],
)
def test_quantized_at_once_has_the_bits_of_both_in_turn(
    scale: str, dtype: torch.dtype, activation: Activation
) -> None:
    for rows, inner in ((1, 48), (19, 200)):
        x = drawn(rows, inner, dtype)
        x[rows // 2, inner:] = 0.0
        h = gate.gate_mul(activation, x.to(DEVICE))
        for granularity in ("1x128", "row"):
            spec, raised = QuantSpec(E4M3, granularity, scale), flag()
            found = gate.gate_mul_quantized(activation, x.to(DEVICE), spec, raised)
            assert equal(found, host(quantize(h, spec, flag())))
            assert raised.item() == 0
    unrounded = (
        x.float().chunk(2, -1)[0].sigmoid() * x.float().chunk(2, -1)[0] * x.float().chunk(2, -1)[1]
    )
    off = host(quantize(unrounded.to(DEVICE) * 1.01, spec, flag()))
    assert not equal(found, off), "the control"


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
def test_scales_of_many_rows_stand_side_by_side(
    scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, spec = drawn(19, 300, torch.bfloat16).to(DEVICE), QuantSpec(E4M3, "1x128", scale)
    few = gate.gate_mul_quantized("silu", x, spec, flag())
    monkeypatch.setattr("isobit.kernels.quantize.triton.FEW_ROWS", 18)
    many = gate.gate_mul_quantized("silu", x, spec, flag())
    assert (few.scale.stride(), many.scale.stride()) == ((3, 1), (1, 19))
    assert equal(many, host(few))
    assert not equal(many, host(QTensor(few.data, few.scale.flip(0), spec))), "the control"


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_far_out_is_finite_and_infinity_sets_the_flag(activation: Activation) -> None:
    x = torch.tensor([[-1e20, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert gate.gate_mul(activation, x.to(DEVICE)).tolist() == [
        [0.0, pytest.approx(0.0, abs=1e-40), 100.0, 1e4]
    ]
    gradient = gate.gate_mul_backward(
        activation, torch.ones(1, 4, device=DEVICE), x.to(DEVICE)
    ).cpu()
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 100.0, 1e4]]))
    raised = flag()
    found = gate.gate_mul_quantized(
        activation, torch.full((2, 8), 3e38, device=DEVICE), QuantSpec(E4M3), raised
    )
    assert raised.item() == 1
    assert found.scale.isnan().all()


def test_rows_alone_have_the_bits_of_the_batch() -> None:
    x, dh = drawn(19, 200, torch.bfloat16), draw(1, 19, 200)
    whole = gate.gate_mul("silu", x.to(DEVICE)).cpu()
    gradient = gate.gate_mul_backward("silu", dh.to(DEVICE), x.to(DEVICE)).cpu()
    codes = host(gate.gate_mul_quantized("silu", x.to(DEVICE), QuantSpec(E4M3), flag()))
    for row in (slice(0, 1), slice(11, 12), slice(7, 18)):
        some = x[row].to(DEVICE)
        assert same(gate.gate_mul("silu", some).cpu(), whole[row])
        assert same(gate.gate_mul_backward("silu", dh[row].to(DEVICE), some).cpu(), gradient[row])
        alone = host(gate.gate_mul_quantized("silu", some, QuantSpec(E4M3), flag()))
        assert same(alone.data, codes.data[row])
        assert same(alone.scale, codes.scale[row])
    shared = QuantSpec(E4M3, "128x128")
    control = [
        host(gate.gate_mul_quantized("silu", rows.to(DEVICE), shared, flag())).data
        for rows in (x, x[11:12])
    ]
    assert not same(control[0][11:12], control[1]), "the control: rows that share a scale"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_float64s_to_a_bound(dtype: torch.dtype, activation: Activation) -> None:
    """σ has the exponential's error and two operations more; 1 + gate·(1 - σ) is a sum whose parts
    have theirs. Of the sigmoid only 1 - σ is left of it."""
    x, dh = drawn(9, 200, dtype), draw(2, 9, 200, dtype=dtype)
    found = gate.gate_mul_backward(activation, dh.to(DEVICE), x.to(DEVICE)).cpu()
    left, up = bounded(activation, x)
    k, slope, error = terms(activation, left)
    sigma, wide = torch.sigmoid(k), dh.double()
    one = 0.0 if activation == "sigmoid" else 1.0
    if activation == "sigmoid":
        left = slope = torch.ones_like(left)
    exact = torch.cat((wide * up * sigma * (one + slope * (1 - sigma)), wide * left * sigma), -1)
    if activation == "swiglu_clamped":
        beyond = torch.cat((x[:, :200] > 7.0, x[:, 200:].abs() > 7.0), -1)
        assert bool(beyond[:, :200].any())
        assert bool(beyond[:, 200:].any())
        exact = exact.masked_fill(beyond, 0.0)
    leaf = x.double().requires_grad_()
    halves = leaf.chunk(2, -1)
    (autograd,) = torch.autograd.grad(ACTIVATIONS[activation](*halves), leaf, wide)
    torch.testing.assert_close(exact, autograd)
    error = error + 3.01 * UNIT
    parts = (wide * up).abs() * sigma * (one + slope.abs() * ((1 - sigma) + sigma * error + UNIT))
    size = torch.cat(((error + 11 * UNIT) * parts + (wide * up * slope).abs() * sigma * (sigma * error + UNIT),
                      (error + 2 * UNIT) * exact[:, 200:].abs()), -1)  # fmt: skip
    bound = 1.01 * (size + LAST[dtype] * exact.abs()) + TINY * (
        1 + torch.cat((wide * up, wide), -1).abs()
    )
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= bound).all())
    assert not bool(((found.double() - 1.01 * exact).abs() <= bound).all()), (
        "the control: one percent off"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "scale"),
    slow_where(
        [(activation, scale) for activation in ACTIVATIONS for scale in ("ue8m0", "fp32")],
        lambda activation, scale: (scale == "fp32") == (activation != "silu"),
    ),
)
def test_gradient_quantized_at_once_has_the_bits_of_both_in_turn(
    scale: str, activation: Activation
) -> None:
    """Codes, scales, where these lie, and the padding behind the tokens; also of halves whose
    blocks cross, and of one scale a row, which are left to the two. The control: another gradient
    of one row, and gate and up exchanged."""
    for rows, inner, granularity in (
        (1, 128, "1x128"),
        (131, 256, "1x128"),
        (5, 200, "1x128"),
        (3, 128, "row"),
    ):
        x, dh = drawn(rows, inner, torch.bfloat16), draw(1, rows, inner)
        spec, raised = QuantSpec(E4M3, granularity, scale), flag()
        given = dh.to(DEVICE), x.to(DEVICE)
        found = gate.gate_mul_backward_quantized(activation, *given, spec, raised)
        wanted = quantize_both_ways(gate.gate_mul_backward(activation, *given), spec, flag())
        assert raised.item() == 0
        for one, other in zip(found, wanted):
            assert equal(one, host(other)), (rows, inner, granularity)
            assert one.scale.stride() == other.scale.stride()
            assert one.data.stride() == other.data.stride()
        pitch = found[1].data.stride(0)
        whole = found[1].data.view(torch.uint8).as_strided((2 * inner, pitch), (pitch, 1))
        assert not bool(whole[:, rows:].any())
        dh[rows - 1] *= 1.25
        off = gate.gate_mul_backward_quantized(activation, dh.to(DEVICE), given[1], spec, flag())
        assert not any(equal(one, host(other)) for one, other in zip(off, wanted))
        turned = x.roll(inner, 1).to(DEVICE)
        off = gate.gate_mul_backward_quantized(activation, given[0], turned, spec, flag())
        assert not any(equal(one, host(other)) for one, other in zip(off, wanted))


def test_a_gradient_that_is_no_number_sets_the_flag() -> None:
    """Of its own block both ways, and of no other."""
    x, dh = drawn(131, 128, torch.bfloat16), draw(1, 131, 128)
    dh[130, 7] = float("nan")
    raised = flag()
    rows, tokens = gate.gate_mul_backward_quantized(
        "silu", dh.to(DEVICE), x.to(DEVICE), QuantSpec(E4M3), raised
    )
    assert raised.item() == 1
    assert host(rows).scale.isnan().nonzero().tolist() == [[130, 0], [130, 1]]
    assert host(tokens).scale.isnan().nonzero().tolist() == [[7, 1], [135, 1]]

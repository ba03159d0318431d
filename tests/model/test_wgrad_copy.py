"""The activation that WGrad multiplies in FP8: the forward's codes quantized again, or an own copy
from BF16."""

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Layout, Ops, get_ops
from isobit.model.forward import autograd
from isobit.model.forward.autograd import Vector, Weight
from isobit.model.forward.experts import _one_by_one, through_experts
from isobit.model.transformer import Transformer
from isobit.precision import PRESETS, QuantSpec, along_rows, precision_from, quantize
from tests.models import require, tiny_model

_ROWS, _IN, _OUT = 1024, 384, 256
_IN_FP8 = [name for name, preset in PRESETS.items() if preset.wgrad == "fp8"]


def weight_of(preset: str) -> Weight:
    precision = PRESETS[preset]
    master = torch.nn.Parameter(_random(_OUT, _IN, seed=1).float() * 0.1)
    assert precision.learner.weight is not None
    working = quantize(master.detach(), precision.learner.weight)
    own = precision.wgrad_activation == "own-copy"
    return Weight(
        "w",
        master,
        working,
        None,
        None,
        precision.learner.activation,
        precision.gradient,
        "fp8",
        precision.wgrad,
        own,
    )


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def wgrad(preset: str, ops: Ops, through: str = "linear") -> tuple[Tensor, Tensor, Tensor]:
    """(dW, the activation, dy) of a linear layer by itself, after a norm, or after a gate."""
    weight, dy = weight_of(preset), _random(_ROWS, _OUT, seed=4)
    x = _random(_ROWS, _IN * (2 if through == "gate" else 1), seed=3)
    if through == "linear":
        activation = x
        autograd.linear(x, weight, ops).backward(dy)
    elif through == "gate":
        activation = ops.gate_mul("silu", x)
        autograd.gated_linear(x, "silu", weight, ops).backward(dy)
    else:
        norm = Vector(
            "norm", torch.nn.Parameter(torch.ones(_IN)), torch.ones(_IN, dtype=torch.bfloat16)
        )
        activation = ops.rms_norm(x, norm.working, 1e-6, None)[0]
        autograd.norm_linear(x, None, norm, 1e-6, weight, ops)[0].backward(dy)
    assert weight.master.grad is not None
    return weight.master.grad, activation, dy


def defined(
    spec: QuantSpec, gradient: QuantSpec, activation: Tensor, dy: Tensor, own: bool, ops: Ops
) -> Tensor:
    """dW as docs/numerics.md defines it."""
    values = activation if own else quantize(activation, spec).dequantize()
    a, b = (quantize(t, along_rows(s)).transpose() for t, s in ((dy, gradient), (values, spec)))
    return ops.product(a, b, None, torch.float32)


@pytest.mark.parametrize("through", ["linear", "norm", "gate"])
@pytest.mark.parametrize("preset", _IN_FP8)
def test_every_preset_multiplies_what_it_says(preset: str, through: str, ops: Ops) -> None:
    """`fp8-e2e` an own copy, as Transformer Engine does; the others the forward's codes, quantized
    again: each bit for bit. The control is the other definition, which has other bits where scales
    are not powers of two."""
    found, activation, dy = wgrad(preset, ops, through)
    precision = PRESETS[preset]
    own = preset == "fp8-e2e"
    assert precision.learner.activation is not None
    assert precision.gradient is not None
    arguments = (precision.learner.activation, precision.gradient, activation, dy)
    assert torch.equal(found, defined(*arguments, own, ops))
    if precision.learner.activation.scale == "fp32":
        assert not torch.equal(found, defined(*arguments, not own, ops))


def test_an_own_copy_has_the_error_of_one_quantization() -> None:
    """Relative error of dW for normal operands: two quantizations, of x and of dy, against
    three. How sums are rounded is far below these."""
    ops = get_ops("reference", "fast")
    errors = {}
    for preset in ("fp8-e2e", "fp8-unified"):
        found, x, dy = wgrad(preset, ops)
        exact = dy.double().T @ x.double()
        errors[preset] = float((found.double() - exact).norm() / exact.norm())
    assert errors["fp8-e2e"] == pytest.approx(0.0364, abs=1e-3)
    assert errors["fp8-unified"] == pytest.approx(0.0445, abs=1e-3)


def test_an_own_copy_takes_the_place_of_the_forwards_codes() -> None:
    """One byte an element is kept for WGrad either way."""
    assert (
        _kept_bytes("fp8-e2e") == _kept_bytes("fp8-unified") == _ROWS * _IN + 4 * _ROWS * _IN // 128
    )


def _kept_bytes(preset: str) -> int:
    saved = dict[int, int]()

    def count(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        y = autograd.linear(
            _random(_ROWS, _IN, seed=3), weight_of(preset), get_ops("reference", "fast")
        )
    del y
    return sum(saved.values())


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_experts_copy_their_own_rows(backend: str) -> None:
    """Every expert's gradients are those of a linear layer over its rows alone; the control is the
    presets' other definition."""
    require(backend)
    found = []
    for preset in ("fp8-e2e", "fp8-e2e[wgrad_activation=requantized]"):
        model = tiny_model(preset, "qwen3_moe")
        layer = next(layer.mlp for layer in model.transformer._working["learner"].layers)
        x, ops = _random(300, 32, seed=5), get_ops(backend)
        chosen = torch.stack(
            [torch.arange(300) % 4, torch.full((300,), 4)], 1
        )  # one expert has all rows
        gates = torch.full((300, 2), 0.5)
        for compute in (through_experts, _one_by_one):
            for parameter in model.parameters():
                parameter.grad = None
            given = x.clone().requires_grad_()
            compute(given, gates, chosen, layer, ops).sum().backward()  # type: ignore[arg-type]
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters().items() if p.grad is not None
            }
            found.append(gradients)
    for own, other in (found[:2], found[2:]):
        assert own.keys() == other.keys()
        assert len(own) == 10
        assert all(torch.equal(own[name], other[name]) for name in own)
    assert not any(torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_the_forward_does_not_change_and_the_table_says_it() -> None:
    rows = []
    for preset in ("fp8-e2e", "fp8-e2e[wgrad_activation=requantized]"):
        model = tiny_model(preset)
        transformer: Transformer = model.transformer
        rows.append(
            transformer.hidden(torch.arange(3, 17), Layout.packed([14]), use="learner").detach()
        )
        assert ("fp8, activations own-copy" in model.precision.table()) == (preset == "fp8-e2e")
    assert torch.equal(*rows)
    assert {name for name, preset in PRESETS.items() if preset.wgrad_activation == "own-copy"} == {
        "fp8-e2e"
    }


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp8[wgrad=bf16, wgrad_activation=own-copy]", "set wgrad: fp8"),
        ("bf16[wgrad_activation=own-copy]", "whose backward is not quantized"),
        ("fp8[wgrad_activation=twice]", "expected requantized or own-copy"),
    ],
)
def test_what_cannot_work_is_refused(precision: str, message: str) -> None:
    with pytest.raises(IsobitError, match=message):
        precision_from(precision)

"""Rows through experts: the bits of every expert's own MLP, one storage for their weights, no size
asked for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.kernels import Activation, Operand, Stacked, get_ops, tensors_of
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.experts.definition import by_expert
from isobit.kernels.experts.triton import grouped
from isobit.kernels.triton.launch import record_launches
from isobit.model import Experts, Model
from isobit.model.forward import experts
from isobit.model.forward.autograd import Vector, Weight
from isobit.model.forward.experts import through_experts
from isobit.model.weights.layout import Mixture, map_parts
from isobit.precision import QTensor, QuantSpec

from .helpers import random_model

WIDTH = 144


def layer_of(model: Model, use: str = "learner") -> Mixture:
    layer = model.transformer._working[use].layers[0].mlp
    assert isinstance(layer, Mixture)
    return layer


def rows(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x [T, H], gates [T, 3], experts [T, 3] of six, the fifth never, a gradient of the
    results)."""
    random = torch.Generator().manual_seed(count)
    scores = torch.rand(count, 6, generator=random)
    scores[:, 4] = -1
    x, dy = (torch.randn(count, WIDTH, generator=random).bfloat16() for _ in range(2))
    best = scores.sort(1, descending=True)
    return x, best.values[:, :3], best.indices[:, :3], dy


def gradients(model: Model) -> list[Tensor | None]:
    found = [
        parameter.grad
        for name, parameter in model.named_parameters().items()
        if ".0.experts." in name
    ]
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    ("preset", "family"),
    [
        *((preset, "qwen3_moe") for preset in ("bf16", "fp8", "fp8-unified", "mxfp8")),
        ("bf16", "gpt_oss"),
        ("fp8", "gpt_oss"),
    ],
)
def test_grouped_is_one_expert_after_the_other_bit_for_bit(
    preset: str, family: str, backend: str
) -> None:
    """Those of gpt-oss have biases."""
    model = random_model(preset, backend, family, experts=Experts(6, 3, 40))
    layer, ops = layer_of(model), model.transformer.ops["learner"]
    given, weights, chosen, dy = rows(23)
    found = []
    for compute in (through_experts, experts._one_by_one):
        x, gates = given.clone().requires_grad_(), weights.clone().requires_grad_()
        results = compute(x, gates, chosen, layer, ops)
        results.backward(dy)
        assert x.grad is not None
        assert gates.grad is not None
        found.append(((results.detach(), x.grad, gates.grad), gradients(model)))
    (grouped_ones, own), (one_by_one, others) = found
    assert all(torch.equal(first, second) for first, second in zip(grouped_ones, one_by_one))
    results = grouped_ones[0]
    each = len(own) // 6
    assert each == (4 if family == "gpt_oss" else 2)
    assert [g is None for g in own] == [
        name // each == 4 for name in range(6 * each)
    ]  # gate_up and down of the fifth
    assert all((g is None and o is None) or torch.equal(g, o) for g, o in zip(own, others))
    with torch.no_grad():
        assert torch.equal(through_experts(given, weights, chosen, layer, ops), results)
        assert not torch.equal(
            through_experts(given, weights, chosen.roll(1, 0), layer, ops), results
        )  # the control


def test_rows_that_share_scales_go_to_each_expert_alone() -> None:
    model = random_model("fp8", "reference", "qwen3_moe")
    shared = QuantSpec(granularity="tensor", scale="fp32")
    layer = map_parts(layer_of(model), lambda part: _with_activation(part, shared))
    x, _, chosen, _ = rows(9)
    only = torch.tensor([1.0, 0.0, 0.0]).expand(9, 3)  # the sum is the first expert's result
    with torch.no_grad():
        found = through_experts(x, only, chosen, layer, model.transformer.ops["learner"])
        _, place, offsets = by_expert(chosen, 6)
        first = place.flatten().argsort()[: int(offsets[1])]  # the choices of the first expert
        alone = experts.mlp(x[first // 3], layer.experts[0], model.transformer.ops["learner"])
        apart = experts.mlp(x[first[:1] // 3], layer.experts[0], model.transformer.ops["learner"])
    mine = first % 3 == 0
    assert int(mine.sum()) > 0
    assert torch.equal(found[first[mine] // 3], alone[mine])
    assert not torch.equal(apart, alone[:1])  # the control: they do share scales


def _with_activation(part: Weight | Vector, spec: QuantSpec) -> Weight | Vector:
    return replace(part, activation=spec) if isinstance(part, Weight) else part


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-e2e"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_experts_weight_is_a_view_of_one_storage(family: str, preset: str) -> None:
    """Made, received by a second engine, and frozen; biases too."""
    model = random_model(preset, "reference", family, experts=Experts(6, 3, 40))
    layers = [layer_of(model), layer_of(model, "rollout")]
    assert (layers[0] is layers[1]) == model.precision.shared
    model.transformer.freeze()
    for layer in (*layers, layer_of(model)):
        for stacked, role in ((layer.gate_up, "gate_up"), (layer.down, "down")):
            for index, expert in enumerate(layer.experts):
                working = getattr(expert, role).working
                assert working is stacked.experts[index]
                codes = tensors_of(working)[0]
                assert codes.data_ptr() == stacked.data[index].data_ptr()
                assert codes.untyped_storage().nbytes() == 6 * codes.numel() * codes.element_size()
                bias = getattr(expert, role).bias
                assert (bias is None) == (stacked.bias is None) == (family == "qwen3_moe")
                if bias is not None and stacked.bias is not None:
                    assert bias.data_ptr() == stacked.bias[index].data_ptr()
                    assert bool(bias.any())
    assert layer_of(model).gate_up.data.data_ptr() == layers[0].gate_up.data.data_ptr()


def test_a_stack_is_its_matrices_and_so_is_its_transpose() -> None:
    ops, spec = get_ops("reference"), QuantSpec(granularity="128x128")
    matrices = [
        ops.quantize(torch.randn(200, 144, generator=torch.Generator().manual_seed(e)), spec)
        for e in range(3)
    ]
    stacked = Stacked.of(matrices, 3)
    assert stacked.shape == (3, 200, 144)
    for found, transposed, matrix in zip(stacked.experts, stacked.transpose().experts, matrices):
        assert isinstance(found, QTensor)
        assert isinstance(transposed, QTensor)
        assert torch.equal(found.dequantize(), matrix.dequantize())
        assert torch.equal(transposed.dequantize(), matrix.transpose().dequantize())
    first, second = (tensors_of(expert)[0].float() for expert in stacked.experts[:2])
    assert not torch.equal(first, second)


def test_choices_are_sorted_by_expert_then_by_row() -> None:
    token, place, offsets = by_expert(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    assert place.tolist() == [[2, 0], [1, 4], [3, 5]]
    assert token.tolist() == [0, 1, 0, 2, 1, 2]
    assert offsets.tolist() == [0, 2, 2, 4, 6, 6]


class _Nothing(ReferenceOps):
    """Triton's grouped products over tensors without values; what surrounds them has shapes
    only."""

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        return QTensor(
            torch.empty_like(x, dtype=spec.format.dtype), x.new_empty(x.shape[0], 2), spec
        )

    def gate_mul_quantized(
        self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> QTensor:
        return self.quantize(gate_up[:, : gate_up.shape[1] // 2], spec, name)

    def grouped_product(
        self,
        a: Operand,
        weights: Stacked,
        offsets: Tensor,
        out: torch.dtype,
        rows: Tensor | None = None,
    ) -> Tensor:
        return grouped.grouped_product(a, weights, offsets, out, rows)


def test_the_forward_asks_for_no_value() -> None:
    """On the meta device there are none: whatever would wait for a GPU raises. Two products by one
    schedule."""
    model = random_model("fp8", "reference", "qwen3_moe")
    layer = layer_of(model)
    gate_up, down = (
        Stacked(s.data.to("meta"), None if s.scale is None else s.scale.to("meta"), s.spec)
        for s in _stacks(layer)
    )
    layer = Mixture(layer.router, layer.experts, gate_up, down, layer.per_token, layer.normalize)
    x, gates, chosen, _ = (t.to("meta") for t in rows(50))
    with torch.no_grad(), record_launches() as found:
        results = through_experts(x, gates, chosen, layer, _Nothing())
        assert results.shape == (50, WIDTH)
        with pytest.raises(
            RuntimeError, match="meta"
        ):  # the control: the loop over experts does ask
            experts._one_by_one(x, gates, chosen, layer, _Nothing())
    assert [launch.kernel.__name__ for launch in found] == [
        "schedule",
        "block_product",
        "block_product",
    ]


def _stacks(layer: Mixture) -> tuple[Stacked, Stacked]:
    return layer.gate_up, layer.down

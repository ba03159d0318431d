"""Adapters of experts: their arithmetic and gradients, and bits that depend on a row and its expert
alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import plain, tensors_of
from isobit.model import Experts, Model
from isobit.model.adapters.targets import NewAdapter
from isobit.model.forward import experts
from isobit.model.forward.experts import through_experts
from isobit.model.weights.layout import Mixture
from isobit.model.weights.stored import Weight
from tests.models import level, require, slow_where, tensor, tiny_model
from tests.rl.stepwise_helpers import digest, learner, train

COUNT, RANK, WIDTH, INNER = 6, 4, 32, 24
EXPERTS = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "base"
    tiny_model("bf16", "qwen3_moe", scale=4, experts=Experts(COUNT, 2, INNER)).save(folder)
    return folder


def adapted(
    base: Path, precision: str = "bf16", backend: str = "native", targets: list[str] = EXPERTS
) -> Model:
    """With B other than zero, as after an update."""
    require(backend)
    given = NewAdapter(RANK, 8, targets)
    model = Model.load(base, precision, backend, level(backend), adapter=given)
    for number, (name, parameter) in enumerate(model.named_parameters().items()):
        if name.endswith("lora_B"):
            random = torch.Generator().manual_seed(number)
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    model.sync()
    return model


def layer_of(model: Model, use: str = "learner") -> Mixture:
    layer = model.transformer._working[use].layers[0].mlp
    assert isinstance(layer, Mixture)
    return layer


def rows(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, gates, experts of six, the fifth never, a gradient of the results), of `count` rows."""
    random = torch.Generator().manual_seed(count)
    scores = torch.rand(count, COUNT, generator=random)
    scores[:, 4] = -1
    x, dy = (torch.randn(count, WIDTH, generator=random).to(dtype) for _ in range(2))
    best = scores.sort(1, descending=True)
    return x, best.values[:, :2], best.indices[:, :2], dy


def _gradients(model: Model) -> dict[str, Tensor]:
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters().items()
        if parameter.grad is not None
    }
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _effective(weight: Weight, leaves: dict[str, Tensor]) -> Tensor:
    """W + scale · B·A, in float64, of an expert's weight and of leaves for its factors."""
    whole = plain(weight.working, torch.float32).double()
    parts = list(whole.split(1))
    for one in weight.adapters:
        a, b = (
            leaves.setdefault(f.name, tensor(f.working).double().requires_grad_())
            for f in (one.a, one.b)
        )
        parts[one.lo : one.hi] = [
            old + new for old, new in zip(parts[one.lo : one.hi], (one.scale * (b @ a)).split(1))
        ]
    return torch.cat(parts)


@pytest.mark.parametrize("targets", [EXPERTS, ["gate_proj", "up_proj"], ["down_proj"]])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_gradients_are_those_of_the_formula(
    base: Path, backend: str, again: bool, targets: list[str]
) -> None:
    """In float32 against autograd in float64. The control: experts with each other's factors."""
    model = adapted(base, "float32", backend, targets)
    layer, ops = layer_of(model), model.transformer.ops["learner"]
    given, weights, chosen, dy = rows(23, torch.float32)
    x, gates = given.clone().requires_grad_(), weights.clone().requires_grad_()
    y = through_experts(x, gates, chosen, layer, ops, again)
    y.backward(dy)
    found, leaves = _gradients(model), dict[str, Tensor]()
    wide, wide_gates = given.double().requires_grad_(), weights.double().requires_grad_()
    parts = []
    for row, own in zip(wide, chosen.tolist()):
        each = []
        for number in own:
            expert = layer.experts[number]
            gate, up = (_effective(expert.gate_up, leaves) @ row).split(INNER)
            down = _effective(expert.down, leaves)
            each.append(down @ (torch.nn.functional.silu(gate) * up))
        parts.append(torch.stack(each))
    wanted = (wide_gates.unsqueeze(2) * torch.stack(parts)).sum(1)
    wanted.backward(dy.double())
    torch.testing.assert_close(y.detach().double(), wanted.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tensor(x.grad).double(), tensor(wide.grad), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        tensor(gates.grad).double(), tensor(wide_gates.grad), rtol=1e-4, atol=1e-4
    )
    assert found.keys() == {name for name in leaves if ".experts.4." not in name}
    assert len(found) == 5 * 2 * len(targets)
    for name, gradient in found.items():
        right = tensor(leaves[name].grad)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), right, rtol=1e-4, atol=1e-5)
        if ".experts.0." in name:
            other = tensor(leaves[name.replace(".experts.0.", ".experts.1.")].grad)
            assert not torch.allclose(gradient.double(), other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("backend", "precision"),
    slow_where(
        [
            (backend, precision)
            for backend in ("reference", "native", "triton")
            for precision in ("bf16", "fp8", "mxfp8")
            if (backend, precision) != ("triton", "mxfp8")
        ],
        lambda backend, _: backend == "triton",
    ),
)
def test_the_bits_of_a_row_are_its_own(base: Path, backend: str, precision: str) -> None:
    """However many rows there are, and in whatever order; and, but for Triton, whose grouped
    products are kernels of their own, those of each expert's MLP with its adapters over its rows
    alone. The controls: rows that are routed elsewhere, and experts with each other's factors."""
    model = adapted(base, precision, backend)
    layer, ops = layer_of(model), model.transformer.ops["learner"]
    x, gates, chosen, _ = rows(23, torch.bfloat16)
    with torch.no_grad():
        whole = through_experts(x, gates, chosen, layer, ops)
        for count in (1, 2, 9):
            part = through_experts(x[:count], gates[:count], chosen[:count], layer, ops)
            assert torch.equal(part, whole[:count])
        order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
        assert torch.equal(
            through_experts(x[order], gates[order], chosen[order], layer, ops), whole[order]
        )
        if backend != "triton":
            assert torch.equal(experts._one_by_one(x, gates, chosen, layer, ops), whole)
        moved = through_experts(x, gates, chosen.roll(1, 0), layer, ops)
        assert not torch.equal(moved, whole)
        factors = layer.up_factors[0].b.data
        factors.copy_(factors.roll(1, 0))
        for expert in layer.experts:
            prepared = expert.gate_up.adapters[0].b.prepared
            if not isinstance(prepared, Tensor):
                ops.prepare(expert.gate_up.adapters[0].b.working, prepared)
        assert not torch.equal(through_experts(x, gates, chosen, layer, ops), whole)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-e2e"])
def test_factors_are_views_of_one_storage(base: Path, precision: str) -> None:
    """Of a model that is loaded with the adapter, of one more over it, and with the adapter switched
    off; uses share it where they share the model's weights."""
    model = adapted(base, precision)
    other = model.adapted(NewAdapter(2, 4, EXPERTS, seed=3))
    for found, rank in ((model, RANK), (other, 2)):
        layers = [layer_of(found), layer_of(found, "rollout")]
        for layer in layers:
            assert len(layer.up_factors) == 2
            assert len(layer.down_factors) == 1
            for one, expert in ((layer.up_factors[1], "gate_up"), (layer.down_factors[0], "down")):
                assert one.a.data.shape[:2] == (COUNT, rank)
                for index, own in enumerate(layer.experts):
                    low_rank = getattr(own, expert).adapters[-1]
                    for stacked, factor in ((one.a, low_rank.a), (one.b, low_rank.b)):
                        working = tensors_of(factor.working)[0]
                        assert working.data_ptr() == stacked.data[index].data_ptr()
        same = layers[0].up_factors[0].a.data is layers[1].up_factors[0].a.data
        assert same == found.precision.shared
    assert layer_of(other).gate_up.data.data_ptr() == layer_of(model).gate_up.data.data_ptr()
    assert layer_of(model.without_adapter()).up_factors == ()


def test_some_experts_of_a_layer_are_refused(base: Path, tmp_path: Path) -> None:
    adapted(base).save(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    Model.load(base, "bf16", adapter=tmp_path / "adapter")  # the control
    tensors = load_file(path)
    left = {name: t for name, t in tensors.items() if ".layers.1.mlp.experts.3.up_" not in name}
    assert len(left) == len(tensors) - 2
    save_file(left, path)
    with pytest.raises(IsobitError, match=r"5 of 6 experts have factors of layers\.1\.experts\.up"):
        Model.load(base, "bf16", adapter=tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_was_trained_is_saved_and_served(tmp_path: Path, family: str) -> None:
    """A learner that goes on from the folder has the bits of one that never stopped, what is served
    those of the learner, and the base keeps its own. The controls: without the optimizer's state,
    and the base."""
    tiny_model("bf16", family, scale=4).save(tmp_path / "base")
    frozen = Model.load(tmp_path / "base", "fp8", "native", adapter=NewAdapter(1, 1.0, ()))
    storage = digest(frozen.transformer.learner_storage())
    given = NewAdapter(2, 32.0)
    ours = learner(frozen, given)
    train(ours, range(1))
    ours.save(tmp_path / "saved", optimizer=True)
    unbroken = train(ours, range(1, 2))
    for optimizer in (True, False):
        again = learner(frozen, NewAdapter(2, 32.0, seed=9))
        again.load(tmp_path / "saved", optimizer=optimizer)
        assert (train(again, range(1, 2)) == unbroken) == optimizer
    serving = frozen.serving({"first": tmp_path / "saved"})
    serving.add_adapter("now", ours.adapter())
    ids = [[1, 2, 3, 4, 5, 6]]
    wanted = ours.model.logprobs(ids)[0]
    assert torch.equal(serving.logprobs(ids, adapter="now")[0], wanted)
    assert not torch.equal(serving.logprobs(ids, adapter="first")[0], wanted)
    assert not torch.equal(frozen.logprobs(ids)[0], wanted)
    assert digest(frozen.transformer.learner_storage()) == storage

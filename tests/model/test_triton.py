"""A model under the Triton kernels beside the same model under the reference operators: values and
gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from isobit import Model
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.model import Experts
from isobit.model.adapters.targets import NewAdapter
from isobit.precision import PackedFP4
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from tests.models import tiny_model
from tests.rl.helpers import roll_out

_LENGTHS = (7, 5)


def _model(backend: str, precision: str, family: str = "qwen3") -> Model:
    chosen = {"family": family, **({} if family == "qwen3" else {"experts": Experts(4, 2, 32)})}
    return tiny_model(precision, backend=backend, scale=6, num_layers=1, head_dim=16, **chosen)


def _learned(model: Model, count: int = sum(_LENGTHS)) -> tuple[Tensor, dict[str, Tensor]]:
    """(log-probabilities, gradients) of a weighted sum of the first `count` of them, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    rows, size = sum(_LENGTHS), model.config.vocab_size
    tokens, targets = (torch.randint(0, size, (rows,), generator=generator) for _ in range(2))
    weights = torch.randn(rows, generator=generator) * (torch.arange(rows) < count)
    hidden = model.transformer.hidden(tokens, Layout.packed(_LENGTHS))
    logprobs = model.transformer.head_logprobs(hidden, targets.to(hidden.device))[0].cpu()
    (logprobs * weights).sum().backward()
    gradients = {
        name: p.grad.cpu() for name, p in model.named_parameters().items() if p.grad is not None
    }
    return logprobs.detach(), gradients


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_values_and_gradients_are_the_references(precision: str, family: str) -> None:
    """Float32 sums change roundings, and roundings change codes: so two backends differ as two
    roundings of one flow do. Every gradient is within 2.5 times the distance that the flow itself
    has from float32."""
    wanted, wanted_gradients = _learned(_model("reference", precision, family))
    exact, exact_gradients = _learned(_model("reference", "float32", family))
    found, gradients = _learned(_model("triton", precision, family))
    assert _distance(found, wanted) <= 2.5 * _distance(wanted, exact)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        noise = _distance(wanted_gradients[name], exact_gradients[name])
        assert _distance(gradient, wanted_gradients[name]) <= 2.5 * noise, name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "nvfp4[activation=bf16]"])
def test_an_adapter_by_the_kernels(tmp_path: Path, precision: str) -> None:
    """With B = 0 the model's bits; after an update a row's bits do not depend on its batch, rollout
    and learner have the same, and values are the reference's. The control is the model alone. In
    NVFP4 the frozen base has two codes to a byte, and the model alone one."""
    _model("reference", "fp8").save(tmp_path)
    ids = torch.arange(3, 9)

    def hidden(model: Model, rows: int = 6) -> Tensor:
        with torch.no_grad():
            layout = Layout.packed([2, 4] if rows == 6 else [2])
            return model.transformer.hidden(ids[:rows], layout).cpu().float()

    bare = hidden(Model.load(tmp_path, precision, "triton"))
    models = [
        Model.load(tmp_path, precision, backend, adapter=NewAdapter(4, 8))
        for backend in ("triton", "native")
    ]
    for weight in models[0].transformer.rollout_weights():
        frozen = "lora" not in weight.name and precision != "fp8"
        assert isinstance(weight.working, PackedFP4) == frozen
    assert torch.equal(hidden(models[0]), bare)
    for model in models:
        for number, (name, parameter) in enumerate(model.named_parameters().items()):
            if name.endswith("lora_B"):
                values = 0.2 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(number)
                )
                parameter.data.copy_(values)
        model.sync()
    found, wanted = map(hidden, models)
    assert torch.equal(hidden(models[0], 2), found[:2])
    assert _distance(found, wanted) < 0.1 * _distance(bare, wanted)
    samples = roll_out(models[0], length=2, sampling=Sampling(n=1, max_new_tokens=2, seed=3))
    rolled = torch.tensor([x for s in samples for x in s.rollout_logprobs])
    with torch.no_grad():
        assert torch.equal(
            forward(models[0], pack(samples), 1.0)[0].cpu().view(torch.int32),
            rolled.view(torch.int32),
        )


@pytest.mark.slow
def test_several_adapters_by_the_kernels(tmp_path: Path) -> None:
    """Rows of two adapters and of the base alone have the bits that they have alone. The control:
    the other one's."""
    _model("reference", "fp8").save(tmp_path / "base")
    given = {"a": NewAdapter(4, 8), "b": NewAdapter(2, 8, ["q_proj", "down_proj"])}
    for name, new in given.items():
        model = Model.load(tmp_path / "base", "fp8", "native", adapter=new)
        for number, parameter in enumerate(model.parameters()):
            parameter.data.copy_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            )
        model.save(tmp_path / name)
    base = Model.load(tmp_path / "base", "fp8", "triton")
    models = [
        Model.load(tmp_path / "base", "fp8", "triton", adapter=tmp_path / name) for name in given
    ]
    ids = torch.arange(3, 9)
    layout = Layout.packed([2, 2, 2])
    numbers = np.array([1, 1, -1, -1, 0, 0])
    with torch.no_grad():
        served = base.serving({name: tmp_path / name for name in given}).transformer
        assert served.served is not None
        assigned = served.served.assignment(numbers)
        found = served.hidden(ids, layout, use="rollout", adapters=assigned)
        first, second, bare = (
            m.transformer.hidden(ids, layout, use="rollout") for m in (*models, base)
        )
    assert torch.equal(found, torch.cat((second[:2], bare[2:4], first[4:])))
    assert not torch.equal(found[:2], first[:2])
    assert not torch.equal(found[:2], bare[:2])


def test_a_wrong_gradient_would_be_found() -> None:
    """The control: without its last four tokens a gradient is further off than the noise of the
    flow."""
    _, wanted = _learned(_model("reference", "fp8"))
    _, exact = _learned(_model("reference", "float32"))
    _, shorter = _learned(_model("reference", "fp8"), count=sum(_LENGTHS) - 4)
    assert all(
        _distance(shorter[n], wanted[n]) > 2.5 * _distance(wanted[n], exact[n]) for n in wanted
    )


@pytest.mark.slow
def test_truncated_rollout_and_learner_have_the_same_bits() -> None:
    """The head is not fused then, on either side. The controls: the fused head, and another
    top-p."""
    model = _model("triton", "fp8")
    asked = Sampling(n=1, max_new_tokens=2, temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, seed=3)
    samples = roll_out(model, length=2, sampling=asked)
    rolled = torch.tensor([x for s in samples for x in s.rollout_logprobs])
    with torch.no_grad():
        own, fused, other = (
            forward(model, pack(samples), 0.7, given)[0]
            for given in (asked.filtering, None, (9, 0.85, 0.01, 1.0))
        )
        shared = forward(model, pack(samples, share_prompts=True), 0.7, asked.filtering)[0]
    assert torch.equal(own.view(torch.int32), rolled.view(torch.int32))
    assert torch.equal(shared, own)
    assert not torch.equal(fused, rolled)
    assert not torch.equal(other, rolled)


def test_flows_without_kernels_are_refused() -> None:
    for precision, what in (
        ("mxfp8", "weights in e4m3 1x32"),
        ("nvfp4", r"weights in e2m1 1x16.* precision: nvfp4\[activation=bf16\]"),
        ("bf16[kv_cache=int8, query=e4m3-calibrated]", "queries in e4m3 tensor"),
        ("bf16[rollout={probabilities: e4m3}]", "probabilities in e4m3"),
    ):
        with pytest.raises(
            IsobitError, match=f"backend: triton has no kernel for {what}.*use backend: native"
        ):
            _model("triton", precision)

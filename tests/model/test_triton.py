"""A model under the Triton kernels beside the same model under the reference operators: values and gradients."""

import pytest
import torch
from torch import Tensor

from isobit import Model
from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.model import Experts
from tests.models import tiny_model

_LENGTHS = (7, 5)


def _model(backend: str, precision: str, experts: bool = False) -> Model:
    chosen = {"family": "qwen3_moe", "experts": Experts(4, 2, 32)} if experts else {}
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
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters().items() if p.grad is not None}
    return logprobs.detach(), gradients


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_values_and_gradients_are_the_references(precision: str, experts: bool) -> None:
    """Float32 sums change roundings, and roundings change codes: so two backends differ as two roundings of one flow
    do. Every gradient is within 2.5 times the distance that the flow itself has from float32."""
    wanted, wanted_gradients = _learned(_model("reference", precision, experts))
    exact, exact_gradients = _learned(_model("reference", "float32", experts))
    found, gradients = _learned(_model("triton", precision, experts))
    assert _distance(found, wanted) <= 2.5 * _distance(wanted, exact)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        noise = _distance(wanted_gradients[name], exact_gradients[name])
        assert _distance(gradient, wanted_gradients[name]) <= 2.5 * noise, name


def test_a_wrong_gradient_would_be_found() -> None:
    """The control: without its last four tokens a gradient is further off than the noise of the flow."""
    _, wanted = _learned(_model("reference", "fp8"))
    _, exact = _learned(_model("reference", "float32"))
    _, shorter = _learned(_model("reference", "fp8"), count=sum(_LENGTHS) - 4)
    assert all(_distance(shorter[n], wanted[n]) > 2.5 * _distance(wanted[n], exact[n]) for n in wanted)


def test_flows_without_kernels_are_refused() -> None:
    for precision, what in (("mxfp8", "weights in e4m3 1x32"), ("nvfp4", "weights in e2m1 1x16")):
        with pytest.raises(IsobitError, match=f"backend: triton has no kernel for {what}.*use backend: native"):
            _model("triton", precision)

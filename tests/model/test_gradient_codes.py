"""An MLP's gradient that goes from the gate's backward to the product before it as codes: the
gradients of all weights have the bits of a model that writes it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels import Layout
from isobit.model import Model
from isobit.model.forward import autograd
from isobit.precision import QTensor
from tests.models import tiny_model

OPERATOR = "gate_mul_backward_quantized"


def _gradients(model: Model, recompute: Any = False) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    ids = torch.arange(45) * 7 % model.config.vocab_size
    hidden = model.transformer.hidden(ids, Layout.packed([9, 1, 35]), recompute=recompute)
    model.transformer.head_logprobs(hidden, ids.roll(1))[0].sum().backward()
    return {n: p.grad for n, p in model.named_parameters().items() if p.grad is not None}


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def _counted(model: Model, monkeypatch: pytest.MonkeyPatch, changed: bool = False) -> list[str]:
    """The names under which gradients are quantized by the gate's backward; `changed`: one code of
    each is another."""
    names: list[str] = []
    own = getattr(type(model.ops), OPERATOR)

    def call(ops: object, *given: Any) -> tuple[QTensor, QTensor]:
        names.append(given[-1])
        found: tuple[QTensor, QTensor] = own(ops, *given)
        if changed:
            found[0].data.view(torch.uint8).view(-1)[1] ^= 0x10
        return found

    monkeypatch.setattr(type(model.ops), OPERATOR, call)
    return names


@pytest.mark.parametrize("flow", ["fp8", "fp8-unified", "mxfp8", "fp8-e2e"])
def test_gradients_are_those_of_a_gradient_that_is_written(
    flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer once, however much is computed again. The control: one code is another."""
    model = tiny_model(flow, "qwen3", hidden_size=144, intermediate_size=208, scale=5.0)
    with monkeypatch.context() as patch:
        patch.setattr(autograd, "codes_wanted", lambda *_: None)
        written = _counted(model, patch)
        wanted = _gradients(model)
        assert written == []
    for recompute in (False, "mlp", True):
        with monkeypatch.context() as patch:
            names = _counted(model, patch)
            assert _same(_gradients(model, recompute), wanted)
            last = range(model.config.num_layers)[::-1]
            assert names == [f"output gradient of layers.{i}.gate_up" for i in last]
    with monkeypatch.context() as patch:
        _counted(model, patch, changed=True)
        assert not _same(_gradients(model), wanted)


@pytest.mark.parametrize("flow", ["bf16", "fp8[dgrad=bf16]", "fp8[wgrad=bf16]"])
def test_a_gradient_that_a_product_takes_as_it_is_is_written(
    flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(flow, "qwen3")
    names = _counted(model, monkeypatch)
    assert _gradients(model)
    assert names == []


def test_frozen_weights_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient of the weight there is one product, which takes the gradient along its
    columns alone."""
    model = tiny_model("fp8", "qwen3")
    masters = model.named_parameters()
    for name, master in masters.items():
        master.requires_grad_("gate_up" not in name)
    names = _counted(model, monkeypatch)
    found = _gradients(model)
    assert names == []
    assert not any("gate_up" in name for name in found)
    assert any("qkv" in name for name in found)

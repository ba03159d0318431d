"""The weight sync of separate engines: a copy of its own, counted, and a broken one is never
used."""

import pytest
import torch

from isobit.errors import RunFailed
from isobit.kernels import Operand, plain
from isobit.model import Model
from isobit.model.weights.sync import Receiver, poison
from isobit.precision import QTensor
from tests.models import tiny_model

SEPARATE = [
    "bf16[engines=separate]",
    "fp8-rollout",
    "fp8-rollout-kv",
    "fp8-e2e",
    "fp8[engines=separate]",
]


def _copies(model: Model) -> dict[str, Operand]:
    return {name: operand for name, operand, _ in model.transformer._working["rollout"].tensors()}


def _bits(operand: Operand) -> list[torch.Tensor]:
    if isinstance(operand, QTensor):
        return [operand.data.view(torch.uint8).clone(), operand.scale.clone()]
    return [operand.clone()]


@pytest.mark.parametrize("preset", SEPARATE)
def test_the_rollout_has_a_copy_of_its_own_in_lasting_storage(preset: str) -> None:
    model = tiny_model(preset)
    transformer = model.transformer
    learner = {id(operand) for _, operand, _ in transformer._working["learner"].tensors()}
    before = _copies(model)
    assert not learner & {id(operand) for operand in before.values()}
    assert transformer.sync_bytes == transformer.working_bytes()[0] > 0
    bits = {name: _bits(operand) for name, operand in before.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.sync(rollout=False)
    assert all(
        torch.equal(a, b)
        for name, operand in _copies(model).items()
        for a, b in zip(_bits(operand), bits[name])
    )
    model.sync()
    after = _copies(model)
    assert all(after[name] is before[name] for name in before)
    assert all(any(not torch.equal(a, b) for a, b in zip(_bits(after[n]), bits[n])) for n in before)


def test_shared_engines_send_nothing() -> None:
    assert tiny_model("fp8").transformer.sync_bytes == 0


@pytest.mark.parametrize("preset", SEPARATE)
@pytest.mark.parametrize("name", ["layers.1.down", "layers.0.q_norm", "embed"])
def test_a_tensor_that_was_not_written_stops_the_run(
    preset: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(preset)
    written = Receiver.transfer
    target = _copies(model)[name]
    monkeypatch.setattr(
        Receiver,
        "transfer",
        lambda self, buffer, source: buffer is target or written(self, buffer, source),
    )
    with pytest.raises(RunFailed, match=rf"{name} arrived broken"):
        model.sync()


def test_stale_and_rescaled_tensors_are_broken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("fp8-rollout")
    target = _copies(model)["layers.0.qkv"]
    assert isinstance(target, QTensor)
    written = Receiver.transfer

    def doubled(self: Receiver, buffer: Operand, source: Operand) -> None:
        written(self, buffer, source)
        if buffer is target:
            target.scale.mul_(2)

    monkeypatch.setattr(Receiver, "transfer", doubled)
    with pytest.raises(RunFailed, match="relative error"):
        model.sync()


def test_control_a_healthy_sync_has_the_error_of_its_format() -> None:
    model = tiny_model("fp8-rollout")
    for name, operand, master in model.transformer._working["rollout"].tensors():
        stored = plain(operand, torch.float32).float()
        error = float((stored - master.detach()).norm() / master.detach().norm().clamp(min=1e-30))
        assert error < (0.04 if isinstance(operand, QTensor) else 2**-8), name


def test_poison_is_nan_in_every_format() -> None:
    for operand in _copies(tiny_model("fp8-rollout")).values():
        poison(operand)
        values = operand.dequantize() if isinstance(operand, QTensor) else operand.float()
        assert bool(values.isnan().all())

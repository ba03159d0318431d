"""What notices a bit that flips in memory, and what does not: docs/contract.md says so, row by row."""

import pytest
import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels import KVStore, Layout
from isobit.model import Model
from isobit.precision.quantize import QTensor
from isobit.rl.agreement import Disagreement
from tests.models import tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out

SIGN = 0x80  # of an E4M3 code


def flip_a_working_weight(model: Model) -> None:
    """In a third of the codes of a matrix, so that it is seen on few tokens too."""
    weights = (tensor for _, tensor, _ in model.transformer._working["learner"].tensors())
    codes = next(weight.data for weight in weights if isinstance(weight, QTensor))
    codes.view(torch.uint8).view(-1)[::3] ^= SIGN


@pytest.fixture
def model() -> Model:
    return tiny_model("fp8", backend="reference")


def test_between_rollout_and_learner_the_learner_notices(model: Model) -> None:
    samples = roll_out(model)
    flip_a_working_weight(model)
    with pytest.raises(Disagreement):
        make_learner(model, on_mismatch="stop").learn(samples, alternating(samples), 0)


def test_in_keys_and_values_the_learner_notices(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = type(model.ops)
    write = operators.kv_write

    def flipping(self: object, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        write(self, store, k, v, layout)  # type: ignore[arg-type]
        assert store.k.dtype == torch.uint8
        store.k[1::4] ^= SIGN

    monkeypatch.setattr(operators, "kv_write", flipping)
    samples = roll_out(model)
    monkeypatch.undo()
    with pytest.raises(Disagreement):
        make_learner(model, on_mismatch="stop").learn(samples, alternating(samples), 0)


def test_before_both_nobody_notices_and_the_next_sync_heals(model: Model) -> None:
    whole = roll_out(model)
    flip_a_working_weight(model)
    flipped = roll_out(model)
    assert [s.rollout_logprobs for s in flipped] != [s.rollout_logprobs for s in whole]
    found = make_learner(model, rate=1e-30, on_mismatch="stop").learn(flipped, alternating(flipped), 0)
    assert found.metrics["mismatch/differing_tokens"] == 0
    model.sync()
    assert [s.rollout_logprobs for s in roll_out(model)] == [s.rollout_logprobs for s in whole]


def test_in_a_master_nobody_notices_unless_it_is_no_number(model: Model) -> None:
    matrix = next(p for name, p in model.named_parameters().items() if "layers.0" in name and p.ndim == 2)
    bits = matrix.detach().view(torch.int32).view(-1)
    bits[0] ^= 1 << 20
    model.sync()
    samples = roll_out(model)
    assert (
        make_learner(model, on_mismatch="stop")
        .learn(samples, alternating(samples), 0)
        .metrics["mismatch/differing_tokens"]
        == 0
    )
    bits[0] |= 0x7F800000
    with pytest.raises(NonFiniteError):
        model.sync()

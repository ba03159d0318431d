"""Adapters that train side by side over one frozen model: nothing of it is copied, and training one
changes no bit of another, of what is served, or of the model."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from isobit.kernels import tensors_of
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.model.transformer import USES
from isobit.rl.stepwise import StepwiseLearner
from tests.models import tiny_model
from tests.rl.stepwise_helpers import (
    NEW,
    digest,
    frozen,
    learner,
    masters,
    sampled,
    saved_base,
    train,
)

FLOWS = ["fp8", "nvfp4", "bf16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_base(tmp_path_factory.mktemp("adapted") / "base")


def stored(model: Model, use: str) -> Mapping[int, int]:
    """The bytes of a use's working weights and packs, by address."""
    working = model.transformer._working[use]
    tensors = [t for _, operand, _ in working.tensors() for t in tensors_of(operand)]
    for packed in working.packs().values():
        tensors += [t for t in (packed.panels, packed.values) if t is not None]
    return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}


def factors(model: Model) -> int:
    """Bytes of an adapter's working factors."""
    return 2 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("precision", FLOWS)
def test_the_frozen_model_is_neither_copied_nor_made_again(
    folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control reads the model again."""
    base = frozen(folder, precision)
    quantize = type(base.ops).quantize
    calls: list[str] = []
    monkeypatch.setattr(
        type(base.ops), "quantize", lambda *a, **k: calls.append("") or quantize(*a, **k)
    )
    first, second = base.adapted(NEW), base.adapted(NewAdapter(3, 2, ["q_proj", "down_proj"]))
    for model in (first, second):
        assert model.transformer.working_bytes()[0] == base.memory()["rollout"] + factors(model)
        assert model.memory()["masters"] == 2 * factors(model)
        for use in USES:
            theirs, ours = stored(base, use), stored(model, use)
            assert theirs.items() <= ours.items()
    assert not calls
    for use in USES:
        assert stored(first, use).keys() & stored(second, use).keys() == stored(base, use).keys()
    again = Model.load(folder, precision, "native", adapter=NEW)
    assert not stored(base, "learner").keys() & stored(again, "learner").keys()
    assert (calls != []) == (precision != "bf16")


@pytest.mark.parametrize("precision", [*FLOWS, "fp8-rollout", "fp8-e2e"])
def test_it_computes_what_a_model_loaded_with_the_adapter_does(
    folder: Path, precision: str
) -> None:
    """Log-probabilities and the weights after training, bit for bit, also where a rollout has an
    engine of its own."""
    base = frozen(folder, precision)
    loaded = Model.load(folder, precision, "native", adapter=NEW)
    ours, theirs = learner(base), StepwiseLearner(loaded, micro_batch_tokens=16)
    assert digest(masters(ours)) == digest(masters(theirs))
    assert train(ours, range(2)) == train(theirs, range(2))
    ids = [[1, 2, 3, 4, 5, 6]]
    for use in USES:
        found = ours.model.logprobs(ids, use=use)[0]
        assert torch.equal(found, theirs.model.logprobs(ids, use=use)[0])
        assert not torch.equal(found, base.logprobs(ids, use=use)[0])


@pytest.mark.parametrize("precision", FLOWS)
def test_training_one_changes_no_bit_of_the_others(folder: Path, precision: str) -> None:
    """Nor of what is served. The control writes into the storage that all share."""
    base = frozen(folder, precision)
    serving = base.serving({})
    one, two = learner(base), learner(base, NewAdapter(4, 32.0, seed=9))
    train(two, range(1))
    serving.add_adapter("two", two.adapter())

    def others() -> tuple[object, ...]:
        drawn = [
            (completion.token_ids, completion.logprobs)
            for name in ("two", None)
            for completion in sampled(serving, name, 4)
        ]
        storage = base.transformer.learner_storage()
        own = two.model.transformer.learner_storage()
        return digest(storage), digest(own), digest(masters(two)), drawn

    before, start = others(), digest(masters(one))
    assert train(one, range(3)) != start
    assert others() == before
    shared = one.model.transformer.learner_storage()[0]
    assert shared.data_ptr() == base.transformer.learner_storage()[0].data_ptr()
    shared.view(torch.uint8).view(-1)[0] ^= 1
    after = others()
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_a_run_is_the_same_alone_and_among_others(folder: Path) -> None:
    base = frozen(folder)
    alone = train(learner(base), range(3))
    runs = [learner(base, NewAdapter(4, 32.0, seed=seed)) for seed in (3, 4, 5)]
    for step in range(3):
        found = [train(run, range(step, step + 1)) for run in runs]
    assert found[0] == alone
    assert len({*found}) == 3


def test_factors_that_are_given_stay_what_they_are(folder: Path) -> None:
    base = frozen(folder)
    given = learner(base).adapter()
    before = digest(given.tensors)
    ours = StepwiseLearner(base.adapted(given), micro_batch_tokens=16)
    train(ours, range(1))
    assert digest(given.tensors) == before != digest(masters(ours))


def test_over_a_model_with_masters_these_are_frozen(folder: Path) -> None:
    whole = Model.load(folder, "fp8", "native")
    before = digest(dict(whole.named_parameters()))
    ours = learner(whole)
    assert train(ours, range(1)) == train(learner(frozen(folder)), range(1))
    assert digest(dict(whole.named_parameters())) == before
    assert all(parameter.grad is None for parameter in whole.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_text", "nemotron_h"])
def test_other_families(tmp_path: Path, family: str) -> None:
    tiny_model("bf16", family, scale=4).save(tmp_path / "base")
    base = Model.load(tmp_path / "base", "fp8", "native", adapter=NewAdapter(1, 1.0, ()))
    given = NewAdapter(2, 32.0, ["down_proj"])
    loaded = Model.load(tmp_path / "base", "fp8", "native", adapter=given)
    ours, theirs = learner(base, given), StepwiseLearner(loaded, micro_batch_tokens=16)
    assert train(ours, range(1)) == train(theirs, range(1))
    assert stored(base, "learner").items() <= stored(ours.model, "learner").items()

"""What a stepwise learner saves: a run that goes on from it has the bits of one that never
stopped, `peft` reads it, and a folder that is none is refused before anything has changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.rl.stepwise import StepwiseLearner

from .stepwise_helpers import (
    NEW,
    data,
    digest,
    frozen,
    learner,
    masters,
    saved_base,
    state_of,
    train,
)

WEIGHTS, CONFIG, MOMENTS = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and beside it what a run has saved after two steps."""
    where = tmp_path_factory.mktemp("saving")
    saved_base(where / "base")
    ours = learner(frozen(where / "base"))
    train(ours, range(2))
    ours.save(where / "saved", optimizer=True)
    ours.save(where / "weights", optimizer=False)
    return where


@pytest.fixture(scope="module")
def base(folder: Path) -> Model:
    return frozen(folder / "base")


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_stopped(folder: Path, base: Model) -> None:
    """Adapters, and a gradient that waited in the learner that loads is gone. The control loads
    without the optimizer's state."""
    unbroken = train(learner(base), range(4))
    for ours in (learner(base), learner(base, NewAdapter(NEW.rank, NEW.alpha, seed=8))):
        ours.forward_backward(data(seed=77), "ppo", {})
        ours.load(folder / "saved", optimizer=True)
        assert train(ours, range(2, 4)) == unbroken
    for name in ("saved", "weights"):
        ours = learner(base)
        train(ours, range(1))
        ours.load(folder / name, optimizer=False)
        fresh = StepwiseLearner(base.adapted(folder / name), micro_batch_tokens=16)
        assert digest(masters(ours)) == digest(masters(fresh))
        assert train(ours, range(2, 4)) == train(fresh, range(2, 4)) != unbroken


def test_a_whole_model_goes_on_too(folder: Path, tmp_path: Path) -> None:
    def whole() -> StepwiseLearner:
        model = Model.load(folder / "base", "fp8", "native")
        return StepwiseLearner(model, micro_batch_tokens=16)

    ours = whole()
    train(ours, range(1))
    ours.save(tmp_path / "saved", optimizer=True)
    unbroken = train(ours, range(1, 2))
    again = whole()
    again.load(tmp_path / "saved", optimizer=True)
    assert train(again, range(1, 2)) == unbroken
    again.load(tmp_path / "saved", optimizer=False)
    assert train(again, range(1, 2)) != unbroken
    assert Model.load(tmp_path / "saved", "fp8", "native").config == ours.model.config


def test_peft_reads_what_is_saved(folder: Path) -> None:
    """Its names, rank and alpha: of Tinker's convention 32, at any rank, so the scale is 32 / r."""
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'isobit[dev]')")
    config = peft.LoraConfig.from_pretrained(str(folder / "saved"))
    assert (config.r, config.lora_alpha) == (4, 32)
    assert not (folder / "weights" / MOMENTS).exists()
    found = peft.utils.load_peft_weights(str(folder / "saved"), device="cpu")
    assert found.keys() == load_file(folder / "saved" / WEIGHTS).keys()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    ids = list(data()[0].tokens)
    with torch.no_grad():
        bare = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
        adapted = peft.PeftModel.from_pretrained(theirs, folder / "saved").eval()
        logits = adapted(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
    targets = torch.tensor(ids[1:]).unsqueeze(1)
    ours = Model.load(folder / "base", "float32", "native", adapter=folder / "saved")
    found_here = ours.logprobs([ids])[0]
    assert float((logits.gather(1, targets)[:, 0] - found_here).abs().max()) < 1e-4
    assert float((bare.gather(1, targets)[:, 0] - found_here).abs().max()) > 1e-2


def _cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-100])

    return damage


def _config(**keys: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return damage


def _tensors(
    name: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = load_file(folder / name)
        change(found)
        save_file(found, folder / name)

    return damage


def _nan(found: dict[str, torch.Tensor]) -> None:
    next(iter(found.values())).view(-1)[0] = torch.nan


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights are cut": (_cut(WEIGHTS), "truncated or corrupt"),
    "moments are cut": (_cut(MOMENTS), f"{MOMENTS}: cannot be read"),
    "weights are missing": (lambda f: (f / WEIGHTS).unlink(), "is missing"),
    "moments are missing": (lambda f: (f / MOMENTS).unlink(), "saved without the optimizer"),
    "the folder is missing": (shutil.rmtree, "no such directory"),
    "a weight is NaN": (_tensors(WEIGHTS, _nan), "NaN or infinity"),
    "a moment is NaN": (_tensors(MOMENTS, _nan), "is not of finite float32 numbers"),
    "a moment is missing": (
        _tensors(MOMENTS, lambda t: t.pop("layers.0.q_proj.lora_A.exp_avg")),
        "optimizer state of layers.0.q_proj.lora_A does not fit the model",
    ),
    "a moment of another model": (
        _tensors(MOMENTS, lambda t: t.update({"layers.9.x": torch.zeros(1)})),
        "which the model does not have",
    ),
    "another alpha": (_config(lora_alpha=16), "adapter of rank 4, alpha 16.*trains an adapter of"),
    "another rank in the config": (_config(r=8), "has shape"),
    "no config": (lambda f: (f / CONFIG).write_text("{"), "not valid JSON"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_changes_nothing(
    folder: Path, base: Model, tmp_path: Path, what: str
) -> None:
    damage, told = DAMAGE[what]
    shutil.copytree(folder / "saved", tmp_path / "saved")
    ours = learner(base)
    train(ours, range(1))
    ours.forward_backward(data(seed=5), "ppo", {})
    before = state_of(ours)
    damage(tmp_path / "saved")
    with pytest.raises(IsobitError, match=told) as error:
        ours.load(tmp_path / "saved", optimizer=True)
    assert "\n" not in str(error.value)
    assert state_of(ours) == before


def test_another_rank_or_other_matrices_are_refused(folder: Path, base: Model) -> None:
    for given in (NewAdapter(3, 32.0), NewAdapter(4, 32.0, ["q_proj"])):
        ours = learner(base, given)
        before = state_of(ours)
        with pytest.raises(IsobitError, match=r"adapter of rank 4.*and this run trains an adapter"):
            ours.load(folder / "saved", optimizer=True)
        assert state_of(ours) == before


def test_a_folder_that_cannot_be_written_is_named(base: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IsobitError, match=r"file: cannot be written"):
        learner(base).save(tmp_path / "file", optimizer=True)

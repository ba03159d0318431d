"""A policy and a teacher with one tokenizer whose embeddings have other numbers of rows behind its
ids, as the sizes of a family have: what is sampled, learned and compared is of the tokenizer's ids."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from isobit.config import load_config
from isobit.distributed.files import Part
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.hub import names
from isobit.run.checkpoints import all_checkpoints
from isobit.training.commands.verify import verify_command
from isobit.training.train import resume, train
from tests.models import tiny_model
from tests.runs import fingerprint
from tests.training.test_distillation import written

EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """policy and teacher, with no row too many; and both with some, which are likely tokens."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("policy", 1), ("teacher", 9)):
        tiny_model("fp8", seed=seed, scale=6.0).save(folder / name)
        for rows in (8, 40):
            padded(folder / name, folder / f"{name}-{rows}", rows)
    return folder


def padded(folder: Path, to: Path, rows: int) -> None:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    more = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) * 0.3
    tensors[EMBED] = torch.cat([tensors[EMBED], more])
    save_file(tensors, to / "model.safetensors")
    config = json.loads((to / "config.json").read_text())
    config["vocab_size"] += rows
    (to / "config.json").write_text(json.dumps(config))


def trained(folder: Path, models: Path, policy: str, teacher: str, *more: str, **given: Any) -> Any:
    config = load_config(written(folder, models / policy, models / teacher), ["steps=2", *more])
    return train(config, quiet=True, **given)


def embedding(run: Any) -> torch.Tensor:
    newest = all_checkpoints(Path(run.run_dir) / "checkpoints")[-1]
    return load_file(newest / "model.safetensors")[EMBED]


def measured(run: Any) -> list[dict[str, float]]:
    """The metrics that say what was learned."""
    rooms = ("loss", "reward", "entropy", "grad", "mismatch", "completion")
    return [{k: v for k, v in row.items() if k.split("/")[0] in rooms} for row in run.metrics]


LOSSES = ["algorithm.loss=clip", "algorithm.loss=divergence"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("policy", "teacher"),
    [("policy", "teacher-8"), ("policy-40", "teacher"), ("policy-8", "teacher-40"),
     ("policy-40", "teacher-8")],
)  # fmt: skip
def test_a_run_is_that_of_models_without_such_rows(
    tmp_path: Path, models: Path, loss: str, policy: str, teacher: str
) -> None:
    """Bit for bit; and the policy is saved with its own size, and its own rows behind the ids."""
    plain = trained(tmp_path / "plain", models, "policy", "teacher", loss)
    found = trained(tmp_path / "padded", models, policy, teacher, loss)
    assert measured(found) == measured(plain)
    assert len(measured(found)[0]) > 5
    ids, before = embedding(plain), load_file(models / policy / "model.safetensors")[EMBED]
    after = embedding(found)
    assert torch.equal(after[: len(ids)], ids)
    assert not torch.equal(ids, before[: len(ids)])
    assert torch.equal(after[len(ids) :], before[len(ids) :])
    assert len(after) == len(before)
    newest = all_checkpoints(Path(found.run_dir) / "checkpoints")[-1]
    assert json.loads((newest / "config.json").read_text())["vocab_size"] == len(before)
    assert Model.load(newest).config.vocab_size == len(before)


def test_models_of_one_size_are_compared_with_all_rows(tmp_path: Path, models: Path) -> None:
    """The control: of equal sizes nothing is cut, and the policy samples ids behind the
    tokenizer's."""
    sampled = list[int]()

    def measure(samples: Any, advantages: Any) -> dict[str, float]:
        sampled.extend(token for sample in samples for token in sample.completion_ids)
        return {}

    ids = Model.load(models / "policy").tokenizer.vocab_size
    trained(tmp_path / "one", models, "policy-40", "teacher-40", "steps=1", measures=[measure])
    assert max(sampled) >= ids
    sampled.clear()
    trained(tmp_path / "two", models, "policy-40", "teacher-8", "steps=1", measures=[measure])
    assert 0 < max(sampled) < ids


def test_what_a_token_costs_is_of_the_tokenizers_ids(tmp_path: Path, models: Path) -> None:
    """-(log p - log q) of each token by transformers in float64, each of softmax over the ids."""
    seen: list[tuple[Any, Any]] = []

    def measure(samples: Any, advantages: Any) -> dict[str, float]:
        seen.extend(zip(samples, advantages, strict=True))
        return {}

    given = ("steps=1", "precision=float32")
    trained(tmp_path, models, "policy-40", "teacher-8", *given, measures=[measure])
    ids = Model.load(models / "policy").tokenizer.vocab_size
    oracles = [
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float64)
        for name in ("policy-40", "teacher-8")
    ]
    other = 0.0
    for sample, advantage in seen:
        tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        count = len(sample.completion_ids)
        with torch.no_grad():
            logits = [oracle(tokens).logits[0, -count - 1 : -1] for oracle in oracles]
        wanted = torch.tensor(sample.completion_ids)[:, None]

        def of(logits: torch.Tensor, wanted: torch.Tensor = wanted) -> torch.Tensor:
            return logits.log_softmax(-1).gather(1, wanted)[:, 0]

        mine, theirs = (of(each[:, :ids]) for each in logits)
        found = torch.tensor(advantage, dtype=torch.float64)
        assert torch.allclose(found, theirs - mine, atol=2e-5)
        other = max(other, float((found - (of(logits[1]) - of(logits[0]))).abs().max()))
    assert other > 0.1  # of all rows it is another number


@pytest.mark.slow
def test_a_run_goes_on_and_is_verified(tmp_path: Path, models: Path) -> None:
    """After a stop, with the bits of a run that was not stopped; and the record is that of its
    weights also when the teacher is gone."""
    own = tmp_path / "models"
    shutil.copytree(models, own)
    whole = trained(tmp_path / "whole", own, "policy-40", "teacher-8", "steps=4")
    trained(tmp_path / "stopped", own, "policy-40", "teacher-8")
    again = resume(tmp_path / "stopped" / "run", ["steps=4"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    shutil.rmtree(own / "teacher-8")
    assert math.isfinite(whole.metrics[-1]["reward/reference_kl"])
    verify_command(Path(whole.run_dir), None)  # raises for whatever differs


def test_an_adapter_over_a_model_with_such_rows(tmp_path: Path, models: Path) -> None:
    adapter = ("adapter.rank=2", "adapter.alpha=4", "optimizer.learning_rate=0.01")
    plain = trained(tmp_path / "plain", models, "policy", "teacher", *adapter)
    found = trained(tmp_path / "padded", models, "policy-40", "teacher-8", *adapter)
    assert measured(found) == measured(plain)


def test_another_tokenizer_is_refused(tmp_path: Path, models: Path) -> None:
    other = shutil.copytree(models / "teacher-8", tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"7"', '"§"'))
    config = load_config(written(tmp_path, models / "policy-40", other), ["steps=1"])
    with pytest.raises(IsobitError, match=r"reference\.path: .* has another tokenizer than the"):
        train(config, quiet=True)


def test_rows_are_written_by_the_rank_that_writes_the_last_one() -> None:
    """Of ranks that keep two rows of four, a third rank that keeps none, and rows of the file."""
    more = {"a": torch.full((2, 3), 7.0)}
    for first, elements in ((0, 6), (2, 12)):
        mine = torch.arange(6.0).reshape(2, 3)
        part = names.with_rows({"a": Part(torch.float32, (4, 3), mine, first * 3)}, more)["a"]
        assert part.shape == (6, 3)
        assert part.start == first * 3
        assert len(part.data()) == 4 * elements
    absent = names.with_rows({"a": Part(torch.float32, (4, 3))}, more)["a"]
    assert absent.mine is None
    assert absent.shape == (6, 3)

"""On-policy distillation: each token's advantage is minus what the reverse KL to the teacher costs it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.rl import Sample
from isobit.rl.algorithm.advantages import Advantage
from isobit.training.train import resume, train
from tests.models import tiny_model
from tests.runs import fingerprint, write_config

DISTILLED = {
    "algorithm": {
        "advantage": "distillation",
        "kl_coefficient": 1.0,
        "kl_in_reward": True,
        "loss_aggregation": "token_mean",
    },
    "rewards": {"functions": []},
    "task": {"name": "file"},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    tiny_model("fp8", seed=9, scale=6.0).save(folder)
    return folder


def written(folder: Path, model: Path, teacher: Path | None, **changes: Any) -> Path:
    """A distillation on prompts alone: no rewards, and one completion of each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(f'{{"prompt": "{a}+{b}="}}\n' for a in range(5) for b in range(4)))
    path = write_config(folder, model, steps=4)
    given: dict[str, Any] = {**DISTILLED, "task": {"path": str(rows), "held_out_size": 0}}
    if teacher is not None:
        given["reference"] = {"path": str(teacher)}
    given["sampling"] = {"group_size": 1, "max_new_tokens": 6}
    values = yaml.safe_load(path.read_text()) | given | changes
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_advantage_of_a_token_is_that_of_its_source(
    tmp_path: Path, base_model: Path, teacher: Path
) -> None:
    """-(log policy - log teacher), as Thinking Machines' recipe has it
    (`incorporate_kl_penalty`, kl_discount_factor 0): by the teacher's own forward over the sampled
    tokens. The controls: the teacher's under another precision, and the policy's own."""
    seen: list[tuple[Sample, Advantage]] = []

    def measure(samples: Any, advantages: Any) -> dict[str, float]:
        seen.extend(zip(samples, advantages, strict=True))
        return {}

    config = load_config(written(tmp_path, base_model, teacher), ["steps=1"])
    found = train(config, measures=[measure], quiet=True)
    assert found.metrics[-1]["mismatch/differing_tokens"] == 0
    models = {name: Model.load(teacher, name) for name in ("fp8", "bf16")}
    differing = 0
    for sample, advantage in seen:
        ids = [*sample.prompt_ids, *sample.completion_ids]
        rows = {name: model.logprobs([ids])[0] for name, model in models.items()}
        count = len(sample.completion_ids)
        theirs = rows["fp8"][-count:].double().tolist()
        wanted = [-(mine - other) for mine, other in zip(sample.rollout_logprobs, theirs)]
        assert list(advantage) == wanted  # type: ignore[arg-type]
        differing += rows["bf16"][-count:].double().tolist() != theirs
        assert wanted != [0.0] * count
    assert differing
    kl = sum(-sum(a) for _, a in seen) / len(seen)  # type: ignore[arg-type]
    assert found.metrics[-1]["reward/reference_kl"] == pytest.approx(kl, rel=1e-9)


@pytest.mark.slow
def test_a_policy_comes_nearer_to_its_teacher_and_goes_on_after_a_stop(
    tmp_path: Path, base_model: Path, teacher: Path
) -> None:
    """The control: a teacher that is the policy costs each token exactly 0, and moves nothing."""
    changes = {
        "optimizer": {"learning_rate": 5e-3},
        "prompts_per_step": 20,
        "sampling": {"group_size": 8, "max_new_tokens": 6},
    }
    config = written(tmp_path / "whole", base_model, teacher, **changes)
    whole = train(load_config(config, ["steps=10"]), quiet=True)
    kl = [row["reward/reference_kl"] for row in whole.metrics]
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])
    config = written(tmp_path / "stopped", base_model, teacher, **changes)
    train(load_config(config, ["steps=4"]), quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=10"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    same = train(
        load_config(written(tmp_path / "same", base_model, base_model), ["steps=1"]), quiet=True
    )
    assert same.metrics[-1]["reward/reference_kl"] == 0.0
    assert same.metrics[-1]["advantage/nonzero_fraction"] == 0.0


def test_what_is_no_teacher_is_refused(tmp_path: Path, base_model: Path, teacher: Path) -> None:
    """Each in one line."""
    with pytest.raises(IsobitError, match=r"give its directory as reference\.path"):
        load_config(written(tmp_path, base_model, None))
    for change in ("algorithm.kl_in_reward=false", "algorithm.kl_estimator=k2"):
        with pytest.raises(IsobitError, match="takes what the KL to the teacher costs"):
            load_config(written(tmp_path, base_model, teacher), [change])
    with pytest.raises(IsobitError, match="distillation knows no rewards"):
        load_config(written(tmp_path, base_model, teacher), ["algorithm.dynamic_sampling=true"])
    other = tmp_path / "other"
    tiny_model("fp8").save(other)
    text = (other / "tokenizer.json").read_text()
    assert '"7"' in text
    (other / "tokenizer.json").write_text(text.replace('"7"', '"§"'))
    with pytest.raises(IsobitError, match=r"reference\.path: .* has another tokenizer than the"):
        train(load_config(written(tmp_path, base_model, other)), quiet=True)
    asked = ["evaluation.every=1", "task.held_out_size=2"]
    with pytest.raises(IsobitError, match="no reward"):
        train(load_config(written(tmp_path, base_model, teacher), asked), quiet=True)

"""Functions and reward models in one sum, and whole runs under them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.model import RewardModel
from isobit.model.hub.checkpoint import read_json, read_weights, write_json, write_weights
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.training.scoring import RewardScorer, WeightedModel
from isobit.training.train import replay, train
from tests.models import tiny_model
from tests.runs import digit_reward_file, dry_run_text, fingerprint, write_config


def reward_model(path: Path, max_positions: int = 64, **made: Any) -> Path:
    """A classifier over the tiny model's tokens, made of a tiny model of other weights."""
    tiny_model("float32", "qwen3", seed=9, scale=5, **made).save(path)
    tensors = read_weights(path)
    score = torch.randn(1, made.get("hidden_size", 32), generator=torch.Generator().manual_seed(1))
    write_weights(path, {**tensors, "score.weight": score})
    changes = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "max_position_embeddings": max_positions,
    }
    write_json(path / "config.json", read_json(path / "config.json") | changes)
    return path


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("judges") / "judge")


def test_functions_and_models_are_added_by_weight(tmp_path: Path, judge: Path) -> None:
    model = RewardModel.load(judge)
    spec = RewardSpec(f"{digit_reward_file(tmp_path)}:digits", 2.0)
    with RewardPool([spec]) as pool:
        scorer = RewardScorer(pool, [WeightedModel(model, -0.5, "judge")], True)
        assert scorer.weights == (("digits", 2.0), ("judge", -0.5))
        prompts, completions = ["1+1=", "2+2="], ["99", "1"]
        rewards = scorer.score(prompts, completions, [{}, {}])
    wanted = model.score([model.encode(p, c) for p, c in zip(prompts, completions)])
    assert [r.by_function["judge"] for r in rewards] == wanted
    assert [r.total for r in rewards] == pytest.approx(
        [2 * 2 / 3 - 0.5 * wanted[0], -0.5 * wanted[1]]
    )


def test_what_does_not_fit_the_judge_is_unscored_or_stops(tmp_path: Path) -> None:
    model = RewardModel.load(reward_model(tmp_path / "short", max_positions=6))
    with RewardPool([]) as pool:
        skipping = RewardScorer(pool, [WeightedModel(model, 1.0, "judge")], False)
        rewards = skipping.score(["1+1="] * 2, ["2", "2222"], [{}, {}])
        assert rewards[0].total is not None
        assert rewards[1].total is None
        assert (
            rewards[1].error == "reward model judge, sample 1: 8 tokens, its context takes 1 to 6"
        )
        with pytest.raises(RunFailed, match="sample 1: 8 tokens"):
            RewardScorer(pool, [WeightedModel(model, 1.0, "judge")], True).score(
                ["1+1="] * 2, ["2", "2222"], [{}, {}]
            )


def test_two_rewards_of_one_name_are_refused(judge: Path) -> None:
    model = WeightedModel(RewardModel.load(judge), 1.0, "judge")
    with RewardPool([]) as pool, pytest.raises(IsobitError, match="two rewards are called 'judge'"):
        RewardScorer(pool, [model, model], True)


def test_a_run_under_a_reward_model_and_a_reference_both_in_fp8(
    tmp_path: Path, base_model: Path, judge: Path
) -> None:
    settings = {
        "rewards": {"models": [{"path": str(judge), "weight": 0.5}]},
        "algorithm": {"kl_coefficient": 0.05},
        "reference": {"precision": "fp8"},
        "evaluation": {"every": 2, "samples": 4},
    }
    result = train(load_config(write_config(tmp_path, base_model, **settings)))
    rows = [row for row in result.metrics if row["step"] > 0]
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)
    for row in rows:
        parts = row["reward/function/digits"] + 0.5 * row["reward/function/reward_model"]
        assert row["reward/mean"] == pytest.approx(parts, abs=1e-6)
    # a byte an element of the linear layers and BF16 for the rest, where the policy has FP32
    # masters too
    assert rows[0]["memory/reference_mib"] < 0.4 * rows[0]["memory/weights_mib"]
    assert rows[0]["memory/reward_models_mib"] < 0.4 * rows[0]["memory/weights_mib"]
    again = replay(result.run_dir, tmp_path / "again")
    assert (
        fingerprint(again.run_dir)["model.safetensors"]
        == fingerprint(result.run_dir)["model.safetensors"]
    )


def test_bad_reward_models_cost_nothing(tmp_path: Path, base_model: Path) -> None:
    for models, message in (
        ([{"path": str(base_model)}], "no tensor score.weight"),
        ([{"path": "nowhere"}], "no such directory"),
        ([{"path": str(base_model), "precision": "fp9"}], "unknown precision preset"),
    ):
        with pytest.raises(IsobitError, match=message):
            train(load_config(write_config(tmp_path, base_model, rewards={"models": models})))
        assert not (tmp_path / "run").exists()


def test_what_a_reward_prints_is_in_the_run(
    tmp_path: Path, base_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Step by step, also what it printed while it was imported; a dry run says it on stderr."""
    (tmp_path / "talking.py").write_text(
        "print('hello')\n"
        "def talking(completions, trainer_state):\n"
        "    print('step', trainer_state.global_step)\n"
        "    return [float(len(c)) / (3 - trainer_state.global_step) for c in completions]\n"
    )
    functions = [{"function": f"{tmp_path}/talking.py:talking"}]
    config = load_config(write_config(tmp_path, base_model, rewards={"functions": functions}))
    dry_run_text(config)
    assert "hello\n" in capfd.readouterr().err
    log = tmp_path / "run" / "rewards.log"
    with pytest.raises(
        RunFailed,
        match=rf"ZeroDivisionError.*; what it printed: {log}; step 3 is saved; go on with: ",
    ):
        train(config)
    lines = log.read_text().splitlines()
    assert lines[:3] == ["--- after step 0", "hello", "step 0"]
    assert [line for line in lines if line.startswith("---")] == [
        f"--- after step {i}" for i in range(4)
    ]
    assert "hello" not in capfd.readouterr().err

"""On a real pretrained model: RL with a reward function of the user's own, sampling, and evaluation
of real data."""

import json
from pathlib import Path

import pytest
import yaml

from tests.warm import isobit

PROMPTS = (
    "Once upon a time",
    "One day, a little girl",
    "Lily and Tom",
    "There was a big dog",
    "Tim had a red ball",
    "The cat and the mouse",
)
REWARD = '''
WORDS = ("friend", "happy", "play")


def story(prompts, completions, **columns):
    """Three words in the story, and a proper ending: a quarter each."""
    return [(sum(word in c for word in WORDS) + c.rstrip().endswith((".", "!", '"'))) / 4 for c in completions]
'''


@pytest.mark.slow
def test_a_real_model_learns_a_reward_of_the_users_own(tmp_path: Path, stories: Path) -> None:
    """20 steps under `fp8`, with a penalty that keeps the stories stories."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS)
    )
    config = {
        "model": {"path": str(stories)},
        "task": {"path": "prompts.jsonl", "held_out_size": 0},
        "rewards": {"functions": [{"function": "rewards.py:story"}]},
        "sampling": {"group_size": 8, "max_new_tokens": 64},
        "algorithm": {"kl_coefficient": 0.05},
        "optimizer": {"learning_rate": 4e-4, "warmup_steps": 5},
        "prompts_per_step": 6,
        "steps": 20,
        "run": {"dir": "run"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = isobit(tmp_path, "train", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "differing tokens 0" in done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert {row["mismatch/differing_tokens"] for row in rows} == {0}
    assert sum(row["rollout/tokens"] for row in rows) > 50_000
    trained = tmp_path / "run" / "checkpoints" / "step-000020"
    sampled = isobit(
        tmp_path, "generate", trained, "--prompt", PROMPTS[0], "--max-new-tokens", 60, "-n", 4
    )
    assert sampled.stdout.count("Once upon a time") == 4, sampled.stderr


def test_greedy_text_from_the_shell(tmp_path: Path, stories: Path) -> None:
    done = isobit(
        tmp_path,
        "generate",
        stories,
        "--prompt",
        "Once upon a time",
        "--temperature",
        0,
        "--precision",
        "bf16",
    )
    assert done.stdout.startswith("Once upon a time, there was a little girl named Lily."), (
        done.stderr
    )


@pytest.mark.slow
def test_every_gold_answer_of_gsm8k_is_right(tmp_path: Path, gsm8k_test: Path) -> None:
    """And with another column in their place, none is."""
    out = tmp_path / "result.json"
    gold = ("eval", "--task", "gsm8k", "--data", gsm8k_test)
    done = isobit(tmp_path, *gold, "--completions", "answer", "--out", out)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["summary"]["(all)"]["accuracy"]["value"] == 1
    assert len(result["prompts"]) == sum(1 for line in gsm8k_test.open() if line.strip())
    assert {row["greedy"]["reward"] for row in result["prompts"]} == {1.0}
    other = tmp_path / "other.json"
    assert isobit(tmp_path, *gold, "--completions", "question", "--out", other).returncode == 0
    assert json.loads(other.read_text())["summary"]["(all)"]["accuracy"]["value"] < 0.1
    compared = isobit(tmp_path, "eval", out, "--against", other)
    assert "A is better than B in accuracy" in compared.stdout, compared.stderr

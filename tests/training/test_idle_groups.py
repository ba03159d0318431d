"""Whole runs in which some groups teach nothing: they are left out, and weights and completions
keep their bits."""

from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.rl.algorithm.credit import assign_credit
from isobit.run.completions import COMPLETIONS, read
from isobit.training.train import TrainResult, replay, resume, train
from tests.runs import fingerprint, write_config

SETTINGS = (
    "optimizer.micro_batch_tokens=12",
    "mismatch.samples_of_zero_advantage=1",
    "optimizer.learning_rate=3e-3",
)
VARIANTS = {
    "plain": [],
    "apart": ["optimizer.micro_batch_tokens=40", "optimizer.separate_zero_advantage=true"],
    "several updates": ["algorithm={updates_per_batch: 2}"],
    "dynamic sampling": ["algorithm={dynamic_sampling: true, max_resamples: 2}"],
    "replay": ["replay={capacity: 8, groups_per_step: 2, max_staleness: 3}"],
    "rollouts ahead": ["rollouts_ahead=1"],
    "two engines": ["precision=fp8-rollout"],
    "old recomputed": ["algorithm={recompute_old_logprobs: always}"],
    "recomputed layers": ["optimizer.activation_checkpointing=true"],
}


def run(folder: Path, model: Path, *overrides: str) -> TrainResult:
    path = write_config(folder, model, sampling={"group_size": 4, "max_new_tokens": 2})
    reward = folder / "digit_reward.py"
    reward.write_text(
        "def digits(prompts, completions, **columns):\n"
        "    digits = [any(c in '56789' for c in text) for text in completions]\n"
        "    return [int(prompt[0]) % 2 * digit for prompt, digit in zip(prompts, digits)]\n"
    )
    return train(load_config(path, [*SETTINGS, *overrides]))


def _bits(folder: Path) -> tuple[str, str, list[list[float]]]:
    """Of the weights, of the moments, and the completions' log-probabilities."""
    found = fingerprint(folder)
    logprobs = [row["rollout_logprobs"] for row in read(folder / COMPLETIONS)]
    return found["model.safetensors"], found["trainer/optimizer.safetensors"], logprobs


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_keeps_its_bits(
    tmp_path: Path, base_model: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control gives those completions an advantage of 1e-8, which teaches."""
    for name in ("some", "all", "least"):
        (tmp_path / name).mkdir()
    found = run(tmp_path / "some", base_model, *VARIANTS[variant])
    share = max(row["learn/skipped_share"] for row in found.metrics)
    assert share == 0 if variant == "dynamic sampling" else share > 0.05  # which drops such groups
    assert all(row["mismatch/differing_tokens"] == 0 for row in found.metrics if variant == "plain")
    with monkeypatch.context() as patch:
        patch.setattr(
            "isobit.rl.learner.schedule.without_teaching", lambda micro, zero: frozenset()
        )
        everything = run(tmp_path / "all", base_model, *VARIANTS[variant])
    assert all(row["learn/skipped_share"] == 0 for row in everything.metrics)
    assert _bits(found.run_dir) == _bits(everything.run_dir)
    if variant == "plain":
        again = replay(found.run_dir, tmp_path / "again")
        assert _bits(again.run_dir) == _bits(found.run_dir)
        monkeypatch.setattr("isobit.training.loop.assign_credit", _at_least(1e-8))
        teaching = run(tmp_path / "least", base_model, *VARIANTS[variant])
        assert all(row["learn/skipped_share"] == 0 for row in teaching.metrics)
        assert _bits(teaching.run_dir) != _bits(found.run_dir)


def _at_least(least: float) -> Any:
    def credited(*given: Any) -> Any:
        samples, advantages = assign_credit(*given)
        return samples, [advantage or least for advantage in advantages]

    return credited


@pytest.mark.slow
def test_a_resumed_run_leaves_out_and_measures_the_same(tmp_path: Path, base_model: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", base_model)
    parts = run(tmp_path / "parts", base_model, "steps=2")
    resume(parts.run_dir, ["steps=4"])
    assert fingerprint(parts.run_dir) == fingerprint(whole.run_dir)

"""Every metric has one definition, every definition is used, and the document is generated from
them."""

from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.run import metrics
from isobit.training.train import train
from tests.runs import write_config

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_is_what_the_code_prints() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics.markdown()


def test_unknown_names_are_refused_and_families_match() -> None:
    metrics.check({"reward/function/anything": 1.0, "step": 1.0})
    with pytest.raises(AssertionError, match="reward/median"):
        metrics.check({"reward/median": 1.0})


def test_json_has_no_nan() -> None:
    assert metrics.plain({"a": float("nan"), "b": float("-inf"), "c": 0.5}) == {
        "a": None,
        "b": None,
        "c": 0.5,
    }


def test_every_definition_is_logged_by_some_run(tmp_path: Path, base_model: Path) -> None:
    everything = [
        "precision=fp8-rollout-kv",
        "algorithm.kl_coefficient=0.1",
        "evaluation={every: 1, samples: 4}",
    ]
    run = train(load_config(write_config(tmp_path, base_model), ["steps=1", *everything]))
    logged = {name for row in run.metrics for name in row}
    metrics.check(dict.fromkeys(logged, 0.0))
    unused = {name for name in metrics.METRICS if name not in logged and not name.endswith("*")}
    # tests/test_device.py: peaks of a GPU's memory tests/training/test_loop.py: mixtures of
    # experts, replay and rollouts ahead; tests/training/test_partial.py; tests/training/test_scoring.py: reward models;
    # tests/training/test_quantization.py tests/fleet/test_training.py: what a fleet is sent and how
    # long the learner waits for it tests/training/test_adapter.py: adapters
    # tests/training/test_agreement.py: tokens that differ; tests/engine/test_calibration.py:
    # calibrated queries; tests/training/test_serve.py: a run that serves;
    # tests/training/test_turns.py: environments; tests/training/test_preference_run.py,
    # tests/training/test_sft_run.py, tests/rl/test_entropy.py: losses of supervised runs, and the bonus;
    # tests/training/test_self_distillation.py: a teacher that is shown something;
    # tests/data/test_curriculum.py, tests/evaluation/test_early_stop.py: what ends or skips
    elsewhere = {
        name
        for name in metrics.METRICS
        if name.startswith(
            (
                *(
                    "router/",
                    "replay/",
                    "partial/",
                    "spec_decode/",
                    "staleness/",
                    "memory/reward",
                    "memory/peak_rollout",
                ),
                *(
                    "memory/peak_learn",
                    "quant/activation",
                    "quant/gradient",
                    "quant/query",
                    "mismatch/corrected",
                ),
                *("time/send", "time/rollout_waited", "time/compare", "adapter/"),
                *("serve/", "time/serve", "env/", "tools/", "time/tools"),
                *("preference/", "loss/dpo", "loss/ipo", "loss/kto", "loss/cross", "loss/held_out"),
                "loss/observ",
                *("entropy_coefficient", "groups/unshown", "prompts/skipped", "evaluation/stopped"),
            )
        )
        and name[-1] != "*"
    }
    assert unused == elsewhere | {
        "reward/reference_kl"
    }  # the same: with KL in the reward there is none in the loss
    assert "reward/function/digits" in logged


def test_timings_are_told_apart() -> None:
    assert metrics.is_timing("time/learn")
    assert metrics.is_timing("throughput/rollout_tokens_per_s")
    assert not metrics.is_timing("reward/mean")
    assert not metrics.is_timing("mismatch/differing_tokens")

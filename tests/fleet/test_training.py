"""A run whose batches a fleet samples beside the learner is the run of one process with `rollouts_ahead: k`."""

import json
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.training.train import TrainResult, train
from tests.runs import fingerprint, write_config

BY_ENGINE = (
    "rollout/cached_tokens",
    "rollout/prefix_hit_fraction",
    "rollout/preemptions",
    "quant/kv_saturated_fraction",
)
"""What engines did, not what they sampled: an engine that samples alone shares more pages."""
HARD = {
    "algorithm": {"preset": "dapo", "updates_per_batch": 2},
    "replay": {"capacity": 5, "groups_per_step": 1, "max_staleness": 4},
    "evaluation": {"every": 2, "samples": 4},
    "prompts_per_step": 3,
    "sampling": {"group_size": 3, "max_new_tokens": 3},
}
"""Dynamic sampling makes the prompts of a batch depend on the rewards of the one before."""


def bits(run: Path) -> dict[str, Any]:
    """`fingerprint`, without what engines count of their own work."""
    found = fingerprint(run)
    rows = [{k: v for k, v in row.items() if k not in BY_ENGINE} for row in json.loads(found["metrics"])]
    return found | {"metrics": rows}


def go(folder: Path, model: Path, *overrides: str, **changes: Any) -> TrainResult:
    folder.mkdir()
    return train(load_config(write_config(folder, model, **changes), overrides))


@pytest.mark.parametrize(
    ("ahead", "changes"),
    [
        (0, {}),
        (1, HARD),
        (2, {"precision": "fp8-rollout-kv"}),
        (1, {"algorithm": {"kl_coefficient": 0.1, "kl_in_reward": True}}),
    ],
    ids=["synchronous", "dynamic sampling", "a separate engine with a calibrated cache", "KL in the reward"],
)
@pytest.mark.slow
def test_a_fleet_is_one_process(tmp_path: Path, base_model: Path, ray: object, ahead: int, changes: Any) -> None:
    one = go(tmp_path / "one", base_model, f"rollouts_ahead={ahead}", **changes)
    fleet = go(tmp_path / "fleet", base_model, f"rollouts_ahead={ahead}", "fleet.engines=2", **changes)
    assert bits(fleet.run_dir) == bits(one.run_dir)
    other = go(tmp_path / "other", base_model, f"rollouts_ahead={ahead + 1}", **changes)  # the control
    assert bits(other.run_dir)["model.safetensors"] != bits(one.run_dir)["model.safetensors"]

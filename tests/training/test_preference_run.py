"""DPO as a run: a margin of exactly 0 in the first step, preferences learned, and a run that is killed
and goes on ends as the one that was never stopped."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_sft_config
from isobit.errors import IsobitError
from isobit.training.train import resume, train_supervised
from tests import warm
from tests.runs import fingerprint, killed_after
from tests.training.test_sft_run import written

ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
    for a in range(1, 6)
    for b in range(1, 6)
]


def pairs(folder: Path, model: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {"path": str(folder / "pairs.jsonl"), "held_out_size": 5}
    given = {"loss": "dpo", "task": task, "optimizer": {"learning_rate": 1e-3}}
    return written(folder, model, **{**given, **changes})


def test_preferences_are_learned_and_a_killed_run_goes_on(tmp_path: Path, base_model: Path) -> None:
    """The control: a run of another beta is another model."""
    found = train_supervised(load_sft_config(pairs(tmp_path / "whole", base_model)), quiet=True)
    rows = [row for row in found.metrics if "loss/dpo" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["preference/margin"] == rows[0]["preference/chosen_reward"] == 0.0
    assert rows[0]["loss/dpo"] == pytest.approx(math.log(2), rel=1e-6)
    assert rows[-1]["preference/margin"] > 0.0
    assert rows[-1]["loss/dpo"] < rows[0]["loss/dpo"]
    assert found.metrics[0]["loss/held_out"] == pytest.approx(math.log(2), rel=1e-12)
    assert not {"loss/margin", "loss/policy", "loss/kl"} & rows[-1].keys()
    path = pairs(tmp_path / "killed", base_model)
    process = warm.start(["isobit", "sft", str(path), "--quiet"], tmp_path)
    killed_after(process, tmp_path / "killed" / "run", 4)
    again = resume(tmp_path / "killed" / "run", quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(found.run_dir)
    other = pairs(tmp_path / "other", base_model, beta=0.5)
    control = train_supervised(load_sft_config(other, ["steps=2"]), quiet=True)
    assert control.metrics[1]["preference/margin"] == 0.0
    name = "model.safetensors"
    assert fingerprint(control.run_dir)[name] != fingerprint(found.run_dir)[name]


def test_an_adapter_is_compared_with_its_model(tmp_path: Path, base_model: Path) -> None:
    """Whose storage it shares."""
    given = {"adapter": {"rank": 2}, "steps": 2, "loss": "ipo", "evaluation": {}}
    found = train_supervised(load_sft_config(pairs(tmp_path, base_model, **given)), quiet=True)
    assert found.metrics[0]["preference/margin"] == 0.0
    assert found.metrics[1]["preference/margin"] != 0.0
    assert "memory/reference_mib" not in found.metrics[0]


def test_what_is_no_pair_is_refused(tmp_path: Path, base_model: Path) -> None:
    with pytest.raises(IsobitError, match="compares with the model that the run began with"):
        load_sft_config(written(tmp_path, loss="dpo"))
    with pytest.raises(IsobitError, match="turns: all has no meaning under loss: dpo"):
        load_sft_config(pairs(tmp_path, base_model, turns="all"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": ""}\n')
    task = {"path": str(rows), "held_out_size": 0}
    path = pairs(tmp_path, base_model, task=task, evaluation={})
    with pytest.raises(IsobitError, match=r"rows\.jsonl:1: column 'rejected' is empty"):
        train_supervised(load_sft_config(path), quiet=True)
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    with pytest.raises(IsobitError, match=r"rows\.jsonl:1: no column 'chosen' to learn from"):
        train_supervised(load_sft_config(path), quiet=True)

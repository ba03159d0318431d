"""KTO as a run: a KL and margin of exactly 0 in the first step, labels learned, and a run that is
killed and goes on ends as the one that was never stopped."""

import json
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
    {"prompt": f"{a}+{b}=", "completion": str(a + b + wrong), "label": not wrong}
    for a in range(1, 6)
    for b in range(1, 6)
    for wrong in (0, 1)
]


def labelled(folder: Path, model: Path, rows: Any = ROWS, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"path": str(folder / "rows.jsonl"), "held_out_size": 6}
    given = {"loss": "kto", "task": task, "optimizer": {"learning_rate": 3e-3}, "batch_size": 12}
    return written(folder, model, **{**given, **changes})


@pytest.mark.slow
def test_labels_are_learned_and_a_killed_run_goes_on(tmp_path: Path, base_model: Path) -> None:
    """The control: a run of another weight is another model."""
    found = train_supervised(load_sft_config(labelled(tmp_path / "whole", base_model)), quiet=True)
    rows = [row for row in found.metrics if "loss/kto" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["preference/margin"] == rows[0]["preference/kl"] == 0.0
    assert rows[0]["loss/kto"] == pytest.approx(0.5, rel=1e-6)
    assert rows[-1]["preference/margin"] > 0.0
    assert rows[-1]["loss/kto"] < rows[0]["loss/kto"]
    assert found.metrics[0]["loss/held_out"] == pytest.approx(0.5, rel=1e-12)
    assert not {"loss/kl_baseline", "loss/policy", "loss/desirable"} & rows[-1].keys()
    path = labelled(tmp_path / "killed", base_model)
    process = warm.start(["isobit", "sft", str(path), "--quiet"], tmp_path)
    killed_after(process, tmp_path / "killed" / "run", 4)
    again = resume(tmp_path / "killed" / "run", quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(found.run_dir)
    other = load_sft_config(path, ["undesirable_weight=2", f"run.dir={tmp_path / 'other'}"])
    control = fingerprint(train_supervised(other, quiet=True).run_dir)
    assert control["model.safetensors"] != fingerprint(found.run_dir)["model.safetensors"]


def test_what_has_no_label_is_refused(tmp_path: Path, base_model: Path) -> None:
    for label, said in (("good", "got 'good'"), (1, "got 1"), (None, "there is none")):
        row = {"prompt": "1+1=", "completion": "2", "label": label}
        path = labelled(tmp_path, base_model, [row])
        with pytest.raises(IsobitError, match=rf"rows\.jsonl:1: column 'label': .*{said}"):
            train_supervised(
                load_sft_config(path, ["task.held_out_size=0", "evaluation.every=0"]), quiet=True
            )
    path = labelled(tmp_path, base_model)
    for change, said in (
        ("batch_size=1", "loss: kto needs a batch_size of 2 or more"),
        ("loss=dpo", "are of loss: kto"),
        ("turns=all", "turns: all has no meaning under loss: kto"),
    ):
        with pytest.raises(IsobitError, match=said):
            load_sft_config(path, [change, "desirable_weight=2"])


def test_one_held_out_answer_is_measured_without_another_prompt(
    tmp_path: Path, base_model: Path
) -> None:
    """Its KL is 0: with its own answer in the place of another's it would be its own ratio."""
    path = labelled(tmp_path, base_model)
    config = load_sft_config(path, ["task.held_out_size=1", "optimizer.learning_rate=0.03"])
    found = train_supervised(config, quiet=True)
    last = [row["loss/held_out"] for row in found.metrics if "loss/held_out" in row][-1]
    assert abs(last - 0.5) > 1e-4

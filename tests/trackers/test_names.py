"""Every metric that a run can have, under the rules that each tracker has for names."""

import fnmatch
import importlib.util
import json
import posixpath
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.monitor.trackers.mlflow import metric_name
from isobit.run.metrics import METRICS
from tests.trackers.readers import READERS

MEMBERS = (
    "add",
    "a/b",
    "a//b",
    "a",
    "..",
    ".",
    "/",
    "über",
    "漢" * 200,
    "x" * 400,
    "a b%c|#\\",
    "-",
)
"""What others may call a tool, a tag or a metric; `a` is the folder of `a/b`."""
NAMES = tuple(
    name.replace("*", member)
    for name in METRICS
    if name != "step"
    for member in (MEMBERS if name.endswith("/*") else ("4",))
)
"""Of each family with each of these."""
FOLDERS = {"tools/call_frequency", "tools/failure_frequency", "time/tools"}
"""Metrics that have the name of a family."""


def test_no_metric_of_mlflow_is_the_folder_of_another() -> None:
    """Its plain files: each name is a path with one reading, none is the folder of another. The
    control: as they are named here, some are."""
    assert {
        name for name in NAMES if any(other.startswith(f"{name}/") for other in NAMES)
    } > FOLDERS
    names = {metric_name(name) for name in NAMES}
    assert len(names) > len(set(NAMES)) - 12  # a few of these members are written alike
    for name in names:
        assert not any(other.startswith(f"{name}/") for other in names), name
        assert posixpath.normpath(name) == name
        assert not name.startswith(("/", ".."))
        assert len(name) <= 250
        assert all(len(part.encode()) <= 255 for part in name.split("/"))
    kept = [name for name in METRICS if "*" not in name]
    assert [metric_name(name) for name in kept] == kept
    assert metric_name("tools/call_frequency/add") == "tools/call_frequency.add"
    assert metric_name("reward/function/digits") == "reward/function/digits"


def test_mlflow_itself_takes_them() -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    for name in NAMES:
        validation._validate_metric_name(metric_name(name))
    with pytest.raises(Exception, match="Invalid value"):
        validation._validate_metric_name("reward/function/..")


def test_no_name_is_one_that_a_tracker_keeps_for_itself() -> None:
    """wandb keeps what begins with an underline, trackio some words; both write a table under
    `completions`."""
    words = ["project", "run", "timestamp", "step", "time", "metrics", "completions"]
    assert not set(words) & set(NAMES)
    assert not [name for name in NAMES if name.startswith("_")]
    assert fnmatch.filter(["_step"], "_*")


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READERS)
def test_each_tracker_holds_them_all(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows with every name, one handed over by a second opening, and the values come back."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("WANDB_DIR", "TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    (tmp_path / "tracking").mkdir()
    settings = {
        "mlflow": {"uri": None},
        "wandb": {"mode": "offline", "entity": None, "tags": ()},
        "trackio": {"dir": None, "space_id": None},
        "tensorboard": {},
    }
    request = {
        "run": str(tmp_path),
        "trackers": {tracker: settings[tracker]},
        "completions": 0,
        "project": "isobit",
        "name": "n",
        "group": None,
        "config": {"a": 1},
        "limit_s": 30.0,
    }
    for step in (1, 2):
        row = {"step": step, **{name: step + place / 64 for place, name in enumerate(NAMES)}}
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        done = subprocess.run(
            [sys.executable, "-m", "isobit.monitor.trackers"],
            input=f'{json.dumps(request)}\n{{"exit_code": 0}}\n',
            capture_output=True,
            text=True,
            check=False,
        )
        assert json.loads(done.stdout.splitlines()[-1]) == {"tracker": tracker, "done": step}
    stored = READERS[tracker](tmp_path)
    assert [step for step, _ in stored] == [1, 2]
    written = metric_name if tracker == "mlflow" else str
    for step, values in stored:
        last = {written(name): step + place / 64 for place, name in enumerate(NAMES)}
        assert values == pytest.approx(last, rel=1e-6)

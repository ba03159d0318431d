"""What each tracker has stored of a run, read back with the tracker's own reader: a list of (step,
metrics)."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

Stored = list[tuple[int, dict[str, float]]]


def read_tensorboard(run: Path) -> Stored:
    """As TensorBoard shows it: what a later session start purges is not there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tracking/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[tuple[int, int], dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        count: dict[int, int] = {}
        for event in events.Scalars(name):
            turn = count[event.step] = (
                count.get(event.step, -1) + 1
            )  # a step that is there twice makes two rows
            found.setdefault((event.step, turn), {})[name] = event.value
    return [(step, row) for (step, _), row in sorted(found.items())]


def wandb_records(run: Path) -> list[dict[str, Any]]:
    """Every record of a run's offline directories, in the order in which `wandb sync` takes
    them."""
    found = []
    for directory in sorted((run / "tracking/wandb/wandb").glob("offline-run-*")):
        command = [
            str(Path(sys.executable).with_name("wandb")),
            "leet",
            "inspect",
            "--json",
            str(directory),
        ]
        lines = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        found += [json.loads(line) for line in lines]
    return found


def read_wandb(run: Path) -> Stored:
    items = [r["history"]["item"] for r in wandb_records(run) if r["type"] == "history"]
    own = ("_", "completions")
    return [(i["_step"], {k: v for k, v in i.items() if not k.startswith(own)}) for i in items]


def read_trackio(run: Path) -> Stored:
    with sqlite3.connect(run / "tracking/trackio/isobit.db") as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({identity for identity, _, _ in rows}) == 1
    return [
        (s, {k: v for k, v in json.loads(values).items() if k != "completions"})
        for _, s, values in rows
    ]


def read_mlflow(run: Path) -> Stored:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run / "tracking/mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("isobit")
    assert experiment is not None
    (only,) = client.search_runs([experiment.experiment_id])
    found: dict[tuple[int, int], dict[str, float]] = {}
    for name in only.data.metrics:
        count: dict[int, int] = {}
        for metric in client.get_metric_history(only.info.run_id, name):
            turn = count[metric.step] = count.get(metric.step, -1) + 1
            found.setdefault((metric.step, turn), {})[name] = metric.value
    return [(step, row) for (step, _), row in sorted(found.items())]


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}

"""MLflow: a server's address, a database, or plain files in the run directory.

Plain files need only MLflow's client, and a variable that allows them (MLFLOW_ALLOW_FILE_STORE).
There `tools/call_frequency/add` is called `tools/call_frequency.add`, since `tools/call_frequency`
is a file. A row is written metric by metric there, so a run that goes on reads the last step of
each metric.
"""

import importlib.util
import os
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from isobit.errors import IsobitError
from isobit.monitor.trackers.base import COMPLETION_COLUMNS, Opened, TrackedRun
from isobit.run.metrics import METRICS

_MOST_PARAMETERS = 100  # MLflow's limit of one call
_LONGEST_VALUE = 6000
_LONGEST_NAME = 120  # bytes; MLflow takes 250 characters, and a file's name has at most 255 bytes
_STEMS = sorted((name[:-2] for name in METRICS if name.endswith("/*")), key=len, reverse=True)
"""The names of families of metrics, without `/*`; a family inside another comes first."""
_STATUS = {0: "FINISHED", 130: "KILLED", 143: "KILLED", 137: "KILLED"}


class MLflow:
    """The tracker that sends metrics, the config's values as parameters, and completions as JSON
    artifacts to MLflow."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise IsobitError for a database if only the client of MLflow is installed."""
        uri = settings["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or ""
        if (
            re.match(r"(sqlite|mysql|postgresql|mssql)\b", uri)
            and importlib.util.find_spec("sqlalchemy") is None
        ):
            raise IsobitError(
                "tracking.mlflow.uri: a database needs the whole of MLflow; pip install mlflow"
            )

    def open(self, run: TrackedRun) -> Opened:
        """Begin a run in MLflow, or go on with the run whose id was kept."""
        uri = run.settings["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = run.directory.resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        if run.kept:
            self._run_id = run.kept["run_id"]
            self._client.update_run(self._run_id, "RUNNING")
            names = self._client.get_run(self._run_id).data.metrics
            for name in names:
                history = self._client.get_metric_history(self._run_id, name)
                self._last[name] = max(metric.step for metric in history)
            # the row of the last step may be incomplete: it is given again, and `log` leaves out
            # the metrics that are there
            return Opened(max(self._last.values(), default=0) - 1, run.kept)
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        tags = {} if run.group is None else {"group": run.group}
        self._run_id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        values = [Param(key, value[:_LONGEST_VALUE]) for key, value in _flat(run.config)]
        for first in range(0, len(values), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=values[first : first + _MOST_PARAMETERS])
        return Opened(
            -1, {"run_id": self._run_id}, f"run {self._run_id} of experiment {run.project}"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step as one batch; metrics that were sent before are left out."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {metric_name(name): value for name, value in metrics.items()}
        rows = [
            Metric(name, value, now, step)
            for name, value in named.items()
            if self._last.get(name, -1) < step
        ]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Send the completions of a step as one artifact."""
        table = [dict(zip(COMPLETION_COLUMNS, row)) for row in rows]
        self._client.log_dict(
            self._run_id, {"completions": table}, f"completions/step-{step:06}.json"
        )

    def close(self, exit_code: int) -> None:
        """End the run in MLflow, with the status for the process's exit code."""
        self._client.set_terminated(self._run_id, _STATUS.get(exit_code, "FAILED"))


def metric_name(name: str) -> str:
    """Return the name of a metric in MLflow. Each metric is a file there, so that no metric may be
    the folder of another, and a name from elsewhere (of a tool, a tag) is one part of a path."""
    for stem in _STEMS:
        if name.startswith(f"{stem}/"):
            member = re.sub(r"[^\w.: -]", "_", name[len(stem) + 1 :].replace("/", "."))
            if len(member.encode()) > _LONGEST_NAME:
                mark = f"-{zlib.crc32(member.encode()):08x}"
                member = member.encode()[:_LONGEST_NAME].decode(errors="ignore") + mark
            if not member.strip("."):
                member = f"_{member}"
            return f"{stem}{'.' if stem in METRICS else '/'}{member}"
    return name


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return (`key.sub`, the value as text) for every value of a config that is not a section."""
    pairs: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", str(value)))
    return pairs

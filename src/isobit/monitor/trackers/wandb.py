"""Weights & Biases, online or offline.

A resumed run keeps its id. Online, the server says which step it has. Offline, each start writes a
new directory, whose steps wandb's reader lists; `wandb sync` joins those with the same id in the
order in which they started.
"""

import json
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError
from isobit.monitor.trackers.base import COMPLETION_COLUMNS, Opened, TrackedRun
from isobit.run.interpreter import module_command

_NO_CREDENTIALS = (
    "tracking.trackers: wandb has no credentials; run `wandb login`, set WANDB_API_KEY, or stay "
    "offline: WANDB_MODE=offline, or tracking.wandb.mode=offline"
)


class WeightsAndBiases:
    """The tracker Weights & Biases: history, config and completions as tables. Not logged: code,
    console."""

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise IsobitError where an online run finds no credentials; the network is not asked."""
        mode = settings["mode"] or os.environ.get("WANDB_MODE", "online")
        if mode != "online":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        try:
            known = wandb.login(prompt=False, verify=False)
        except wandb.Error as error:
            raise IsobitError(f"tracking.trackers: wandb: {error}") from None
        if not known:
            raise IsobitError(_NO_CREDENTIALS)

    def open(self, run: TrackedRun) -> Opened:
        """Begin the run, or go on with the one of the id that was kept."""
        import wandb

        identity = run.kept.get("id") or uuid.uuid4().hex[:8]
        directory = Path(os.environ.get("WANDB_DIR", run.directory))
        earlier = sorted(directory.glob(f"wandb/offline-run-*-{identity}"))
        self._run = wandb.init(
            project=run.project,
            entity=run.settings["entity"],
            name=run.name,
            group=run.group,
            tags=list(run.settings["tags"]),
            mode=run.settings["mode"],
            config=dict(run.config),
            dir=str(directory),
            id=identity,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", finish_timeout=run.limit_s),
        )
        if self._run.resumed:
            last = self._run.starting_step - 1
        else:
            last = max((_last_step(path) for path in earlier), default=run.last)
        note = self._run.url or f"wandb sync {directory}/wandb/offline-run-*-{identity}"
        return Opened(last, {"id": identity}, note)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row of the history, at once: without `commit` wandb would hold it."""
        self._run.log(dict(metrics), step=step, commit=True)

    def log_completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write a table for the step, part of its row."""
        import wandb

        table = wandb.Table(columns=list(COMPLETION_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"completions": table}, step=step, commit=False)

    def close(self, exit_code: int) -> None:
        """Send what is left; wandb gives up after its `finish_timeout` and keeps the rest for
        `wandb sync`."""
        self._run.finish(exit_code=exit_code)


def _last_step(directory: Path) -> int:
    """Return the last step of an offline directory, from wandb's own reader; -1 if it has none."""
    command = module_command("wandb", "leet", "inspect", "--json", str(directory))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return max(
        (int(r["history"]["item"]["_step"]) for r in records if r["type"] == "history"), default=-1
    )

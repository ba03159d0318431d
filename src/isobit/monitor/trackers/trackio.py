"""trackio: a SQLite file in the run directory, or a Hugging Face Space.

trackio gathers rows for half a second before it writes them, so after a kill its own file is what
counts.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from isobit.errors import IsobitError
from isobit.monitor.trackers.base import COMPLETION_COLUMNS, Opened, TrackedRun


class Trackio:
    """The tracker trackio: metrics, config and completions as tables."""

    def __init__(self) -> None:
        self._table: dict[str, Any] = {}

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise IsobitError where a Space is named and no token for it can be read."""
        if settings["space_id"] is None:
            return
        from huggingface_hub import get_token

        if get_token() is None:
            raise IsobitError(
                "tracking.trackio.space_id needs a token of Hugging Face; run `hf auth login`"
            )

    def open(self, run: TrackedRun) -> Opened:
        """Begin the run, or go on with the one of its name."""
        directory = run.settings["dir"] or os.environ.get("TRACKIO_DIR") or str(run.directory)
        os.environ["TRACKIO_DIR"] = directory  # trackio reads it once, when it is imported
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._run = trackio.init(
            project=run.project,
            name=run.name,
            group=run.group,
            space_id=run.settings["space_id"],
            config=dict(run.config),
            resume="must" if run.kept else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if run.kept and self._run.id != run.kept["id"]:
            raise IsobitError(
                f"another run was named {run.name!r} since; give each its own tracking.name"
            )
        last: int | None = run.last
        if run.settings["space_id"] is None and run.kept:
            last = SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=self._run.id)
        note = (
            run.settings["space_id"]
            or f"TRACKIO_DIR={directory} trackio show --project {run.project}"
        )
        return Opened(-1 if last is None else last, {"id": self._run.id}, note)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row of the history."""
        self._run.log({**self._table, **metrics}, step=step)
        self._table = {}

    def log_completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write a table, which becomes part of the step's row."""
        import trackio

        self._table = {
            "completions": trackio.Table(
                columns=list(COMPLETION_COLUMNS), data=[list(r) for r in rows]
            )
        }

    def close(self, exit_code: int) -> None:
        """Write or send what is left."""
        self._run.finish()

"""The interface of a tracker: open, one row of metrics per step, close.

A tracker is a copy of `metrics.jsonl`, which is written first and is complete without it. The
follower (`follow.py`) reads the file and hands over the rows after the tracker's last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

COMPLETION_COLUMNS = ("step", "prompt", "completion", "reward", "truncated")
"""The columns of a table of completions."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it.

    `directory`: for what the tracker writes; `settings`: the tracker's own section of the config;
    `config`: the run's resolved config; `kept`: what an earlier opening of this run asked to keep,
    empty at the first; `last`: the last step that was handed to the tracker, -1 if none was;
    `limit_s`: seconds that the end of the run waits.
    """

    directory: Path
    project: str
    name: str
    group: str | None
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    kept: Mapping[str, str] = field(default_factory=dict)
    last: int = -1
    limit_s: float = 15.0


@dataclass(frozen=True)
class Opened:
    """A tracker's answer to `open`. `last`: the last step that the tracker holds whole, -1 if none;
    `kept`: what finds the same run in it again, never a secret; `note`: what to tell the user, such
    as an address."""

    last: int = -1
    kept: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


class Tracker(Protocol):
    """A tracker, used by one thread. An exception ends the tracking by it, never the run."""

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise IsobitError for what can be known to be wrong before a run begins, such as missing
        credentials."""

    def open(self, run: TrackedRun) -> Opened:
        """Begin a run at the tracker, or go on with the one that `run.kept` names."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row: finite numbers under the names of `metrics.jsonl`. Returns when a kill can
        no longer undo it, or as near to that as the tracker comes."""

    def log_completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Send the completions of a step, under `COMPLETION_COLUMNS`."""

    def close(self, exit_code: int) -> None:
        """Send what is left. `exit_code`: 0 for a finished run, 128 + signal for an interrupted
        one, else failed."""

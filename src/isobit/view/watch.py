"""`isobit watch`: the same screen for any run on disk, from its files alone.

Follows metrics.jsonl and completions.jsonl.gz as they grow, and starts over where a resumed run cut them back. Ends
when the run is done, or its process has ended. Left out: anything that would write into the run directory.
"""

import fcntl
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.live import Live

from isobit.errors import IsobitError
from isobit.run.completions import COMPLETIONS, Member, lines, members, parse
from isobit.run.directory import CONFIG, LOCK, METRICS, require_run
from isobit.run.heartbeat import beats
from isobit.view.history import History, Shown
from isobit.view.screen import screen, summary

_LOOK_EVERY_S = 1.0


class GrowingRows:
    """Reads what is new in a JSONL file; `restarted` is set where the file became shorter."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.restarted = path, 0, False

    def rows(self) -> Iterator[dict[str, Any]]:
        """The whole lines since the last call."""
        self.restarted = False
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self.offset:
                self.offset, self.restarted = 0, True
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    row = json.loads(line)
                except ValueError:
                    raise IsobitError(f"{self.path}, byte {self.offset - len(line)}: not a line of JSON") from None
                yield row


class Watched:
    """A run directory, and the `history` of what has been read of it. Raises IsobitError if it is not one."""

    def __init__(self, directory: Path) -> None:
        require_run(directory)
        self.directory = directory
        self._metrics = GrowingRows(directory / METRICS)
        self._last_step = Member(0, 0)
        self.history = self._empty()

    def _empty(self) -> History:
        path = self.directory / CONFIG
        try:
            self._config_time = path.stat().st_mtime_ns
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            precision = config["precision"]
            preset = precision if isinstance(precision, str) else f"{precision['preset']}, changed"
            return History(self.directory.resolve().name, int(config["steps"]), f"{preset}, {config['consistency']}")
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
            raise IsobitError(f"{path} is not the config that a run writes") from None

    def look(self) -> int:
        """Read what is new; returns how many rows of metrics there were."""
        rows = list(self._metrics.rows())
        if self._metrics.restarted:
            self.history = self._empty()
        elif (self.directory / CONFIG).stat().st_mtime_ns != self._config_time:  # resumed with another number of steps
            self.history.total = self._empty().total
        for row in rows:
            self.history.add(row)
        self.history.ranks = beats(self.directory) if self.worked_on else ()
        if rows:
            self.history.show(self._last_completions())
        return len(rows)

    def _last_completions(self) -> list[Shown]:
        """The completions of the last step in their file, of those that are recorded whole."""
        path = self.directory / COMPLETIONS
        if self._metrics.restarted or (path.is_file() and path.stat().st_size < sum(self._last_step)):
            self._last_step = Member(0, 0)
        for member in members(path, self._last_step.start):
            self._last_step = member
        rows = map(parse, lines(path, self._last_step)) if self._last_step.length else ()
        return [Shown(r["reward"], str(r["prompt"]), r["completion"]) for r in rows if "completion" in r]

    @property
    def finished(self) -> bool:
        return self.history.step >= self.history.total

    @property
    def worked_on(self) -> bool:
        """Whether a process holds the run's lock."""
        try:
            with (self.directory / LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False


def watch(directory: Path, once: bool = False) -> None:
    """Show the run until it ends; with `once`, as it stands. Raises IsobitError if there is no run to show."""
    watched = Watched(directory)
    console = Console()
    watched.look()
    if once or not console.is_terminal:
        _print(watched, console, once)
        return
    view = screen(watched.history, console.width, console.height)
    try:
        with Live(view, console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(screen(watched.history, console.width, console.height), refresh=True)
                if watched.finished or not watched.worked_on:
                    break
                time.sleep(_LOOK_EVERY_S)
                watched.look()
    except KeyboardInterrupt:  # the run goes on without us
        return
    console.print(_ending(watched), markup=False, highlight=False)


def _print(watched: Watched, console: Console, once: bool) -> None:
    if once:
        if not watched.history.step and not watched.worked_on:
            raise IsobitError(f"{watched.directory}: no step has been recorded yet, and no process works on it")
        console.print(screen(watched.history, console.width, 1000))
        return
    print(summary(watched.history), flush=True)
    try:
        while not watched.finished and watched.worked_on:
            time.sleep(_LOOK_EVERY_S)
            if watched.look():
                print(summary(watched.history), flush=True)
    except KeyboardInterrupt:
        return
    print(_ending(watched), file=sys.stderr)


def _ending(watched: Watched) -> str:
    if watched.finished:
        return f"finished: isobit report {watched.directory}"
    return f"no process works on it; go on with: isobit train --resume {watched.directory}"

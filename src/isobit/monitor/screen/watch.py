"""`isobit watch`: the same screen for any run on disk, from its files alone.

Follows metrics.jsonl and completions.jsonl.gz as they grow, and starts over where a resumed run cut
them back. Ends when the run is done, or its process has ended. Left out: anything that would write
into the run directory.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.live import Live

from isobit.data import strict_yaml
from isobit.data.foreign import check_readable, read_bytes, reason_of
from isobit.errors import IsobitError
from isobit.monitor.screen.history import History, Shown
from isobit.monitor.screen.screen import screen, summary
from isobit.run.completions import COMPLETIONS, Member, cut_off, is_reward, lines, members, parse
from isobit.run.directory import CONFIG, METRICS, in_use, require_run
from isobit.run.ends import cut_short
from isobit.run.heartbeat import beats
from isobit.run.rows import MOST_STEPS, BadRow, metric_row, next_line, warn

_LOOK_EVERY_S, _MOST_BYTES = 1.0, 1 << 20


class GrowingRows:
    """A reader of the new rows of a metrics.jsonl; `restarted` is set where the file became
    shorter, and `lost` counts lines that are not rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.restarted, self.lost = path, 0, False, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines since the last call. Raises IsobitError if it cannot be read."""
        self.restarted = False
        try:
            size = check_readable(self.path)
            if size < self.offset:
                self.offset, self.restarted, self.lost = 0, True, 0
            with self.path.open("rb") as file:
                file.seek(self.offset)
                while (line := next_line(file)) is not None:
                    self.offset = file.tell()
                    try:
                        row = metric_row(line)
                    except BadRow:
                        self.lost += 1
                        continue
                    yield row
        except FileNotFoundError:
            return
        except OSError as error:
            raise IsobitError(f"cannot read {self.path}: {reason_of(error)}") from None


class Watched:
    """A run directory, and the `history` of what has been read of it. Raises IsobitError if it is
    not one."""

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
            config = strict_yaml.load(read_bytes(path, _MOST_BYTES).decode("utf-8"))
            precision, steps = config["precision"], config["steps"]
            preset = precision if isinstance(precision, str) else f"{precision['preset']}, changed"
            if type(steps) is not int or not 0 < steps < MOST_STEPS:
                raise ValueError
            return History(
                self.directory.resolve().name, steps, f"{preset}, {config['consistency']}"
            )
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
            raise IsobitError(f"{path} is not the config that a run writes") from None

    def look(self) -> int:
        """Read what is new; returns how many rows of metrics there were."""
        rows = list(self._metrics.rows())
        if self._metrics.restarted:
            self.history = self._empty()
        elif (
            self.directory / CONFIG
        ).stat().st_mtime_ns != self._config_time:  # resumed with another number of steps
            self.history.total = self._empty().total
        for row in rows:
            self.history.add(row)
        self.history.ranks = beats(self.directory) if self.worked_on else ()
        if rows:
            self.history.show(self._last_completions())
        return len(rows)

    def _last_completions(self) -> list[Shown]:
        """Return the completions of the last step in their file, of those that are recorded whole;
        none of a damaged one."""
        path = self.directory / COMPLETIONS
        if self._metrics.restarted or (
            path.is_file() and path.stat().st_size < sum(self._last_step)
        ):
            self._last_step = Member(0, 0)
        try:
            for member in members(path, self._last_step.start):
                self._last_step = member
            rows = list(map(parse, lines(path, self._last_step))) if self._last_step.length else []
            whole = [
                r
                for r in rows
                if isinstance(r.get("completion"), str) and is_reward(r.get("reward"))
            ]
            return [Shown(r["reward"], str(r.get("prompt") or ""), r["completion"]) for r in whole]
        except IsobitError:
            return []

    @property
    def finished(self) -> bool:
        return self.history.step >= self.history.total

    @property
    def worked_on(self) -> bool:
        """Whether a process holds the run's lock."""
        return in_use(self.directory)

    @property
    def lost(self) -> int:
        """The number of lines of metrics.jsonl that are not rows."""
        return self._metrics.lost


def watch(directory: Path, once: bool = False) -> None:
    """Show the run until it ends; with `once`, its present state. Raises IsobitError without a run
    to show."""
    watched = Watched(directory)
    console = Console()
    watched.look()
    if watched.lost:
        warn(
            f"{directory / METRICS}: rows that cannot be read: {watched.lost:,}; they are left out"
        )
    if watched.history.step and not watched.worked_on:
        for line in (cut_short(directory), cut_off(directory / COMPLETIONS)):
            if line is not None:
                warn(line)
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
            raise IsobitError(
                f"{watched.directory}: no step has been recorded yet, and no process works on it"
            )
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

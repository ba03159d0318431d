"""The process of one tracker: reads a run's `metrics.jsonl` as it grows, and hands its rows to the tracker.

The file is the queue: nothing is dropped when a tracker is slow, nothing is held in memory, and after a kill or a
failure the rows that are missing are those after the tracker's last step. That step, and what finds the same run
again, is kept in `RUN/tracking/NAME.json`.

    python -m isobit.monitor.trackers    stdin: a line {"tracker", "run", ...} to begin, a line {"exit_code"} to end
                                 stdout: lines {"note"} or {"failed"}, then {"done"} or nothing

If stdin ends without a line, the run was killed: what it has written is handed over all the same.
"""

import fcntl
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from isobit.data.foreign import check_readable, exists, reason_of
from isobit.errors import IsobitError
from isobit.monitor.trackers.base import COMPLETION_COLUMNS, Place, Tracker
from isobit.monitor.trackers.table import make_tracker
from isobit.run import durable
from isobit.run.completions import COMPLETIONS, CompletionTail
from isobit.run.directory import METRICS, object_in
from isobit.run.rows import BadRow, metric_row, next_line

TRACKING = "tracking"
_LOOK_EVERY_S = 0.5
_SPARE_S = 5.0
"""The run ends this process when its time is over, and says so; a run that was killed cannot, a little later it ends
itself."""
_KILLED = 137


class Follower:
    """A tracker that follows the files of a run directory. Use as a context manager."""

    def __init__(self, tracker: Tracker, name: str, run: Path, completions: int) -> None:
        self.tracker, self.run = tracker, run
        self.directory = run / TRACKING
        self._state_file = self.directory / f"{name}.json"
        self._name = name
        self._metrics, self._completions = Tail(run / METRICS), CompletionTail(run / COMPLETIONS)
        self._rows_wanted = completions
        self._held: dict[str, Any] | None = None
        self.last = -1
        self._kept: Mapping[str, str] = {}

    def open(self, request: Mapping[str, Any]) -> str:
        """Open the tracker where an earlier process of this run left off; returns its note."""
        state = read_state(self.run, self._name)
        fields = {key: request[key] for key in ("project", "name", "group", "settings", "config", "limit_s")}
        opened = self.tracker.open(Place(self.directory / self._name, **fields, **state))
        self.last, self._kept = opened.last, opened.kept
        self._keep()
        return opened.note

    def catch_up(self) -> None:
        """Hand over every whole row that is in the file and not in the tracker."""
        for row in self._metrics:
            step = int(row.pop("step"))
            if step <= self.last:
                continue
            if self._rows_wanted and (rows := self._rows_of(step)):
                self.tracker.log_completions(step, rows)
            self.tracker.log(step, {name: value for name, value in row.items() if value is not None})
            self.last = step
            self._keep()

    def _rows_of(self, step: int) -> list[list[Any]]:
        """The first completions of a step, which are in their file before the step's metrics are."""
        found: list[list[Any]] = []
        while (row := self._held or next(self._completions, None)) is not None:
            self._held = None
            if row["step"] > step:
                self._held = row
                break
            if row["step"] == step and len(found) < self._rows_wanted and isinstance(row.get("completion"), str):
                found.append([row.get(column) for column in COMPLETION_COLUMNS])
        return found

    def _keep(self) -> None:
        durable.write_text(self._state_file, json.dumps({"last": self.last, "kept": dict(self._kept)}) + "\n")


class Tail(Iterator[dict[str, Any]]):
    """The rows of a metrics.jsonl that grows; stops at a line that is not whole yet, and goes on from there. What is no
    row is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __next__(self) -> dict[str, Any]:
        if self._file is None:
            if not exists(self._path):
                raise StopIteration
            try:
                check_readable(self._path)
                self._file = self._path.open("rb")
            except OSError as error:
                raise IsobitError(f"cannot read {self._path}: {reason_of(error)}") from None
        while (line := next_line(self._file)) is not None:
            with suppress(BadRow):
                return metric_row(line)
        raise StopIteration


def read_state(run: Path, name: str) -> dict[str, Any]:
    """`last` and `kept` of a tracker, as an earlier process left them; empty if none did. Raises IsobitError for what
    no process has left."""
    path = run / TRACKING / f"{name}.json"
    if not exists(path):
        return {}
    found = object_in(path) or {}
    last, kept = found.get("last"), found.get("kept")
    if type(last) is not int or not isinstance(kept, dict) or not all(isinstance(v, str) for v in kept.values()):
        raise IsobitError(f"{path} cannot be read: it is not what a tracker keeps; move it away to send the run anew")
    return {"last": last, "kept": kept}


def main() -> None:
    """The process: see the module."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which says when it ends
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log, not between the replies

    def say(**values: object) -> None:
        line = json.dumps(values)
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)
        with suppress(BrokenPipeError):  # the run was killed; the log has it
            replies.write(line + "\n")

    try:
        _serve(say)
    # Whatever a tracker's library raises (each has exceptions of its own, and those of its HTTP client) ends this
    # process and nothing else; the run is told in one line, the log gets the traceback.
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        text = str(error).strip().splitlines()
        kind = "" if isinstance(error, IsobitError) else f"{type(error).__name__}: "
        say(failed=f"{kind}{text[0] if text else 'no message'}")
        sys.stderr.flush()
        os._exit(1)  # not through the exit handlers of a library that has just failed


def _serve(say: Callable[..., None]) -> None:
    lines = _Lines()
    request = lines.wait()
    assert request is not None
    name, run = request["tracker"], Path(request["run"])
    follower = Follower(make_tracker(name), name, run, request["completions"])
    with _lock(run / TRACKING / f"{name}.lock", request["limit_s"]):
        note = follower.open(request)
        if note:
            say(note=note)
        while (end := lines.poll(_LOOK_EVERY_S)) is None:
            follower.catch_up()
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + _SPARE_S)
        follower.catch_up()
        follower.tracker.close(end.get("exit_code", _KILLED))
    say(done=follower.last)


class _Lines:
    """Objects from stdin, one a line."""

    def __init__(self) -> None:
        self._received = b""

    def wait(self) -> dict[str, Any] | None:
        while (line := self.poll(None)) is None:
            pass
        return line

    def poll(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next line; {} at the end of stdin; None if there is nothing within the time."""
        if b"\n" not in self._received:
            if not select.select([0], [], [], timeout_s)[0]:
                return None
            part = os.read(0, 1 << 16)
            if not part:
                return {}
            self._received += part
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def _lock(path: Path, limit_s: float) -> Iterator[None]:
    """Exclusive use of a tracker's run; a process that a killed run left behind is waited for."""
    until = time.monotonic() + limit_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise IsobitError("another process is sending this run to it") from None
                time.sleep(0.1)
        yield


def _give_up(number: int, frame: FrameType | None) -> None:
    """The time that the end of a run may take is over."""
    os._exit(1)

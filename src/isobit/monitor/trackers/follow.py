"""The follower: one process that reads a run's `metrics.jsonl` as it grows, and feeds all trackers.

The file is the queue: nothing is dropped when a tracker is slow, nothing is held in memory, and
after a kill or a failure the rows that are missing are those after the tracker's last step. That
step, and what finds the same run again, is kept for every tracker in `RUN/tracking/state.json`.
Each tracker has a thread, so one that is slow, hangs or raises holds up no other; one that ends
the process ends them all, and never the run.

    python -m isobit.monitor.trackers
        stdin: a line {"run", "trackers", ...} to begin, a line {"exit_code"} to end
        stdout: lines {"tracker", "note" or "failed" or "done"}

If stdin ends without a line, the run was killed: what it has written is handed over all the same.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from isobit.data.foreign import check_readable, exists, reason_of
from isobit.errors import IsobitError
from isobit.monitor.trackers.base import COMPLETION_COLUMNS, TrackedRun, Tracker
from isobit.monitor.trackers.settings import make_tracker
from isobit.run import durable
from isobit.run.completions import COMPLETIONS, CompletionTail
from isobit.run.directory import METRICS, object_in
from isobit.run.outlived import outlived_stderr
from isobit.run.rows import BadRow, metric_row, next_line

TRACKING, STATE, LOG = "tracking", "state.json", "follower.log"
_LOOK_EVERY_S = 0.5
_SPARE_S = 5.0
"""The run ends this process when its time is over, and says so; a run that was killed cannot, a
little later it ends itself."""
_KILLED = 137


class State:
    """The followers' state in `state.json`: by tracker the last step sent, and what identifies the
    run there."""

    def __init__(self, run: Path) -> None:
        """Read a follower's state. Raises IsobitError for a file that no follower has written."""
        self._path = run / TRACKING / STATE
        self._lock = threading.Lock()
        stored = object_in(self._path) or {}
        if exists(self._path) and not (stored and all(map(_is_state, stored.values()))):
            raise IsobitError(
                f"{self._path} cannot be read: it is not what trackers keep; move it away to "
                "send the run anew"
            )
        self._of = stored

    def of(self, name: str) -> dict[str, Any]:
        """Return `last` and `kept` of a tracker; empty if it never opened the run."""
        return dict(self._of.get(name, {}))

    def keep(self, name: str, last: int, kept: Mapping[str, str]) -> None:
        """Replace a tracker's state, on the disk too."""
        with self._lock:
            self._of[name] = {"last": last, "kept": dict(kept)}
            durable.write_text(self._path, json.dumps(self._of) + "\n")


def _is_state(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("last")) is not int:
        return False
    values = value.get("kept")
    return isinstance(values, dict) and all(isinstance(entry, str) for entry in values.values())


class Follower:
    """A tracker that follows the files of a run directory."""

    def __init__(
        self, tracker: Tracker, name: str, run: Path, completions: int, state: State
    ) -> None:
        self.tracker, self.name, self.run = tracker, name, run
        self._state = state
        self._metrics = Tail(run / METRICS)
        self._completions = CompletionTail(run / COMPLETIONS)
        self._rows_wanted = completions
        self._held: dict[str, Any] | None = None
        self.last = -1
        self._kept: Mapping[str, str] = {}

    def open(self, request: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Open the tracker where an earlier follower of this run left off; returns its note."""
        shared = {key: request[key] for key in ("project", "name", "group", "config", "limit_s")}
        directory = self.run / TRACKING / self.name
        state = self._state.of(self.name)
        opened = self.tracker.open(TrackedRun(directory, settings=settings, **shared, **state))
        self.last, self._kept = opened.last, opened.kept
        self._state.keep(self.name, self.last, self._kept)
        return opened.note

    def catch_up(self) -> None:
        """Hand over every whole row that is in the file and not in the tracker."""
        for row in self._metrics:
            step = int(row.pop("step"))
            if step <= self.last:
                continue
            if self._rows_wanted and (rows := self._rows_of(step)):
                self.tracker.log_completions(step, rows)
            self.tracker.log(step, {name: v for name, v in row.items() if v is not None})
            self.last = step
            self._state.keep(self.name, self.last, self._kept)

    def _rows_of(self, step: int) -> list[list[Any]]:
        """Return the first completions of a step, which are written before its metrics."""
        rows: list[list[Any]] = []
        while (row := self._held or next(self._completions, None)) is not None:
            self._held = None
            if row["step"] > step:
                self._held = row
                break
            whole = row["step"] == step and isinstance(row.get("completion"), str)
            if whole and len(rows) < self._rows_wanted:
                rows.append([row.get(column) for column in COMPLETION_COLUMNS])
        return rows


class Tail(Iterator[dict[str, Any]]):
    """The rows of a metrics.jsonl that grows; stops at an unfinished line, and goes on from there.
    Invalid rows are left out."""

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


class _Replies:
    """The messages to the run, from any thread; the log has them too."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print goes to the log, not between the replies
        self._lock = threading.Lock()

    def say(self, **values: object) -> None:
        line = json.dumps(values)
        with self._lock, suppress(BrokenPipeError):  # the run was killed
            print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)
            self._file.write(line + "\n")


class _Feed(threading.Thread):
    """The thread of one tracker. `over` is set when the run has ended; then `exit_code` is too."""

    def __init__(
        self, name: str, request: Mapping[str, Any], state: State, say: Callable[..., None]
    ) -> None:
        super().__init__(daemon=True)
        self.tracker, self._request, self._state, self._say = name, request, state, say
        self.over = threading.Event()
        self.exit_code = 0
        self.failed = False

    def run(self) -> None:
        try:
            self._feed()
        # Whatever a tracker's library raises (each has exceptions of its own, and those of its
        # HTTP client) ends this tracker and nothing else; the log gets the traceback.
        except Exception as error:
            self.failed = True
            sys.excepthook(*sys.exc_info())
            self._say(tracker=self.tracker, failed=_told(error))

    def _feed(self) -> None:
        request = self._request
        run, settings = Path(request["run"]), request["trackers"][self.tracker]
        tracker = make_tracker(self.tracker)
        follower = Follower(tracker, self.tracker, run, request["completions"], self._state)
        if note := follower.open(request, settings):
            self._say(tracker=self.tracker, note=note)
        while not self.over.wait(_LOOK_EVERY_S):
            follower.catch_up()
        follower.catch_up()
        tracker.close(self.exit_code)
        self._say(tracker=self.tracker, done=follower.last)


def main() -> None:
    """Run the follower's process, as the module describes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which says when it ends
        signal.signal(number, signal.SIG_IGN)
    replies, request = _Replies(), json.loads(sys.stdin.readline())
    with outlived_stderr():  # a full disk costs the log, and not what is sent
        failed = _served(request, replies)
    if failed:
        sys.stderr.flush()
        os._exit(1)  # not through the exit handlers of a library that has just failed


def _served(request: Mapping[str, Any], replies: _Replies) -> bool:
    try:
        with _lock(Path(request["run"]) / TRACKING / "lock", request["limit_s"]):
            return _follow(request, replies.say)
    except IsobitError as error:
        for name in request["trackers"]:
            replies.say(tracker=name, failed=_told(error))
        return True


def _follow(request: Mapping[str, Any], say: Callable[..., None]) -> bool:
    """Feed all trackers until the run has ended. Return whether any of them failed."""
    state = State(Path(request["run"]))
    feeds = [_Feed(name, request, state, say) for name in request["trackers"]]
    for feed in feeds:
        feed.start()
    line = sys.stdin.readline()  # no whole one: the run was killed
    exit_code = json.loads(line)["exit_code"] if line.endswith("\n") else _KILLED
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + _SPARE_S)
    for feed in feeds:
        feed.exit_code = exit_code
        feed.over.set()
    for feed in feeds:
        feed.join()
    return any(feed.failed for feed in feeds)


@contextmanager
def _lock(path: Path, limit_s: float) -> Iterator[None]:
    """Hold the lock of a run's one follower; a killed run's follower is waited for."""
    until = time.monotonic() + limit_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise IsobitError("another process is sending this run to trackers") from None
                time.sleep(0.1)
        yield


def _told(error: Exception) -> str:
    """Return an exception as one line of text."""
    text = str(error).strip().splitlines()
    kind = "" if isinstance(error, IsobitError) else f"{type(error).__name__}: "
    return f"{kind}{text[0] if text else 'no message'}"


def _give_up(number: int, frame: FrameType | None) -> None:
    """End the process: the time that the end of a run may take is over."""
    os._exit(1)

"""The run's side of tracking: starts the follower, passes its messages on, ends it.

Nothing here waits for a tracker while steps are made: the follower reads `metrics.jsonl` itself
(`follow.py`). Only the end of the run waits, `close_s` seconds at most.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import isobit
from isobit.errors import IsobitError
from isobit.monitor.trackers.follow import LOG, TRACKING, State
from isobit.monitor.trackers.settings import make_tracker
from isobit.run.directory import METRICS, read_jsonl
from isobit.run.interpreter import module_command

_INTERRUPTED = 130


def check_trackers(settings: Mapping[str, Any]) -> None:
    """Raise IsobitError for what is wrong before a run begins: a library that is not installed, no
    credentials."""
    for name in settings["trackers"]:
        make_tracker(name).check(settings.get(name, {}))


class Trackers:
    """The trackers of an open run. Use as a context manager.

    `settings` is the config's `tracking` section, `config` the whole of it, both as plain values.
    `exit_code` is asked when the run ends without an exception. `say` shows a line that is of
    interest, such as an address.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        config: Mapping[str, Any],
        run: Path,
        exit_code: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._config, self._run = settings, config, run
        self._exit_code, self._say = exit_code, say
        self._open = list(settings["trackers"])
        """Trackers that have neither failed nor got everything."""
        self.failed = False
        self._received = b""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Trackers":
        if not self._open:
            return self
        try:
            for name in self._open:
                (self._run / TRACKING / name).mkdir(parents=True, exist_ok=True)
            self._process = self._start()
        except OSError as error:
            self._fail_all(f"cannot start its process: {error.strerror}")
            return self
        os.set_blocking(self._out.fileno(), False)
        self._tell(
            {
                "run": str(self._run),
                "project": self._settings["project"],
                "name": self._settings["name"] or self._run.resolve().name,
                "group": self._settings["group"],
                "completions": self._settings["completions"],
                "limit_s": self._settings["close_s"],
                "trackers": {name: self._settings.get(name, {}) for name in self._open},
                "config": self._config,
            }
        )
        return self

    def _start(self) -> "subprocess.Popen[bytes]":
        source = str(Path(isobit.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with (self._run / TRACKING / LOG).open("ab") as log:
            return subprocess.Popen(
                module_command("isobit.monitor.trackers"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C in the terminal is the run's
            )

    @property
    def _out(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout

    def poll(self) -> None:
        """Pass on what the follower has said so far. Returns at once."""
        if self._process is None or not self._open:
            return
        ended = self._process.poll() is not None
        with suppress(BlockingIOError):
            while chunk := os.read(self._out.fileno(), 1 << 16):
                self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._heard(json.loads(line))
        if ended:
            self._fail_all(f"its process ended unexpectedly ({self._process.returncode})")

    def _heard(self, message: Mapping[str, Any]) -> None:
        name = message["tracker"]
        if "note" in message:
            self._say(f"{name}: {message['note']}")
        elif "failed" in message:
            self._fail(name, message["failed"])
        else:
            self._open.remove(name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process is None:
            return
        self._tell({"exit_code": self._exit_code() if kind is None else 1})
        until = time.monotonic() + self._settings["close_s"]
        while self._open and time.monotonic() < until:
            self.poll()
            time.sleep(0.01)
        self._fail_all("the time to send what is left (tracking.close_s) is over")
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # also what libraries have started
            self._process.wait()
        self._out.close()

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `poll` says so
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _fail_all(self, reason: str) -> None:
        for name in list(self._open):
            self._fail(name, reason)

    def _fail(self, name: str, reason: str) -> None:
        """Print once, on stderr, also with --quiet, that a tracker failed; nothing more is sent to
        it."""
        self._open.remove(name)
        self.failed = True
        last = -1
        with suppress(IsobitError):
            last = State(self._run).of(name).get("last", -1)
        sent = "nothing was sent to it" if last < 0 else f"it has the run up to step {last}"
        print(
            f"isobit: tracker {name}: {reason}; {sent}; `isobit track {self._run}` sends the rest",
            file=sys.stderr,
            flush=True,
        )


def send_run(run: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Bring the trackers of a run that is over up to date. Returns an exit code: 1 if one did not
    take everything.

    Raises IsobitError as `check_trackers` does.
    """
    check_trackers(settings)
    last = max((int(row["step"]) for row in read_jsonl(run / METRICS)), default=-1)
    ended = 0 if last >= config["steps"] else _INTERRUPTED
    with Trackers(settings, config, run, exit_code=lambda: ended, say=print) as trackers:
        pass
    return int(trackers.failed)

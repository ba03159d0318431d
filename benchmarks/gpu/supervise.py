"""A stage's process, watched from outside: one that says nothing for too long is ended with all
that it has started, what it was doing has failed, and another process goes on with the next case.

A kernel that never ends cannot be left by the process that waits for it. So every case is announced
before it runs (`Bench.case`), and the file of results shows from outside that cases end. Left out:
what a stage does, and in which order stages run.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.common import GPU_LOST
from benchmarks.gpu.results import Line, Results

LEAST_S = 15.0
"""A stage with less is left for the next call."""
_MOST_HANGS = 3
"""Of one stage in one call: the GPU may be what hangs."""
_POLL_S = 0.25
_KILL_S = 20.0


@dataclass(frozen=True)
class Limits:
    """Seconds that a stage plans for, those after which its call ends (`time.perf_counter`), and
    those without a new line of results after which its process is ended."""

    seconds: float
    end: float
    silence: float


def run_stage(
    name: str, command: Callable[[float], Sequence[str]], limits: Limits, results: Results
) -> str:
    """Run a stage to its end, in one process after the other; how it ended. `command` makes a
    process's words, of the seconds that it may plan for."""
    started, hangs = time.perf_counter(), 0

    def left() -> float:
        return limits.seconds - (time.perf_counter() - started)

    while True:
        most = max(limits.end - time.perf_counter(), LEAST_S)
        limit = max(min(1.25 * left(), most), LEAST_S)
        status, stopped = watched(command(left()), results.path, limit, limits.silence, most)
        opened = results.open_cases(name)
        if stopped == "late":
            for line in opened:
                why = f"the stage was stopped after {limit:.0f} s"
                results.case(name, line["case"], "cut", why=why)
            return f"stopped after {limit:.0f} s"
        if stopped == "silent":
            hangs += 1
            said = f"no result in {limits.silence:.0f} s: its process was ended"
            if not _fail(name, opened, "hang", said, results):
                return f"stopped: outside of any case it said nothing for {limits.silence:.0f} s"
            if hangs == _MOST_HANGS:
                return f"stopped: {hangs} cases hung; the others are left for the next call"
        elif not opened:
            if status in (0, 1):
                return "ended" if status == 0 else "ended, with failures"
            if status != GPU_LOST:
                return f"failed with exit status {status}"
        else:
            _fail(name, opened, "process", f"it ended with status {status}", results)
        if left() < LEAST_S:
            return "stopped: a process was lost, and the time is spent"


def _fail(stage: str, opened: Sequence[Line], error: str, message: str, results: Results) -> bool:
    """Record that the open cases have failed; whether there were any. One around others is run
    again for those that are left."""
    inner = [line for line in opened if not line.get("around")]
    for line in opened:
        if inner and line.get("around"):
            results.case(stage, line["case"], "cut", why=message)
        else:
            what = {"contestant": "the case", "error": error, "message": message}
            results.case(stage, line["case"], "failed", failures=[what])
    return bool(opened)


def watched(
    command: Sequence[str], file: Path, limit: float, silence: float, most: float | None = None
) -> tuple[int | None, str]:
    """(exit status, nothing) of a process; or (None, "late" or "silent"), where it and all that it
    has started were ended: after `limit` seconds with the next growth of the file, or after
    `silence` without; in any case after `most`, if not given `limit`. So a case that hangs when the
    limit comes is known to, and one that does not comes to its end."""
    most = limit if most is None else most
    process = subprocess.Popen(command, start_new_session=True)
    started = grown = time.monotonic()
    size = -1
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S), ""
            now, found = time.monotonic(), file.stat().st_size if file.exists() else 0
            more = found != size
            if more:
                size, grown = found, now
            if now - started > most or (now - started > limit and more):
                return None, "late"
            if now - grown > silence:
                return None, "silent"
    finally:
        end_group(process)


def end_group(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """End a process, the first of its session, with all that it has started. One that the driver
    holds may outlive it: nobody waits for that."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)

"""What each rank of a run is doing, in files that `isobit watch` reads: `logs/rank-00003.json`.

One object: `rank`, `host`, `pid`, `step`, `phase`, `since` (of the phase, seconds since 1970),
`memory_mib`. A run of one process has none. Left out: deciding from it that a rank is dead, which
the ranks find out by themselves.
"""

import json
import os
import platform
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from isobit.data.foreign import BadJson, parse_json, read_bytes

LOGS = "logs"
_EVERY_S = 0.5
_MOST_BYTES, _MOST_RANKS, _LARGEST = 1 << 16, 4096, 1e15
_KINDS = {"rank": int, "host": str, "step": int, "phase": str, "since": float, "memory_mib": float}


def log_path(run: Path, rank: int) -> Path:
    """Return the file for the printed lines of a rank that has no screen."""
    return run / LOGS / f"rank-{rank:05d}.log"


class Heartbeat:
    """The sign of life of one rank of `size`: a file with its step and phase. `step()` returns the
    last finished step."""

    def __init__(self, run: Path, rank: int, size: int, step: Callable[[], int]) -> None:
        self._path, self._rank, self._step = run / LOGS / f"rank-{rank:05d}.json", rank, step
        self._active, self._phase, self._written = size > 1, "", float("-inf")
        if self._active:
            self._path.parent.mkdir(exist_ok=True)

    def beat(self, phase: str) -> None:
        """Write that a phase has begun; a phase that repeats is written at most every `_EVERY_S`
        seconds. A disk that cannot take the file does not end the run."""
        now = time.monotonic()
        if not self._active or (phase == self._phase and now - self._written < _EVERY_S):
            return
        self._phase, self._written = phase, now
        values = {
            "rank": self._rank,
            "host": platform.node(),
            "pid": os.getpid(),
            "step": self._step(),
            "phase": phase,
            "since": round(time.time(), 1),
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            partial.write_text(json.dumps(values) + "\n")
            os.replace(partial, self._path)


def beats(run: Path) -> list[dict[str, Any]]:
    """Return the newest sign of life of every rank, by rank; empty for a run of one process. Files
    with other contents are left out."""
    newest = []
    for path in sorted((run / LOGS).glob("rank-*.json"))[:_MOST_RANKS]:
        with suppress(OSError, UnicodeDecodeError, BadJson):
            beat = parse_json(read_bytes(path, _MOST_BYTES).decode("utf-8"))
            if isinstance(beat, dict) and all(
                _is(beat.get(name), kind) for name, kind in _KINDS.items()
            ):
                newest.append(beat)
    return newest


def _is(value: Any, kind: type) -> bool:
    number = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -_LARGEST < value < _LARGEST
    )
    return isinstance(value, str) if kind is str else number

"""What became of a case: ok, refused in one clear line, failed, or a hang that a watchdog has
ended."""

import contextlib
import io
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobit.errors import LEFT_OUT, IsobitError


class Hang(BaseException):
    """The watchdog's: nothing that is tested may catch it."""


def outcome(case: Callable[[], str], seconds: float) -> tuple[str, str]:
    """(ok, refused, failed or hang; what was found). A traceback that is only printed is a failure
    too."""

    def alarm(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            what = case()
        return (
            ("failed", said.getvalue()[-300:]) if "Traceback" in said.getvalue() else ("ok", what)
        )
    except IsobitError as error:
        text = str(error)
        clear = text and "\n" not in text and LEFT_OUT not in text
        return ("refused", text) if clear else ("failed", f"not one clear line: {text[:300]!r}")
    except Hang:
        return "hang", _place(sys.exc_info()[2])
    except BaseException as error:  # also a panic of a library in Rust
        if isinstance(error, KeyboardInterrupt):
            raise
        message = " ".join(str(error).split())[:200]
        return "failed", f"{type(error).__name__}: {message} {_place(error.__traceback__)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(trace: Any) -> str:
    frames = [f for f in traceback.extract_tb(trace) if "/isobit/" in f.filename]
    if not frames:
        return "(elsewhere)"
    return f"({Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name})"


def some_seconds(
    outcome_of: Callable[[int], tuple[str, str]], seed: int, seconds: float, most: int
) -> dict[str, int]:
    """How many of the cases from a seed on were read and were refused; AssertionError at any other
    outcome."""
    until, counts = time.monotonic() + seconds, dict.fromkeys(("ok", "refused"), 0)
    for number in range(seed, seed + most):
        if time.monotonic() > until:
            break
        kind, what = outcome_of(number)
        assert kind in counts, f"seed {number}: {what}"
        counts[kind] += 1
    return counts


def put_no_file(file: Path, rng: random.Random) -> None:
    """Something that is no file, or nothing, in the place of one."""
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind < 5:
        file.symlink_to(("/dev/zero", "/nowhere", file.name)[kind - 2])

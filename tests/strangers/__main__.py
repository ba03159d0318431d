"""The command: `python -m tests.strangers --cases N --seed S`; a case that fails is printed with how to repeat it."""

import argparse
import contextlib
import io
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from isobit.errors import LEFT_OUT, IsobitError

CASE_SECONDS = 60


class Hang(BaseException):
    """The watchdog's: no command may catch it."""


def outcome(folder: Path, seed: int) -> tuple[str, str]:
    """(ok, refused, failed or hang; what was found) of one case."""
    from . import cases

    def alarm(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            what = cases.run(folder, seed)
        return ("failed", said.getvalue()[-300:]) if "Traceback" in said.getvalue() else ("ok", what)
    except IsobitError as error:
        text = str(error)
        clear = text and "\n" not in text and LEFT_OUT not in text
        return ("refused", text) if clear else ("failed", f"not one clear line: {text[:300]!r}")
    except Hang:
        return "hang", _place(sys.exc_info()[2])
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]} {_place(error.__traceback__)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(trace: Any) -> str:
    frames = [f for f in traceback.extract_tb(trace) if "/isobit/" in f.filename]
    return f"({Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name})" if frames else "(elsewhere)"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if anything failed."""
    from tests.models import tiny_model

    from . import cases

    parser = argparse.ArgumentParser("python -m tests.strangers", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    counts = dict.fromkeys(("ok", "refused", "failed", "hang"), 0)
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        tiny_model().save(Path(folder) / "model")
        cases.write_valid(Path(folder), Path(folder) / "model")
        for seed in range(given.seed, given.seed + given.cases):
            kind, what = outcome(Path(folder), seed)
            counts[kind] += 1
            if kind in ("failed", "hang"):
                print(f"{kind.upper()} seed {seed}: {what}", flush=True)
    print(counts)
    return 1 if counts["failed"] or counts["hang"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""The command: cases in a separate process, which is watched, ended where it hangs, and started
again."""

import argparse
import contextlib
import json
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import outcome as outcomes

CASE_SECONDS, SILENT_SECONDS, MEMORY_BYTES = 20, 60, 12 << 30


def outcome(folder: Path, seed: int) -> tuple[str, str]:
    """(ok, refused, failed or hang; what was found) of one case."""
    from . import cases

    return outcomes.outcome(lambda: cases.run(folder, seed), CASE_SECONDS)


def serve(first: int, last: int) -> None:
    """Run the cases; a line before and after each."""
    from isobit.model.text import chat

    from . import cases

    chat.CPU_SECONDS = 1
    resource.setrlimit(
        resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    with tempfile.TemporaryDirectory(prefix="loaders-") as folder:
        cases.write_valid(Path(folder))
        for seed in range(first, last):
            print(json.dumps([seed]), flush=True)
            print(json.dumps([seed, *outcome(Path(folder), seed)]), flush=True)


def fuzz(first: int, count: int) -> Iterator[tuple[int, str, str]]:
    """(seed, outcome, what) of every case."""
    seed, last = first, first + count
    while seed < last:
        command = [sys.executable, "-m", "tests.loaders", "--serve", str(seed), str(last)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            began = False
            while True:
                ready = select.select([process.stdout], [], [], SILENT_SECONDS)[0]
                line = process.stdout.readline() if ready else ""
                if not line:
                    break
                found = json.loads(line)
                seed, began = found[0], len(found) == 1
                if len(found) == 3:
                    yield seed, found[1], found[2]
                    seed += 1
            if seed < last or began:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                errors = process.stderr.read()[-500:] if ready else ""
                assert began, f"the cases cannot be run: {errors}"
                what = "no answer" if not ready else f"the process ended: {errors}"
                yield seed, "hang" if not ready else "failed", what
                seed += 1


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if anything failed."""
    parser = argparse.ArgumentParser("python -m tests.loaders", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(*given.serve)
        return 0
    counts = dict.fromkeys(("ok", "refused", "failed", "hang"), 0)
    for number, (seed, kind, what) in enumerate(fuzz(given.seed, given.cases), 1):
        counts[kind] += 1
        if kind in ("failed", "hang"):
            print(
                f"{kind.upper()} seed {seed}: {what}; repeat: python -m tests.loaders --cases 1 "
                f"--seed {seed}",
                flush=True,
            )
        if number % 10_000 == 0:
            print(f"{number:,} cases: {counts}", flush=True)
    total = sum(counts.values())
    found = f"{counts['failed']} failures, {counts['hang']} hangs"
    print(f"{total} cases, {counts['ok']} read, {counts['refused']} refused, {found}")
    return 1 if counts["failed"] or counts["hang"] else 0


if __name__ == "__main__":
    sys.exit(main())

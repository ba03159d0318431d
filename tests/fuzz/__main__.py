"""The command: cases one after the other until the time or the count is reached, one line for each
failure."""

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import draw
from .check import check

BACKENDS = ("native", "reference")


@dataclass
class Totals:
    cases: int = 0
    failures: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.cases} cases, {self.failures} failures, {self.tokens} tokens compared"


def fuzz(
    backend: str,
    seed: int,
    minutes: float | None = None,
    cases: int | None = None,
    say: Callable[[str], None] = print,
) -> Totals:
    """Run the cases of seed, seed + 1, ... and say what failed; the first is run whatever the
    time."""
    assert minutes is not None or cases is not None
    totals, threads, start = Totals(), torch.get_num_threads(), time.monotonic()
    try:
        while totals.cases < (cases or sys.maxsize):
            if minutes is not None and totals.cases and time.monotonic() - start > 60 * minutes:
                break
            _run(backend, seed + totals.cases, totals, say)
    finally:
        torch.set_num_threads(threads)
    return totals


def _run(backend: str, seed: int, totals: Totals, say: Callable[[str], None]) -> None:
    case = draw(seed)
    totals.cases += 1
    try:
        found = check(case, backend)
        totals.tokens += found.tokens
        differences = found.differences
    except (
        Exception
    ) as error:  # a crash is what a fuzzer looks for: said with its seed, and the next case is run
        differences = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    if differences:
        totals.failures += 1
        repeat = f"python -m tests.fuzz --backend {backend} --seed {seed} --cases 1"
        say(f"FAILED seed {seed}: {'; '.join(differences)} ({case}); repeat: {repeat}")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if anything failed."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, help="stop after so long (default: 1, unless --cases is given)"
    )
    parser.add_argument("--cases", type=int, help="stop after so many cases")
    parser.add_argument("--seed", type=int, help="of the first case (default: any)")
    parser.add_argument("--backend", choices=BACKENDS, default="native")
    given = parser.parse_args(arguments)
    minutes = 1.0 if given.minutes is None and given.cases is None else given.minutes
    seed = secrets.randbelow(10**9) if given.seed is None else given.seed
    print(f"backend {given.backend}, cases from seed {seed} on", flush=True)
    totals = fuzz(given.backend, seed, minutes, given.cases, lambda line: print(line, flush=True))
    print(totals)
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())

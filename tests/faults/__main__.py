"""`python -m tests.faults`: every write of a short run fails, in every way, and the power goes at
every moment.

    python -m tests.faults [--states N] [--points N] [--seed N]    default: all of them, some tens of minutes

Prints a table: fault, injected, survived, lost. Exit code 1 if anything was lost.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.models import tiny_model

from .crash import after_a_cut, kinds_of_loss
from .runs import KINDS, Place


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--states", type=int, help="states of the disk after a power cut, of each kind of loss"
    )
    parser.add_argument(
        "--points", type=int, help="places at which a call fails, of each kind of failure"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save(Path(folder) / "model")
        place = Place(Path(folder), Path(folder) / "model")
        lines = [*cuts(place, given.states, given.seed), *failures(place, given.points, given.seed)]
    print(
        f"a run of {len(place.changes)} writes; {len(place.outcomes)} different disks after a cut"
    )
    print(f"{'fault':40} injected survived lost")
    for name, injected, lost in lines:
        print(f"{name:40} {injected:8} {injected - len(lost):8} {len(lost):4}")
        for line in lost[:3]:
            print(f"    {line}")
    return int(any(lost for _, _, lost in lines))


def cuts(place: Place, states: int | None, seed: int) -> list[tuple[str, int, list[str]]]:
    """(kind of loss, how often, what was lost) of power cuts."""
    lines = []
    for name, keep in kinds_of_loss(seed):
        moments = _some(len(place.changes), states, seed)
        found = [
            (moment, place.cut(after_a_cut(place.changes[:moment], keep))) for moment in moments
        ]
        lost = [f"after write {moment}: {what}" for moment, what in found if what is not None]
        lines.append((f"power cut: {name}", len(moments), lost))
    return lines


def failures(place: Place, points: int | None, seed: int) -> list[tuple[str, int, list[str]]]:
    """(kind of failure, how often, what was lost) of calls that fail."""
    lines = []
    for kind in KINDS:
        numbers = _some(len(place.changes), points, seed)
        found = [(number, place.faulty(number, kind)) for number in numbers]
        lost = [f"write {number}: {what}" for number, what in found if what is not None]
        lines.append((f"a write: {kind}", len(numbers), lost))
    return lines


def _some(count: int, wanted: int | None, seed: int) -> list[int]:
    everything = range(1, count + 1)
    return (
        list(everything)
        if wanted is None
        else sorted(Random(seed).sample(everything, min(wanted, count)))
    )


if __name__ == "__main__":
    sys.exit(main())

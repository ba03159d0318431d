"""The command of a benchmark that counts machine code or bytes: its table, and a file with what was
counted before a change beside what is counted now. Nothing is measured."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Counts = dict[str, dict[str, Any]]


def before_and_now(
    name: str, text: str, counted: Callable[[], Counts], table: Callable[[dict[str, Counts]], str]
) -> None:
    """`python -m benchmarks.NAME [--out DIR]`: prints the table, and writes DIR/NAME.json, whose
    counts of before stay."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=text.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"also write {name}.json there")
    arguments = parser.parse_args()
    results: dict[str, Counts] = {"before": {}, "now": counted()}
    place = None if arguments.out is None else arguments.out / f"{name}.json"
    if place is not None and place.exists():
        results["before"] = json.loads(place.read_text(encoding="utf-8"))["before"]
    print(table(results))
    if place is not None:
        place.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

"""What the command lines of all experiments have: the module's name and text, and JSON that goes to
`--out`."""

import argparse
import json
from pathlib import Path
from typing import Any


def command(module: str, text: str | None, out: str = "JSON") -> argparse.ArgumentParser:
    """The parser of an experiment, by its module's `__file__` and `__doc__`; `out` says what the
    file is."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.experiments.{Path(module).stem}", description=text
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=out)
    return parser


def of_a_model(parser: argparse.ArgumentParser) -> None:
    """Take a model, and prompts that it completes."""
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="may be given several times",
    )


def write(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

"""Rows of a run's JSONL files, as they may have become: what cannot be read costs its row, and one
line says so.

A file may be a stranger's, cut by a full disk, or edited. A row of metrics is an object with a
`step` and numbers; text, lists, garbage, bytes that are no UTF-8 and lines without end are none.
Readers go on after them, so a log never stands in the way of weights that are sound. Half a line at
the end is that of a run that was killed, and is not said.
"""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from isobit.data.foreign import BadJson, check_readable, exists, parse_json, reason_of
from isobit.errors import IsobitError, brief

LONGEST = 1 << 24
"""Bytes of a line; a row of many tensors has some thousands."""
LARGEST = 1e100
"""Of a number: squares and sums of such are still finite. No metric comes near it."""
MOST_STEPS = 1 << 40
Say = Callable[[str], None]


class BadRow(Exception):
    """Why a line is no row."""


def warn(line: str) -> None:
    """On stderr, as the command says what it leaves out."""
    print(f"isobit: {IsobitError(line)}", file=sys.stderr)


def metric_row(line: bytes) -> dict[str, float | None]:
    """A line of metrics.jsonl; numbers that are not finite become None. Raises BadRow."""
    row = _object(line)
    check_step(row)
    return {name: _number(name, value) for name, value in row.items()}


def quantization_row(line: bytes) -> dict[str, Any]:
    """A line of quantization.jsonl: figures by tensor, each a list over the layers. Raises
    BadRow."""
    row = _object(line)
    check_step(row)
    tensors = row.get("tensors")
    if not isinstance(tensors, dict):
        raise BadRow("tensors is no object")
    found = {}
    for tensor, figures in tensors.items():
        if not isinstance(figures, dict) or not all(
            isinstance(values, list) for values in figures.values()
        ):
            raise BadRow(f"{brief(tensor)} has no figures")
        found[tensor] = {
            name: [_number(name, value) for value in values] for name, values in figures.items()
        }
    return {"step": row["step"], "tensors": found}


def read_rows(
    path: Path, parse: Callable[[bytes], dict[str, Any]], say: Say = warn
) -> Iterator[dict[str, Any]]:
    """The rows of a file that are rows; `say` is given a line about the others, at the end. Raises
    IsobitError where there is no file, or none that may be read."""
    lost, first = 0, ""
    for number, (line, _) in enumerate(_lines(path), 1):
        try:
            yield parse(line)
        except BadRow as error:
            lost += 1
            first = first or f"line {number}: {error}"
    if lost:
        rows = "1 row" if lost == 1 else f"{lost:,} rows"
        say(f"{path}: {rows} cannot be read and left out; {first}")


def kept_until(path: Path, step: int) -> tuple[int, int]:
    """(bytes, rows) of a metrics.jsonl up to its last row of a step that is not after `step`; (0,
    0) without a file."""
    end = rows = found = 0
    if not exists(path):
        return 0, 0
    for line, place in _lines(path):
        try:
            row = metric_row(line)
        except BadRow:
            continue
        rows += 1
        if (row["step"] or 0) <= step:
            end, found = place, rows
    return end, found


def end_of_lines(path: Path) -> int:
    """Where the last whole line of a file ends; 0 without a file."""
    return max((place for _, place in _lines(path)), default=0) if exists(path) else 0


def next_line(file: IO[bytes]) -> bytes | None:
    """The next whole line of an open file; None at its end, or where it is not whole yet: the place
    stays. Of a line that is longer than any row its newline alone is returned."""
    start = file.tell()
    line = part = file.readline(LONGEST)
    while len(part) == LONGEST and not part.endswith(b"\n"):
        line = part = file.readline(LONGEST)
        if part.endswith(b"\n"):
            line = b"\n"
    if line.endswith(b"\n"):
        return line
    file.seek(start)
    return None


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Every whole line, and where it ends."""
    try:
        check_readable(path)
        with path.open("rb") as file:
            while (line := next_line(file)) is not None:
                yield line, file.tell()
    except OSError as error:
        raise IsobitError(f"cannot read {path}: {reason_of(error)}") from None


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRow("not UTF-8 text") from None
    except BadJson as error:
        raise BadRow(f"not valid JSON: {error.reason}") from None
    if not isinstance(found, dict):
        raise BadRow(f"not an object: {brief(found, 60)}")
    return found


def check_step(row: dict[str, Any]) -> None:
    """Raise BadRow unless a row says its step, a whole number; it is kept as it stands."""
    step = row.get("step")
    if (
        isinstance(step, bool)
        or not isinstance(step, (int, float))
        or not 0 <= step < MOST_STEPS
        or step != int(step)
    ):
        raise BadRow(f"step is {brief(repr(step), 60)}, expected a whole number")


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRow(f"{brief(name, 60)} is {brief(repr(value), 60)}, expected a number")
    if not math.isfinite(value):
        return None
    if abs(value) > LARGEST:
        raise BadRow(f"{brief(name, 60)} is {value:.3g}")
    return value

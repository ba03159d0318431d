"""Rows of a run's JSONL files, which may be damaged: a line that cannot be read is left out, and one
warning counts them.

A file may be a stranger's, cut by a full disk, or edited. A row of metrics is an object with a
`step` and numbers; text, lists, garbage, bytes other than UTF-8 and lines without end are not.
Readers go on after them, so a log never stands in the way of weights that are sound. Half a line at
the end is that of a run that was killed, and is not counted.
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
    """Raised for a line that is not a row; the message is the reason."""


def warn(line: str) -> None:
    """Print a warning on stderr, as commands do about rows that they leave out."""
    print(f"isobit: {IsobitError(line)}", file=sys.stderr)


def metric_row(line: bytes) -> dict[str, float | None]:
    """Read a line of metrics.jsonl; numbers that are not finite become None. Raises BadRow."""
    row = _object(line)
    check_step(row)
    return {name: _number(name, value) for name, value in row.items()}


def quantization_row(line: bytes) -> dict[str, Any]:
    """Read a line of quantization.jsonl: figures by tensor, each a list over the layers. Raises
    BadRow."""
    row = _object(line)
    check_step(row)
    tensors = row.get("tensors")
    if not isinstance(tensors, dict):
        raise BadRow("tensors is no object")
    lists = {}
    for tensor, figures in tensors.items():
        if not isinstance(figures, dict) or not all(
            isinstance(values, list) for values in figures.values()
        ):
            raise BadRow(f"{brief(tensor)} has no figures")
        lists[tensor] = {
            name: [_number(name, value) for value in values] for name, values in figures.items()
        }
    return {"step": row["step"], "tensors": lists}


def read_rows(
    path: Path, parse: Callable[[bytes], dict[str, Any]], say: Say = warn
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; lines that are not rows are counted in one line to `say`, at the
    end. Raises IsobitError for a file that is missing or may not be read."""
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
    """Return (bytes, rows) of a metrics.jsonl up to its last row whose step is at most `step`; (0,
    0) without a file."""
    end = rows = rows_kept = 0
    if not exists(path):
        return 0, 0
    for line, offset in _lines(path):
        try:
            row = metric_row(line)
        except BadRow:
            continue
        rows += 1
        if (row["step"] or 0) <= step:
            end, rows_kept = offset, rows
    return end, rows_kept


def end_of_lines(path: Path) -> int:
    """Return the byte at which the last whole line of a file ends; 0 without a file."""
    return max((offset for _, offset in _lines(path)), default=0) if exists(path) else 0


def next_line(file: IO[bytes]) -> bytes | None:
    """Read the next whole line of an open file; None at its end, or where the line is not whole
    yet: the position stays. For a line longer than any row only its newline is returned."""
    start = file.tell()
    line = chunk = file.readline(LONGEST)
    while len(chunk) == LONGEST and not chunk.endswith(b"\n"):
        line = chunk = file.readline(LONGEST)
        if chunk.endswith(b"\n"):
            line = b"\n"
    if line.endswith(b"\n"):
        return line
    file.seek(start)
    return None


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield every whole line of a file, with the byte at which it ends."""
    try:
        check_readable(path)
        with path.open("rb") as file:
            while (line := next_line(file)) is not None:
                yield line, file.tell()
    except OSError as error:
        raise IsobitError(f"cannot read {path}: {reason_of(error)}") from None


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRow("not UTF-8 text") from None
    except BadJson as error:
        raise BadRow(f"not valid JSON: {error.reason}") from None
    if not isinstance(value, dict):
        raise BadRow(f"not an object: {brief(value, 60)}")
    return value


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

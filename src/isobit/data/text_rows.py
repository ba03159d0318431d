"""Rows of text files: JSONL (one JSON object a line), a JSON array of objects, and CSV (a header,
then text; tabs between fields in a .tsv).

A row comes with its place, `file:line`, or `file: row N` of an array. All files are UTF-8, with or
without a byte order mark, packed by gzip or not; blank lines are passed over. A value of CSV is
text, even if it looks like a number.
"""

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from isobit.data.foreign import MOST_RATIO, BadJson, check_readable, most_unpacked, parse_json
from isobit.errors import IsobitError, brief

_GZIP = b"\x1f\x8b"
_MOST_COLUMNS = 10_000
Row = tuple[str, dict[str, Any]]
"""The place of a row, for messages, and its columns."""


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSONL file, or of one JSON array. Raises IsobitError with file and
    line."""
    data = read_text_file(path)
    if data.lstrip().startswith(b"["):
        yield from _array_rows(path, data)
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = parse_json(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise IsobitError(f"{where}: not UTF-8 text") from None
        except BadJson as error:
            if number == 1 and _is_one_object(data):
                wanted = "an array of rows, [{...}, {...}], or one object a line"
                raise IsobitError(f"{path}: one JSON object; expected {wanted}") from None
            raise IsobitError(f"{where}: malformed JSON: {_reason(error)}") from None
        yield where, _checked_row(where, row)


def _array_rows(path: Path, data: bytes) -> Iterator[Row]:
    try:
        rows = parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise IsobitError(f"{path}:{data.count(10, 0, error.start) + 1}: not UTF-8 text") from None
    except BadJson as error:
        line = "" if error.line is None else f":{error.line}"
        raise IsobitError(f"{path}{line}: malformed JSON: {_reason(error)}") from None
    for number, row in enumerate(rows, 1):
        where = f"{path}: row {number}"
        yield where, _checked_row(where, row)


def _checked_row(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise IsobitError(f"{where}: expected a JSON object of columns, got {kind(row)}")
    _check_count(where, len(row))
    return row


def _reason(error: BadJson) -> str:
    return error.reason if error.column is None else f"{error.reason} (column {error.column})"


def _is_one_object(data: bytes) -> bool:
    try:
        return isinstance(parse_json(data.decode("utf-8")), dict)
    except (BadJson, UnicodeDecodeError):
        return False


def csv_rows(path: Path) -> Iterator[Row]:
    """Yield the records of a CSV file (RFC 4180), by the names in its header. Raises IsobitError
    with file and line."""
    records = _records(path)
    if not records:
        return
    (line, header), *rest = records
    if "" in header:
        raise IsobitError(
            f"{path}:{line}: the header has an empty name at column {header.index('') + 1}"
        )
    check_distinct(f"{path}:{line}", header)
    for line, fields in rest:
        if len(fields) != len(header):
            raise IsobitError(
                f"{path}:{line}: {len(fields)} field{'s' if len(fields) != 1 else ''}, but the "
                "header names "
                f'{len(header)}; a comma or a line end inside a field needs "quotes" around it'
            )
        yield f"{path}:{line}", dict(zip(header, fields))


def check_distinct(where: str, names: list[str]) -> None:
    """Raise IsobitError if a column name comes twice, or there are too many columns."""
    _check_count(where, len(names))
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise IsobitError(f"{where}: two columns are called {brief(name)!r}; rename one")
        seen.add(name)


def _check_count(where: str, columns: int) -> None:
    if columns > _MOST_COLUMNS:
        raise IsobitError(f"{where}: {columns:,} columns; expected at most {_MOST_COLUMNS:,}")


def kind(value: Any) -> str:
    """Return the type of a plain value, in words for a message."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def _records(path: Path) -> list[tuple[int, list[str]]]:
    """Return (the number of its first line, fields) of every record of a CSV file."""
    data = read_text_file(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise IsobitError(f"{path}:{data.count(10, 0, error.start) + 1}: not UTF-8 text") from None
    limit = csv.field_size_limit(sys.maxsize)
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter="\t" if suffix_of(path) == ".tsv" else ",",
        strict=True,
    )
    records, begins = [], 1
    try:
        for fields in reader:
            if fields:
                records.append((begins, fields))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise IsobitError(f"{path}:{begins}: malformed CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)
    return records


def read_text_file(path: Path, count: int = -1) -> bytes:
    """Return the first `count` bytes (-1: all) of a file, unpacked if gzip packed it, without a
    byte order mark. Raises IsobitError for a file that cannot be read."""
    try:
        size = check_readable(path)
        most = most_unpacked(size)
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            with gzip.open(file) if packed else nullcontext(file) as unpacked:
                data = unpacked.read(most + 1 if packed and count < 0 else count)
        if packed and len(data) > most:
            raise IsobitError(
                f"{path}: unpacks to more than {MOST_RATIO} times its size; expected an "
                "unpacked file"
            )
    except gzip.BadGzipFile as error:
        raise IsobitError(f"{path}: malformed gzip: {error}") from None
    except (EOFError, zlib.error):
        raise IsobitError(f"{path}: malformed gzip: the file is cut off or damaged") from None
    except OSError as error:
        raise IsobitError(f"cannot read data file {path}: {error.strerror}") from None
    return data.removeprefix(b"\xef\xbb\xbf")


def suffix_of(path: Path) -> str:
    """Return the suffix for the format of a file, in lower case: `.jsonl` also for
    `rows.jsonl.gz`."""
    return _unpacked(path).suffix.lower()


def stem_of(path: Path) -> str:
    """Return the name of a file without its suffixes: `rows` for `rows.jsonl.gz`."""
    return _unpacked(path).stem


def _unpacked(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path

"""Rows of text files: JSONL (one JSON object a line) and CSV (a header, then text; tabs between fields in a .tsv).

A row comes with its place, `file:line`. Both are UTF-8, with or without a byte order mark; blank lines are passed over.
A value of CSV is text, also where it looks like a number. Left out: compressed files, and a JSON array as a file.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError

Row = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and its columns."""


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSONL file. Raises IsobitError with file and line."""
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise IsobitError(f"{where}: not UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise IsobitError(f"{where}: malformed JSON: {error.msg} (column {error.colno})") from None
        except (RecursionError, ValueError):  # nested too deeply; an integer of more digits than Python converts
            raise IsobitError(f"{where}: malformed JSON: nested too deeply or a number too long") from None
        if not isinstance(row, dict):
            raise IsobitError(f"{where}: expected a JSON object of columns, got {kind(row)}")
        yield where, row


def csv_rows(path: Path) -> Iterator[Row]:
    """The records of a CSV file (RFC 4180), by the names in its header. Raises IsobitError with file and line."""
    records = _records(path)
    if not records:
        return
    (line, header), *rest = records
    if "" in header:
        raise IsobitError(f"{path}:{line}: the header has an empty name at column {header.index('') + 1}")
    check_distinct(f"{path}:{line}", header)
    for line, fields in rest:
        if len(fields) != len(header):
            raise IsobitError(
                f"{path}:{line}: {len(fields)} field{'s' if len(fields) != 1 else ''}, but the header names "
                f'{len(header)}; a comma or a line end inside a field needs "quotes" around it'
            )
        yield f"{path}:{line}", dict(zip(header, fields))


def check_distinct(where: str, names: list[str]) -> None:
    """Raise IsobitError if a column name comes twice."""
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise IsobitError(f"{where}: two columns are called {twice[0]!r}; rename one")


def kind(value: Any) -> str:
    """What a plain value is, in words for a message."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _records(path: Path) -> list[tuple[int, list[str]]]:
    """(line that it begins on, fields) of every record."""
    data = _read(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise IsobitError(f"{path}:{data.count(10, 0, error.start) + 1}: not UTF-8 text") from None
    limit = csv.field_size_limit(sys.maxsize)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise IsobitError(f"cannot read data file {path}: {error.strerror}") from None

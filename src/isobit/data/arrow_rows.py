"""Rows of Arrow tables: Parquet files, and the directories that `datasets` saves, as plain JSON
values.

A row comes with its place, `file: row N`, counted from 1. Times become ISO 8601 text, durations
seconds, decimals text with all their digits, maps objects; bytes become text where they are UTF-8.
Parquet needs pyarrow alone. Left out: images and audio, and tables that do not fit in memory.
"""

import datetime
import decimal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isobit.data.foreign import check_readable
from isobit.data.text_rows import Row, check_distinct, kind
from isobit.errors import IsobitError, brief

_BATCH_ROWS = 1024
_NO_VALUE = (
    ValueError,
    OverflowError,
    KeyError,
)  # text that is not UTF-8, a year 20000, a map with a key twice


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of one Parquet file. Raises IsobitError without pyarrow, and for a file that is not
    whole."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise IsobitError(
            f"{path}: Parquet needs pyarrow; install it with: pip install pyarrow"
        ) from None
    try:
        check_readable(path)
        with path.open("rb") as stream:
            table = _whole_parquet(path, stream, parquet, pyarrow.ArrowException)
    except OSError as error:
        raise IsobitError(f"cannot read data file {path}: {error.strerror}") from None
    yield from _table_rows(path, table)


def saved_dataset_rows(path: Path) -> Iterator[Row]:
    """The rows of one split that `Dataset.save_to_disk` wrote. Raises IsobitError without
    `datasets`, and for a directory that is not whole."""
    try:
        import datasets
        import pyarrow
    except ImportError:
        raise IsobitError(
            f"{path}: a directory of save_to_disk needs datasets; install it with: pip install "
            "datasets"
        ) from None
    try:
        table = datasets.load_from_disk(str(path)).with_format("arrow")[:]
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
        raise IsobitError(
            f"{path}: not a whole dataset of save_to_disk: {_first_line(error)}"
        ) from None
    yield from _table_rows(path, table)


def _whole_parquet(path: Path, stream: Any, parquet: Any, arrow_error: type[Exception]) -> Any:
    try:
        return parquet.ParquetFile(stream).read()
    except (arrow_error, OSError) as error:
        raise IsobitError(f"{path}: truncated or corrupt Parquet: {_first_line(error)}") from None


def _table_rows(path: Path, table: Any) -> Iterator[Row]:
    check_distinct(str(path), table.column_names)
    number = 0
    for batch in table.to_batches(_BATCH_ROWS):
        for row in _python_rows(path, batch, number):
            number += 1
            where = f"{path}: row {number}"
            yield where, {name: plain(value, where, name) for name, value in row.items()}


def _python_rows(path: Path, batch: Any, before: int) -> list[dict[str, Any]]:
    """The rows as Python values. Raises IsobitError with the first row that has none, such as text
    that is not UTF-8."""
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except _NO_VALUE:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist(maps_as_pydicts="strict")
            except _NO_VALUE as error:
                reason = (
                    "not UTF-8 text"
                    if isinstance(error, UnicodeDecodeError)
                    else _first_line(error)
                )
                raise IsobitError(f"{path}: row {before + i + 1}: {reason}") from None
        raise


def plain(value: Any, where: str, name: str) -> Any:
    """`value` as what JSON can write. Raises IsobitError, with the place, for what is not."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where, name): plain(item, where, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, name) for item in value]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return plain(value.tolist(), where, name)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            pass
    raise IsobitError(
        f"{where}: column {brief(name)!r} holds {type(value).__name__}, which is not text, "
        "numbers or lists"
    )


def _key(key: Any, where: str, name: str) -> str:
    """The key of an object, which JSON has as text; a map of Arrow may have whole numbers."""
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return f"{key:d}"
    raise IsobitError(
        f"{where}: column {brief(name)!r} has an object with {kind(key)} as a key; expected text"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return brief(lines[0], 300) if lines else type(error).__name__

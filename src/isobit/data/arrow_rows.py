"""Rows of Arrow tables: Parquet files, and the directories that `datasets` saves, as plain JSON
values.

A row comes with its place, `file: row N`, counted from 1. Times become ISO 8601 text, durations
seconds, decimals text with all their digits, maps objects; bytes become text if they are UTF-8.
A text that many rows share is in a file once: the length of the rows is computed before they are
made, and held to the same bound as for gzip. Parquet needs only pyarrow. Left out: images and
audio, and tables that do not fit in memory.
"""

import datetime
import decimal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.data.foreign import MOST_RATIO, check_readable, most_unpacked
from isobit.data.text_rows import Row, check_distinct, kind
from isobit.errors import IsobitError, brief

_BATCH_ROWS, _VALUE = 1024, 8
_NO_VALUE = (
    ValueError,
    OverflowError,
    KeyError,
)  # text that is not UTF-8, a year 20000, a map with a key twice


def parquet_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file. Raises IsobitError without pyarrow, and for a file that is
    not whole."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise IsobitError(
            f"{path}: Parquet needs pyarrow; install it with: pip install pyarrow"
        ) from None
    try:
        most = most_unpacked(check_readable(path))
        with path.open("rb") as stream:
            file = _open_parquet(path, stream, most, parquet, pyarrow)
            names, batches = file.schema_arrow.names, _batches(path, file, pyarrow)
            yield from _table_rows(path, names, batches, most)
    except OSError as error:
        raise IsobitError(f"cannot read data file {path}: {error.strerror}") from None


def saved_dataset_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a split that `Dataset.save_to_disk` wrote. Raises IsobitError without
    `datasets`, and for a directory that is not whole."""
    try:
        import datasets
    except ImportError:
        raise IsobitError(
            f"{path}: a directory of save_to_disk needs datasets; install it with: pip install "
            "datasets"
        ) from None
    try:
        table = datasets.load_from_disk(str(path)).with_format("arrow")[:]
    except MemoryError:
        raise
    except Exception as error:  # the library trusts a folder's files: anything may come of others
        raise IsobitError(
            f"{path}: not a whole dataset of save_to_disk: {_first_line(error)}"
        ) from None
    size = sum(file.stat().st_size for file in path.glob("*.arrow"))
    batches = table.to_batches(_BATCH_ROWS)
    yield from _table_rows(path, table.column_names, batches, most_unpacked(size))


def _open_parquet(path: Path, stream: Any, most: int, parquet: Any, pyarrow: Any) -> Any:
    """Return the opened file, if the sizes known before its rows are read are within the bound of
    `most` bytes: the sizes that the file states, and the texts inside lists and objects. Other
    texts are read as a dictionary and numbers, so that a text that comes a million times is in
    memory once. Raises IsobitError for a larger file, or one that is not whole."""
    try:
        file = parquet.ParquetFile(stream)
        check_distinct(str(path), file.schema_arrow.names)
        _check_size(path, most, _said_bytes(file))
        columns = map(file.schema.column, range(len(file.schema)))
        texts = [
            column.path
            for column in columns
            if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"
        ]
        if inside := [name for name in texts if name not in file.schema_arrow.names]:
            dictionaries = parquet.ParquetFile(stream, read_dictionary=inside)
            _check_inside(path, most, dictionaries, inside, pyarrow)
        return parquet.ParquetFile(stream, read_dictionary=sorted({*texts} - {*inside}))
    except (pyarrow.ArrowException, OSError) as error:
        raise _corrupt(path, error) from None


def _check_inside(path: Path, most: int, file: Any, names: Sequence[str], pyarrow: Any) -> None:
    """Raise IsobitError if the texts inside lists and objects (the columns `names`) have more than
    `most` bytes together."""
    count = 0
    for group in range(file.metadata.num_row_groups):
        try:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
                count += sum(map(_unpacked_bytes, batch.columns))
                _check_size(path, most, count)
        except pyarrow.ArrowNotImplementedError:
            pass  # two dictionaries in a batch; Arrow then makes no array of more than 2 GiB


def _batches(path: Path, file: Any, pyarrow: Any) -> Iterator[Any]:
    try:
        yield from file.iter_batches(_BATCH_ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        raise _corrupt(path, error) from None


def _corrupt(path: Path, error: Exception) -> IsobitError:
    return IsobitError(f"{path}: truncated or corrupt Parquet: {_first_line(error)}")


def _said_bytes(file: Any) -> int:
    """Return the bytes that a Parquet file states for its columns: for each, the larger of the
    unpacked size of its pages and the size of its values without texts."""
    widths = [max(_VALUE, file.schema.column(i).length) for i in range(len(file.schema))]
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    chunks = ((group.column(i), width) for group in groups for i, width in enumerate(widths))
    return sum(max(c.total_uncompressed_size, c.num_values * width, 0) for c, width in chunks)


def _check_size(path: Path, most: int, count: int) -> None:
    if count > most:
        raise IsobitError(
            f"{path}: unpacks to more than {MOST_RATIO} times its size; expected its rows as an "
            "unpacked .jsonl"
        )


def _table_rows(path: Path, names: list[str], batches: Iterable[Any], most: int) -> Iterator[Row]:
    """Yield the rows of batches as plain values, each with its place. Raises IsobitError if all
    rows have more than `most` bytes, or a value is not plain."""
    check_distinct(str(path), names)
    number = count = 0
    for batch in batches:
        count += sum(map(_unpacked_bytes, batch.columns))
        _check_size(path, most, count)
        for row in _python_rows(path, batch, number):
            number += 1
            where = f"{path}: row {number}"
            yield where, {name: plain(value, where, name) for name, value in row.items()}


def _unpacked_bytes(array: Any) -> int:
    """Return about how many bytes the values of an Arrow array have; a value of a dictionary counts
    once for each use."""
    import pyarrow
    from pyarrow import compute, types

    kind_ = array.type
    if isinstance(kind_, pyarrow.BaseExtensionType):
        return _unpacked_bytes(array.storage)
    if types.is_dictionary(kind_):
        values = array.dictionary
        if not _is_text(kind_.value_type):
            return len(array) * (_VALUE + _unpacked_bytes(values))
        lengths = compute.take(compute.binary_length(values), array.indices)
        return len(array) * _VALUE + int(compute.sum(lengths).as_py() or 0)
    if _is_text(kind_):
        return len(array) * _VALUE + int(compute.sum(compute.binary_length(array)).as_py() or 0)
    if types.is_struct(kind_):
        return len(array) * _VALUE + sum(map(_unpacked_bytes, array.flatten()))
    if types.is_map(kind_):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        pairs = (side.slice(first, last - first) for side in (array.keys, array.items))
        return len(array) * _VALUE + sum(map(_unpacked_bytes, pairs))
    if types.is_nested(kind_):
        return len(array) * _VALUE + _unpacked_bytes(array.flatten())
    return len(array) * _VALUE + int(array.nbytes)


def _is_text(kind_: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_string(kind_)
        or types.is_large_string(kind_)
        or types.is_string_view(kind_)
        or types.is_binary(kind_)
        or types.is_large_binary(kind_)
        or types.is_binary_view(kind_)
    )


def _python_rows(path: Path, batch: Any, rows_before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python values; `rows_before`: the number of rows in front.
    Raises IsobitError with the first row that cannot become Python values, such as text that is not
    UTF-8."""
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
                raise IsobitError(f"{path}: row {rows_before + i + 1}: {reason}") from None
        raise


def plain(value: Any, where: str, name: str) -> Any:
    """Return a value of the column `name` as a value that JSON can write. Raises IsobitError, with
    the place `where`, for a value of another type."""
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
    """Return the key of an object as text, as JSON has it; a map of Arrow may have whole numbers as
    keys. Raises IsobitError for a key of another type."""
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

"""From a path to rows: its format, and which of its files belong to a split.

A file is JSONL, a JSON array, CSV or Parquet; a text file may be packed by gzip (`.jsonl.gz`). A
directory is what `datasets` wrote with `save_to_disk`, or holds such files: shards of one set, or
splits named as on the Hugging Face Hub (`train.jsonl`, `data/test-00000-of-00002.parquet`,
`test/0.csv`). Left out: downloads, configurations of a dataset (name the folder of one), and other
compressions.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.data.arrow_rows import parquet_rows, saved_dataset_rows
from isobit.data.foreign import BadJson, exists, parse_json, read_bytes
from isobit.data.text_rows import Row, csv_rows, jsonl_rows, read_text_file, stem_of, suffix_of
from isobit.errors import IsobitError, brief, download_hint, listed

READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "jsonl": jsonl_rows,
    "csv": csv_rows,
    "parquet": parquet_rows,
}
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_PACKED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
"""How files begin that other programs packed; an Excel sheet is a zip too."""
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval"),
}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_MOST_DESCRIPTION = 1 << 24  # bytes
_UNNAMED = "train"  # as `datasets` calls what has no split


@dataclass(frozen=True)
class Source:
    """A file or directory, its format (`auto`: from suffix and content) and the split of a
    directory that has several.

    Where a directory has several and none is named, training data are `train`, held-out data `test`
    or `validation`. `rows` that were given as objects are read instead.
    """

    path: Path
    format: str = "auto"
    split: str | None = None
    held_out: bool = False
    rows: Sequence[Mapping[str, Any]] | None = None

    @property
    def label(self) -> str:
        """The name of the source in messages."""
        return str(self.path) if self.rows is None else "held_out" if self.held_out else "data"


def read_rows(source: Source) -> Iterator[Row]:
    """Return the rows of a source, in the order of its files. Raises IsobitError for what cannot be
    read."""
    path = source.path
    if source.rows is not None:
        yield from (
            (f"{source.label}, row {number}", dict(row))
            for number, row in enumerate(source.rows, 1)
        )
        return
    if not exists(path):
        hint = download_hint(path, data=True)
        raise IsobitError(f"cannot read data file {path}: No such file or directory{hint}")
    if path.is_dir():
        yield from _folder_rows(source)
        return
    if source.split is not None:
        raise IsobitError(f"{_split_key(source)}: {path} is a file, which has no splits")
    if source.format == "dataset":
        raise IsobitError(
            f"task.format: dataset is a directory, and {path} is a file; known: auto, "
            f"{_known_formats()}"
        )
    yield from READERS[_format_of(path) if source.format == "auto" else source.format](path)


def _folder_rows(source: Source) -> Iterator[Row]:
    folder = source.path
    if source.format in ("auto", "dataset"):
        if (folder / "dataset_dict.json").is_file():
            split = _choose(source, _splits_of_dict(folder))
            yield from saved_dataset_rows(folder / split)
            return
        if (folder / "state.json").is_file():
            if source.split is not None:
                raise IsobitError(
                    f"{_split_key(source)}: {folder} is one saved dataset, which has no splits"
                )
            yield from saved_dataset_rows(folder)
            return
    splits = _data_files(source)
    for file in splits[_choose(source, list(splits))]:
        yield from READERS[_SUFFIXES[suffix_of(file)]](file)


def _format_of(path: Path) -> str:
    """Return the format of a file by its suffix, else by its first bytes. Raises IsobitError for a
    file whose format is not known, unless it is JSON."""
    if suffix_of(path) in _SUFFIXES:
        return _SUFFIXES[suffix_of(path)]
    start = read_text_file(path, 64)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.lstrip().startswith((b"{", b"[")) or not start.strip():
        return "jsonl"
    for mark, program in _PACKED.items():
        if start.startswith(mark):
            raise IsobitError(
                f"{path}: packed by {program}, which is not read; unpack it, or use gzip"
            )
    raise IsobitError(
        f"{path}: cannot tell its format from name or content; set task.format to one of "
        f"{_known_formats()}"
    )


def _known_formats() -> str:
    return ", ".join(READERS)


def _splits_of_dict(folder: Path) -> list[str]:
    try:
        text = read_bytes(folder / "dataset_dict.json", _MOST_DESCRIPTION).decode("utf-8")
        names = parse_json(text)["splits"]
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    except (OSError, UnicodeDecodeError, BadJson, LookupError, TypeError):
        pass
    raise IsobitError(
        f"{folder / 'dataset_dict.json'}: does not list the splits; save the dataset again"
    )


def _data_files(source: Source) -> dict[str, list[Path]]:
    """Return the files of each split: of the folder, else of its `data`, else of folders named as
    splits."""
    folder = source.path
    for directory in (folder, folder / "data"):
        files = _files_in(directory, source)
        if files:
            return _by_split({file: _split_of(stem_of(file)) for file in files})
    folders = [entry for entry in _entries(folder) if entry.is_dir()]
    named = {entry: split for entry in folders if (split := _split_of(entry.name)) is not None}
    files_of = {file: split for entry, split in named.items() for file in _files_in(entry, source)}
    if files_of:
        return _by_split(files_of)
    wanted = (
        "Parquet, JSONL or CSV files"
        if source.format in ("auto", "dataset")
        else f"{source.format} files"
    )
    documents = [entry.name for entry in _entries(folder) if entry.suffix.lower() == ".json"]
    inside = (
        f"; it has {listed(documents)}: name the file itself, if its rows are there"
        if documents and source.format in ("auto", "jsonl") and not folders
        else f"; it has the folders {listed(entry.name for entry in folders[:8])}: name one"
        if folders
        else ""
    )
    raise IsobitError(
        f"{folder}: no data in this directory: expected {wanted}, or what save_to_disk "
        f"writes{inside}"
    )


def _files_in(folder: Path, source: Source) -> list[Path]:
    """Return the data files directly in a folder. JSON documents (.json) do not count: a dataset's
    description is one too."""
    files = [
        f for f in _entries(folder) if f.is_file() and suffix_of(f) in _SUFFIXES.keys() - {".json"}
    ]
    formats = sorted({_SUFFIXES[suffix_of(file)] for file in files})
    if source.format not in ("auto", "dataset"):
        return [file for file in files if _SUFFIXES[suffix_of(file)] == source.format]
    if len(formats) > 1:
        raise IsobitError(f"{folder}: has {' and '.join(formats)} files; choose with task.format")
    return files


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "_")))
    except OSError as error:
        raise IsobitError(f"cannot read directory {folder}: {error.strerror}") from None


def _by_split(files: Mapping[Path, str | None]) -> dict[str, list[Path]]:
    """Return the files by split. A file without a split among others that have one becomes a split
    named after itself, so that none is passed over."""
    if not any(files.values()):
        return {_UNNAMED: list(files)}
    splits: dict[str, list[Path]] = {}
    for file, split in files.items():
        splits.setdefault(split or stem_of(file), []).append(file)
    return splits


def _split_of(name: str) -> str | None:
    """Return the split that the name of a file or folder speaks of: `train_sft-00000-of-00002`,
    `gsm8k-test`."""
    shard = _SHARD.fullmatch(name)
    words = re.split(r"[^a-zA-Z0-9]+", name.lower())
    split = next((split for split, known in _SPLIT_WORDS.items() if set(known) & set(words)), None)
    return shard[1] if shard is not None and shard[1] not in ("data", "part") else split


def _choose(source: Source, names: list[str]) -> str:
    known = f"known: {listed(names)}"
    if source.split is not None:
        if source.split not in names:
            raise IsobitError(
                f"{_split_key(source)}: {source.path} has no split {brief(source.split)!r}; {known}"
            )
        return source.split
    if len(names) == 1:
        return names[0]
    usual = [
        name
        for name in (("test", "validation") if source.held_out else ("train",))
        if name in names
    ]
    if not usual:
        raise IsobitError(
            f"{source.path}: has several splits; say which with {_split_key(source)}; {known}"
        )
    return usual[0]


def _split_key(source: Source) -> str:
    return "task.held_out_split" if source.held_out else "task.split"

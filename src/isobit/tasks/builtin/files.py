"""The user's own data, and what all tasks that read files share: JSONL, CSV, Parquet, directories
of `datasets`.

Several files are one set, each with its part of the prompts where they have weights. Rows are split
once: `held_out_path` or `held_out_split` where given, else `held_out_size` prompts cut from all of
them (default: a tenth, at most 256), chosen by the option `seed`. Such data have no built-in reward:
the config names functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from isobit.data.dataset import (
    RESERVED_COLUMNS,
    Dataset,
    Example,
    Shaping,
    check_template,
    read_examples,
    split,
)
from isobit.data.mixture import check_shares
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.tasks.builtin.task import SEED, Task, TaskSettings, held_out_size, task_options


@dataclass(frozen=True)
class FileOptions:
    """Options of a task that reads files: `seed` chooses what is cut from `path` as the held-out
    split."""

    seed: SEED = 0


def load(settings: TaskSettings) -> Task:
    """Build a task of the rows of one or several files or directories. Raises IsobitError, with
    file and row, for the first row that cannot be used."""
    train, held_out = read_splits(settings, task_options(FileOptions, settings))
    return Task("file", train, held_out)


def read_splits(
    settings: TaskSettings,
    options: FileOptions,
    columns: Mapping[str, str] | None = None,
    text_template: str | None = None,
) -> tuple[Dataset, Dataset]:
    """Read (training data, held-out data) from the files that the settings name; `columns` and
    `text_template` apply where the settings name none."""
    if settings.path is None and not settings.files:
        hint = (
            "; built-in tasks by task.name: arithmetic, countdown, gsm8k, calculator, lookup, guess"
            if settings.name == "file"
            else ""
        )
        raise IsobitError(
            f"task.path: task {settings.name} needs a file or directory of data{hint}"
        )
    check_template(settings.prompt_template)
    columns = {**(columns or {}), **settings.columns}
    for name in {**columns, **{name: "" for file in settings.files for name in file.columns}}:
        if name in RESERVED_COLUMNS:
            raise IsobitError(
                f"task.columns: {name!r} is a name that reward functions get from isobit; take "
                "another"
            )
    shaping = Shaping(
        columns,
        settings.prompt_template,
        text_template,
        settings.chat,
        settings.system,
        settings.supervised,
    )
    train, label = _read(settings, shaping)
    path = settings.held_out_path or settings.path
    if path is not None and (settings.held_out_path or settings.held_out_split is not None):
        held_out = read_examples(
            Source(
                Path(path), settings.format, settings.held_out_split, True, settings.rows.get(path)
            ),
            shaping,
        )
        size = held_out_size(settings, len(held_out))
        if size > len(held_out):
            raise IsobitError(f"task.held_out_size is {size}, but {path} has {len(held_out)} rows")
        _check_same_columns(train[0], held_out[0])
        held_out = held_out[:size]
    else:
        size = held_out_size(settings, min(256, len(train) // 10))
        train, held_out = split(train, size, options.seed, label, settings.by_columns)
    weights = tuple(file.weight for file in settings.files if file.weight is not None)
    if weights:
        check_shares(len(train), weights)
    trained = Dataset(train, settings.seed, settings.shuffle, weights)
    return trained, Dataset(held_out, settings.seed)


def _read(settings: TaskSettings, shaping: Shaping) -> tuple[list[Example], str]:
    """Return (examples, label for messages) of the configured file, or of several files with one
    running index."""
    if not settings.files:
        assert settings.path is not None
        rows = settings.rows.get(settings.path)
        source = Source(Path(settings.path), settings.format, settings.split, rows=rows)
        return read_examples(source, shaping), source.label
    examples: list[Example] = []
    for number, file in enumerate(settings.files):
        source = Source(Path(file.path), settings.format, file.split or settings.split)
        columns = {**shaping.columns, **file.columns}
        rows_of_file = read_examples(source, replace(shaping, columns=columns))
        if examples:
            _check_alike(examples[0], rows_of_file[0], supervised=settings.supervised)
        examples += [replace(e, index=len(examples) + e.index, source=number) for e in rows_of_file]
    return examples, "task.files"


def _check_alike(first: Example, second: Example, *, supervised: bool) -> None:
    """Raise IsobitError unless files can be mixed: prompts that are texts in all of them, or
    chats, and the same columns, where rewards are given them."""
    if isinstance(first.prompt, str) != isinstance(second.prompt, str):
        kinds = ["text" if isinstance(e.prompt, str) else "a chat" for e in (first, second)]
        raise IsobitError(
            f"task.files: the prompt is {kinds[0]} in {first.where} and {kinds[1]} in "
            f"{second.where}; task.chat: true makes a text a chat"
        )
    if not supervised:
        _check_same_columns(first, second)


def _check_same_columns(train: Example, held_out: Example) -> None:
    differing = train.columns.keys() ^ held_out.columns.keys()
    if differing:
        raise IsobitError(
            f"{held_out.where}: column {min(differing)!r} is not in both it and {train.where}; "
            "reward functions need the same columns in both"
        )

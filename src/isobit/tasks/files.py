"""The user's own data, and what all tasks that read files share: JSONL, CSV, Parquet, directories
of `datasets`.

Rows are split once: `held_out_path` or `held_out_split` where given, else `held_out_size` prompts
cut from `path` (default: a tenth, at most 256), chosen by the option `seed`. Such data have no
built-in reward: the config names functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.tasks.task import SEED, Task, TaskSettings, held_out_size, task_options


@dataclass(frozen=True)
class FileOptions:
    """Options of a task that reads files: `seed` chooses what is cut from `path` as the held-out
    split."""

    seed: SEED = 0


def load(settings: TaskSettings) -> Task:
    """A file or directory as a task. Raises IsobitError, with the place, for whatever is wrong with
    it."""
    train, held_out = read_splits(settings, task_options(FileOptions, settings))
    return Task("file", train, held_out)


def read_splits(
    settings: TaskSettings,
    options: FileOptions,
    columns: Mapping[str, str] | None = None,
    text_template: str | None = None,
) -> tuple[Dataset, Dataset]:
    """(train, held out) of what the settings name; `columns` and `text_template` are for where they
    name none."""
    if settings.path is None:
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
    for name in columns:
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
    source = Source(
        Path(settings.path), settings.format, settings.split, rows=settings.rows.get(settings.path)
    )
    train = read_examples(source, shaping)
    if settings.held_out_path is not None or settings.held_out_split is not None:
        path = settings.held_out_path or settings.path
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
        train, held_out = split(train, size, options.seed, source.label)
    return Dataset(train, settings.seed, settings.shuffle), Dataset(held_out, settings.seed)


def _check_same_columns(train: Example, held_out: Example) -> None:
    differing = train.columns.keys() ^ held_out.columns.keys()
    if differing:
        raise IsobitError(
            f"{held_out.where}: column {min(differing)!r} is not in both it and {train.where}; "
            "reward functions need the same columns in both"
        )

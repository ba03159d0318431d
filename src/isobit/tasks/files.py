"""JSONL files of the user's own, and what file-based tasks share.

Rows are split once: `held_out_path` where given, else `held_out_size` prompts cut from `path` (default: a tenth, at
most 256), chosen by the option `seed`. A user's file has no reward of its own: the config names functions.
"""

from dataclasses import dataclass
from pathlib import Path

from isobit.errors import IsobitError
from isobit.tasks.data import Dataset, Example, TaskSettings, check_template, read_jsonl, split
from isobit.tasks.task import Task, check_option, held_out_size, parse_options


@dataclass(frozen=True)
class FileOptions:
    """Options of a task that reads files: `chat` makes a text prompt the message of a user, after one of `system`."""

    chat: bool = False
    system: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_option("seed", self.seed, 0, 2**63 - 1)
        if self.system is not None and not self.chat:
            raise IsobitError("task.options.system: a system message needs task.options.chat: true")


def load(settings: TaskSettings) -> Task:
    """A JSONL file as a task. Raises IsobitError, with file and line, for whatever is wrong with it."""
    train, held_out = read_splits(settings, settings.prompt_column or "prompt")
    return Task("file", train, held_out)


def read_splits(
    settings: TaskSettings, prompt_column: str, text_template: str | None = None
) -> tuple[Dataset, Dataset]:
    """(train, held out) of the files that the settings name; `text_template` is for text where they name none."""
    if settings.path is None:
        hint = "; built-in tasks by task.name: arithmetic, countdown, gsm8k" if settings.name == "file" else ""
        raise IsobitError(f"task.path: task {settings.name} needs a JSONL file{hint}")
    options = parse_options(settings.name, FileOptions, settings.options)
    check_template(settings.prompt_template)

    def read(path: str) -> list[Example]:
        return read_jsonl(
            path,
            prompt_column,
            settings.answer_column,
            settings.prompt_template,
            options.chat,
            options.system,
            text_template,
        )

    train = read(settings.path)
    if settings.held_out_path is not None:
        held_out = read(settings.held_out_path)
        size = held_out_size(settings, len(held_out))
        if size > len(held_out):
            raise IsobitError(f"task.held_out_size is {size}, but {settings.held_out_path} has {len(held_out)} rows")
        _check_same_columns(settings, train, held_out)
        held_out = held_out[:size]
    else:
        size = held_out_size(settings, min(256, len(train) // 10))
        train, held_out = split(train, size, options.seed, Path(settings.path))
    return Dataset(train, settings.seed), Dataset(held_out, settings.seed)


def _check_same_columns(settings: TaskSettings, train: list[Example], held_out: list[Example]) -> None:
    differing = train[0].columns.keys() ^ held_out[0].columns.keys()
    if differing:
        raise IsobitError(
            f"{settings.held_out_path}: column {min(differing)!r} is not in both it and {settings.path}; "
            "reward functions need the same columns in both"
        )

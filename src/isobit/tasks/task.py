"""`Task`: examples to train on and to hold out, how they are scored, and what a supervised warm start learns from.

A task's options are a frozen dataclass, whose fields are the only options.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args

from isobit.data.dataset import Dataset
from isobit.errors import IsobitError, did_you_mean
from isobit.rewards.spec import RewardSpec


@dataclass(frozen=True)
class TaskSettings:
    """The `task` section of a config; None means the task's own default.

    `format`, `split`, `held_out_split`: how paths are read (`readers.Source`). `columns`: role or new name to column.
    `chat` makes a text prompt the message of a user; `system` is said before a chat. `seed` (the run's) decides the
    order of training examples, nothing else; `shuffle: false` keeps that of the file. Which examples there are and
    which are held out depends on the option `seed` of the task (default 0), so that runs of different seeds, and a
    supervised run before them, share one held-out split. `rows` are given as objects, by the path that stands for them.
    """

    name: str = "file"
    path: str | None = None
    held_out_path: str | None = None
    held_out_size: int | None = None
    format: str = "auto"
    split: str | None = None
    held_out_split: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt_template: str | None = None
    chat: bool = False
    system: str | None = None
    shuffle: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    rows: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A loaded task. `rewards` are its own, used where the user names none (a user's file has none).

    `gold`: the right completion of an example's columns, which supervised training learns, or None. `alphabet`: every
    character of prompts and right completions, for a character tokenizer, or None where the text is open.
    """

    name: str
    train: Dataset
    held_out: Dataset
    rewards: Sequence[RewardSpec] = ()
    gold: Callable[[Mapping[str, Any]], str] | None = None
    alphabet: str | None = None


_Options = TypeVar("_Options")


def parse_options(task: str, schema: type[_Options], options: Mapping[str, Any]) -> _Options:
    """Options of a built-in task, as its frozen dataclass. Raises IsobitError for a wrong name, type or value."""
    known = {option.name: option.type for option in fields(schema)}  # type: ignore[arg-type]
    for name, value in options.items():
        if name not in known:
            raise IsobitError(f"task.options: {task} has no option {name!r}; {did_you_mean(name, list(known))}")
        kind: Any = known[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in (kind, *get_args(kind))):
            wanted = getattr(kind, "__name__", str(kind)).replace(" | None", "")
            raise IsobitError(f"task.options.{name}: expected {wanted}, got {value!r}")
    return schema(**options)


def check_option(name: str, value: int, low: int, high: int) -> None:
    """Raise IsobitError unless low <= value <= high."""
    if not low <= value <= high:
        raise IsobitError(f"task.options.{name}: must be from {low} to {high}, got {value}")


def alphabet_of(characters: str) -> str:
    """Each character once, in the order in which they first come."""
    return "".join(dict.fromkeys(characters))


def refuse_file_settings(settings: TaskSettings) -> None:
    """A task that makes its own data has no use for the settings of a file: raise IsobitError if one is given."""
    unused = TaskSettings()
    for name in ("path", "held_out_path", "format", "split", "held_out_split", "columns", "chat", "system"):
        if getattr(settings, name) != getattr(unused, name):
            raise IsobitError(f"task.{name}: task {settings.name} makes its own data; for a file use task.name: file")


def held_out_size(settings: TaskSettings, default: int) -> int:
    """The size of the held-out split. Raises IsobitError when negative."""
    size = default if settings.held_out_size is None else settings.held_out_size
    if size < 0:
        raise IsobitError(f"task.held_out_size must be at least 0, got {size}")
    return size

"""`Task`: examples to train on and to hold out, how they are scored, and what a supervised warm start learns from.

A task's options are a frozen dataclass, whose fields are the only options.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args

from isobit.errors import IsobitError
from isobit.tasks import named
from isobit.tasks.data import Dataset, TaskSettings, did_you_mean

OBJECT = "<python>:"
"""Begins the name of what a run was given as an object of Python: a reward function, or rows."""


@dataclass(frozen=True)
class RewardSpec:
    """One reward function: `path/to/file.py:function`, `package.module:function`, `<python>:function` for an object of
    this process, or a name of `isobit.tasks.named` with its options; its weight, its name, and the seconds of one call
    (None: the pool's)."""

    function: str
    weight: float = 1.0
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None

    @property
    def label(self) -> str:
        """The name in metrics: the given one, else the function's."""
        return self.name if self.name is not None else self.function.rpartition(":")[2]

    @property
    def is_object(self) -> bool:
        """Whether it is an object of this process, which no worker can import."""
        return self.function.startswith(OBJECT)

    @property
    def by_name(self) -> bool:
        """Whether it is meant as one of `isobit.tasks.named`: a bare name, right or wrong."""
        return self.function.isidentifier()

    @property
    def reference(self) -> str:
        """The function, or the name and its options, as a worker loads it."""
        return named.reference(self.function, self.options) if self.by_name else self.function

    def build(self, deadline_s: float) -> named.NamedReward | None:
        """The reward by name, or None for a function; `deadline_s` counts unless it has its own. Raises OptionError."""
        if self.by_name:
            return named.build(self.function, self.options, self.deadline_s or deadline_s)
        if self.options:
            raise named.OptionError("options", "a function of your own takes none; only rewards by name do")
        return None


def parse_reward(text: str) -> RewardSpec:
    """The reward of a command line: a function, a name, or a name with options, `name:{"option": value}`.

    Raises IsobitError if the options are no JSON.
    """
    if not named.is_named(text):
        return RewardSpec(text)
    name, options = named.parse_reference(text)
    return RewardSpec(name, options=options)


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

"""`Task`: examples to train on and to hold out, how they are scored, and what a supervised warm start learns from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from isobit.errors import IsobitError
from isobit.tasks.data import Dataset, TaskSettings


@dataclass(frozen=True)
class RewardSpec:
    """A reward function by name (`path/to/file.py:function` or `package.module:function`) and its weight in the sum."""

    function: str
    weight: float = 1.0
    name: str | None = None

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2]


@dataclass(frozen=True)
class Task:
    """`rewards` are the task's own, used where the user names none. `gold`: a right completion of an example's columns,
    for supervised training, or None. `alphabet`: the characters that prompts and completions consist of, if few."""

    name: str
    train: Dataset
    held_out: Dataset
    rewards: Sequence[RewardSpec] = ()
    gold: Callable[[Mapping[str, Any]], str] | None = None
    alphabet: str | None = None


def read_options(settings: TaskSettings, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A built-in task's options over their defaults. Raises IsobitError for an unknown one or a wrong type."""
    values = dict(defaults)
    for key, value in settings.options.items():
        if key not in defaults:
            close = get_close_matches(key, list(defaults), 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise IsobitError(f"task.options.{key}: {settings.name} has no such option{hint}: {', '.join(defaults)}")
        wanted = type(defaults[key])
        if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
            raise IsobitError(f"task.options.{key}: expected {wanted.__name__}, got {value!r}")
        values[key] = value
    return values


def refuse_file(settings: TaskSettings) -> None:
    """Built-in tasks make their own data: a path would be ignored, so it is refused."""
    for key in ("path", "held_out_path", "prompt_column", "answer_column", "prompt_template"):
        if getattr(settings, key) is not None:
            raise IsobitError(f"task.{key}: task {settings.name!r} makes its own data; use task.name: file for a file")

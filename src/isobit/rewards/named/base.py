"""What a reward by name is: a frozen dataclass whose fields are its options and whose `score` rates one completion.

Options are checked strictly, without importing anything that a reward may need. Left out: the rewards themselves.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from isobit.data.dataset import completion_text
from isobit.errors import did_you_mean


class OptionError(ValueError):
    """An option is wrong. `key` is its place below the reward, such as `options.pattern`."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key, self.text = key, text


@dataclass(frozen=True)
class Unscored:
    """What `score` returns where the completion can be given no reward through nobody's mistake: None, and why."""

    reason: str


def option(default: Any, about: str, low: float | None = None, high: float | None = None) -> Any:
    """A field with a description and, for numbers, the range that it may be in."""
    return field(default=default, metadata={"about": about, "low": low, "high": high})


@dataclass(frozen=True)
class NamedReward:
    """The base of all of them. The first sentence of a subclass's docstring stands in the table of names."""

    chunk_size: ClassVar[int | None] = None
    """Samples of one call; None: the pool's. 1 where a single sample can be slow, so that the deadline is for it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the data must have."""
        return ()

    @property
    def wants_tokens(self) -> bool:
        """Whether `score` needs the token ids of the completion."""
        return False

    @property
    def time_limit_s(self) -> float | None:
        """What one sample may take by the reward's own clock, or None."""
        return None

    def prepare(self) -> None:
        """Import and try what scoring needs, once in each worker. Raises IsobitError where it cannot be had."""

    def score(self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None) -> float | Unscored:
        """The reward of one completion; `row` holds the columns. Raises ValueError for a row that cannot be used."""
        raise NotImplementedError

    def __call__(
        self,
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | Unscored]:
        """The rewards of a batch, text or chat, in TRL's signature."""
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        tokens = completion_ids if completion_ids is not None else [None] * len(completions)
        return [self.score(completion_text(c), row, ids) for c, row, ids in zip(completions, rows, tokens)]


Reward = TypeVar("Reward", bound=NamedReward)


def parse_options(schema: type[Reward], values: Mapping[str, Any]) -> Reward:
    """The reward with these options. Raises OptionError for a wrong name, type, range or combination."""
    known = {each.name: each for each in fields(schema)}
    kinds = get_type_hints(schema)
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            hint = did_you_mean(str(name), list(known)) if known else "this reward has no options"
            raise OptionError(f"options.{name}", f"unknown, {hint}")
        given[name] = _checked(name, kinds[name], value, known[name].metadata)
    return schema(**given)


def described(schema: type[NamedReward]) -> list[tuple[str, str, str, str]]:
    """(name, type, default, description) of each option."""
    kinds = get_type_hints(schema)
    return [
        (each.name, _kind(kinds[each.name]), _default(each.default), each.metadata["about"]) for each in fields(schema)
    ]


def _checked(name: str, kind: Any, value: Any, limits: Mapping[str, Any]) -> Any:
    choices = _alternatives(kind)
    if isinstance(value, int) and not isinstance(value, bool) and float in choices:
        value = float(value)
    if not any(_fits(choice, value) for choice in choices):
        raise OptionError(f"options.{name}", f"expected {_kind(kind)}, got {value!r}")
    low, high = limits["low"], limits["high"]
    if low is not None and isinstance(value, (int, float)):
        inside = value >= low and (high is None or value <= high)  # false for what is not a number
        if not inside:
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise OptionError(f"options.{name}", f"expected {wanted}, got {value!r}")
    return value


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType, Literal) else (kind,)


def _fits(choice: Any, value: Any) -> bool:
    if isinstance(choice, type):
        return isinstance(value, choice) and (choice is bool or not isinstance(value, bool))
    return isinstance(value, str) and value == choice


def _kind(kind: Any) -> str:
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return " or ".join(names.get(choice, str(choice)) for choice in _alternatives(kind) if choice is not types.NoneType)


def _default(value: Any) -> str:
    if value is None or value == "":
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)

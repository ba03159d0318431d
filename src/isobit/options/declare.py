"""How an option is declared, and what its declaration says: marks in `Annotated`, and `options_of`
a dataclass."""

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_NOT_AN_OPTION = object()
NotAnOption = Annotated[_T, _NOT_AN_OPTION]
"""The type of a field that the code sets, and no file."""
REQUIRED = object()
"""The default of an option that has none."""


@dataclass(frozen=True)
class Limit:
    """A bound of a number. `sign`: ≥, >, ≤ or <."""

    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        """Whether the value is within; false for what is not a number."""
        if self.sign in ("≥", ">"):
            return value > self.bound or (self.sign == "≥" and value == self.bound)
        return value < self.bound or (self.sign == "≤" and value == self.bound)

    @property
    def words(self) -> str:
        """As a message says it."""
        return (
            f"{ {'≥': 'at least', '>': 'above', '≤': 'at most', '<': 'below'}[self.sign] } "
            f"{self.bound:,}"
        )

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:,}"


def at_least(bound: float) -> Limit:
    """The smallest value."""
    return Limit("≥", bound)


def above(bound: float) -> Limit:
    """The largest value that is too small."""
    return Limit(">", bound)


def at_most(bound: float) -> Limit:
    """The largest value."""
    return Limit("≤", bound)


def below(bound: float) -> Limit:
    """The smallest value that is too large."""
    return Limit("<", bound)


@dataclass(frozen=True)
class OneOf:
    """Text that is one of the names of a table, which stands where the code looks them up."""

    names: Collection[str]


@dataclass(frozen=True)
class Suggested:
    """Text that is likely to be one of these names, which a tab completes."""

    names: Collection[str]


@dataclass(frozen=True)
class Example:
    """A mapping that a message gives as an example."""

    example: str


@dataclass(frozen=True)
class Pattern:
    """Text of one form, which messages call `wanted`. `fits` says whether a text has it, and raises
    IsobitError for one that nearly has."""

    wanted: str
    fits: Callable[[str], bool]


@dataclass(frozen=True)
class FileName:
    """Text that names a file or folder which is read; with `functions`, a function of a file as
    `FILE.py:NAME`, among other names. In a config file it may be relative to that."""

    functions: bool = False


@dataclass(frozen=True)
class Preprocess:
    """Changes what is given for the option before it is read, such as a short form into the section
    that it stands for."""

    change: Callable[[Any], Any]


@dataclass(frozen=True)
class Formerly:
    """The option had this name in the release before, and takes it with a warning."""

    name: str


def text_as(key: str | Callable[[str], str]) -> Preprocess:
    """For a section: a text or a list in the place of the whole is meant for this key, or for the
    one found by it."""

    def expand(value: Any) -> Any:
        if not isinstance(value, (str, list, tuple)):
            return value
        return {key if isinstance(key, str) else key(str(value)): value}

    return Preprocess(expand)


@dataclass(frozen=True)
class Option:
    """One option of a dataclass. `kind` is its whole type, marks included."""

    name: str
    kind: Any
    default: Any

    @property
    def text(self) -> str:
        """What it means."""
        return next((mark for mark in unwrapped(self.kind)[1] if isinstance(mark, str)), "")

    @property
    def former_names(self) -> tuple[str, ...]:
        """What it was called before."""
        return tuple(mark.name for mark in unwrapped(self.kind)[1] if isinstance(mark, Formerly))

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The range of its numbers."""
        return tuple(mark for mark in unwrapped(self.kind)[1] if isinstance(mark, Limit))


@cache
def options_of(schema: Any) -> Mapping[str, Option]:
    """The options of a dataclass by name, in their order."""
    hints = get_type_hints(schema, include_extras=True)
    found = {}
    for each in fields(schema):
        if _NOT_AN_OPTION not in unwrapped(hints[each.name])[1]:
            made = each.default_factory() if each.default_factory is not MISSING else each.default
            found[each.name] = Option(
                each.name, hints[each.name], REQUIRED if made is MISSING else made
            )
    return found


def unwrapped(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """(a type without its marks, the marks)."""
    if get_origin(kind) is not Annotated:
        return kind, ()
    inner, *marks = get_args(kind)
    return inner, tuple(marks)


def is_union(kind: Any) -> bool:
    """Whether a value may be of several types."""
    return get_origin(kind) in (Union, types.UnionType)


def sections(kind: Any) -> Iterator[type]:
    """The dataclasses in a type, however deep in unions, lists and marks."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield kind
    for part in get_args(kind):
        yield from sections(part)


def members(kind: Any) -> tuple[Any, ...]:
    """The types that a value may have: the members of a union, without their marks."""
    kind = unwrapped(kind)[0]
    return (
        tuple(inner for part in get_args(kind) for inner in members(part))
        if is_union(kind)
        else (kind,)
    )


def choices(kind: Any) -> tuple[str, ...]:
    """The values that can be named."""
    kind, marks = unwrapped(kind)
    if names := [
        name for mark in marks if isinstance(mark, (OneOf, Suggested)) for name in mark.names
    ]:
        return tuple(names)
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if is_union(kind):
        return tuple(name for part in get_args(kind) for name in choices(part))
    return ("true", "false") if kind is bool else ()


def type_text(kind: Any) -> str:
    """A type in the words of a reference: `whole number`, `a | b`, `list of text`."""
    kind, marks = unwrapped(kind)
    origin, parts = get_origin(kind), get_args(kind)
    names = [name for mark in marks if isinstance(mark, OneOf) for name in mark.names]
    if names or origin is Literal:
        return " | ".join(map(str, names or parts))
    if is_union(kind):
        return " | ".join(type_text(part) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list of {type_text(parts[0])}"
    if is_dataclass(kind):
        return "section"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    return {str: "text", int: "whole number", float: "number", bool: "true | false"}[kind]


def plain(value: Any) -> Any:
    """A value as YAML or JSON would have it: a dataclass as the mapping of its options, a tuple as
    a list."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in options_of(type(value))}
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value

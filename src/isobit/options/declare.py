"""The declaration of options: marks in `Annotated`, and `options_of`, which reads the options of a
dataclass."""

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_NOT_AN_OPTION = object()
NotAnOption = Annotated[_T, _NOT_AN_OPTION]
"""The type of a field that the code sets and a file cannot."""
REQUIRED = object()
"""The default of an option that has none."""


@dataclass(frozen=True)
class Limit:
    """A bound of a number. `sign`: ≥, >, ≤ or <."""

    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        """Return whether the value is within the bound; false for NaN."""
        if self.sign in ("≥", ">"):
            return value > self.bound or (self.sign == "≥" and value == self.bound)
        return value < self.bound or (self.sign == "≤" and value == self.bound)

    @property
    def words(self) -> str:
        """The bound in the words of a message, such as `at least 1`."""
        return (
            f"{ {'≥': 'at least', '>': 'above', '≤': 'at most', '<': 'below'}[self.sign] } "
            f"{self.bound:,}"
        )

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:,}"


def at_least(bound: float) -> Limit:
    """Return a limit for numbers of which `bound` is the smallest."""
    return Limit("≥", bound)


def above(bound: float) -> Limit:
    """Return a limit for numbers larger than `bound`."""
    return Limit(">", bound)


def at_most(bound: float) -> Limit:
    """Return a limit for numbers of which `bound` is the largest."""
    return Limit("≤", bound)


def below(bound: float) -> Limit:
    """Return a limit for numbers smaller than `bound`."""
    return Limit("<", bound)


@dataclass(frozen=True)
class OneOf:
    """Text that is one of the names of a table, which is the table in which the code looks them
    up."""

    names: Collection[str]


@dataclass(frozen=True)
class Suggested:
    """Text that is likely to be one of these names, which the shell completes on a tab."""

    names: Collection[str]


@dataclass(frozen=True)
class Example:
    """A mapping that a message gives as an example."""

    example: str


@dataclass(frozen=True)
class Pattern:
    """Text of one form, which messages call `wanted`. `fits` returns whether a text has the form,
    and raises IsobitError for a text that nearly has it."""

    wanted: str
    fits: Callable[[str], bool]


@dataclass(frozen=True)
class FileName:
    """Text that names a file or folder which is read; with `functions`, a function of a file as
    `FILE.py:NAME`, among other names. In a config file it may be relative to the folder of that
    file."""

    functions: bool = False


@dataclass(frozen=True)
class Preprocess:
    """A change to the given value of an option before it is read, such as from a short form to the
    section that it stands for."""

    change: Callable[[Any], Any]


@dataclass(frozen=True)
class Formerly:
    """The name that an option had in the release before, which it still takes, with a warning.
    With `values`, pairs of an old and a new one, another option has that name now, and only these
    old values of it are meant."""

    name: str
    values: tuple[tuple[str, str], ...] = ()


def text_as(key: str | Callable[[str], str]) -> Preprocess:
    """Return a change for a section: a text or a list in the place of the whole section becomes the
    value of `key`, or of the key that `key` returns for it."""

    def expand(value: Any) -> Any:
        if not isinstance(value, (str, list, tuple)):
            return value
        return {key if isinstance(key, str) else key(str(value)): value}

    return Preprocess(expand)


@dataclass(frozen=True)
class Option:
    """An option of a dataclass. `kind` is its whole type, marks included."""

    name: str
    kind: Any
    default: Any

    @property
    def text(self) -> str:
        """The description of the option, or empty text."""
        return next((mark for mark in unwrapped(self.kind)[1] if isinstance(mark, str)), "")

    @property
    def former_names(self) -> tuple[Formerly, ...]:
        """The names that the option had before."""
        return tuple(mark for mark in unwrapped(self.kind)[1] if isinstance(mark, Formerly))

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of the option's numbers."""
        return tuple(mark for mark in unwrapped(self.kind)[1] if isinstance(mark, Limit))


@cache
def options_of(schema: Any) -> Mapping[str, Option]:
    """Return the options of a dataclass by name, in their order."""
    hints = get_type_hints(schema, include_extras=True)
    declared = {}
    for f in fields(schema):
        if _NOT_AN_OPTION not in unwrapped(hints[f.name])[1]:
            made = f.default_factory() if f.default_factory is not MISSING else f.default
            declared[f.name] = Option(f.name, hints[f.name], REQUIRED if made is MISSING else made)
    return declared


def unwrapped(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return (a type without its marks, the marks)."""
    if get_origin(kind) is not Annotated:
        return kind, ()
    inner, *marks = get_args(kind)
    return inner, tuple(marks)


def is_union(kind: Any) -> bool:
    """Return whether a type is a union, so that a value may be of several types."""
    return get_origin(kind) in (Union, types.UnionType)


def sections(kind: Any) -> Iterator[type]:
    """Yield the dataclasses in a type, however deep in unions, lists and marks."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield kind
    for member in get_args(kind):
        yield from sections(member)


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types that a value may have: the members of a union, without their marks."""
    kind = unwrapped(kind)[0]
    return (
        tuple(inner for member in get_args(kind) for inner in members(member))
        if is_union(kind)
        else (kind,)
    )


def choices(kind: Any) -> tuple[str, ...]:
    """Return the values of a type that can be listed by name; empty for other types."""
    kind, marks = unwrapped(kind)
    if names := [
        name for mark in marks if isinstance(mark, (OneOf, Suggested)) for name in mark.names
    ]:
        return tuple(names)
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if is_union(kind):
        return tuple(name for member in get_args(kind) for name in choices(member))
    return ("true", "false") if kind is bool else ()


def type_text(kind: Any) -> str:
    """Return a type in the words of a reference: `whole number`, `a | b`, `list of text`."""
    kind, marks = unwrapped(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    names = [name for mark in marks if isinstance(mark, OneOf) for name in mark.names]
    if names or origin is Literal:
        return " | ".join(map(str, names or arguments))
    if is_union(kind):
        return " | ".join(type_text(member) for member in arguments if member is not type(None))
    if origin is tuple:
        return f"list of {type_text(arguments[0])}"
    if is_dataclass(kind):
        return "section"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    return {str: "text", int: "whole number", float: "number", bool: "true | false"}[kind]


def plain(value: Any) -> Any:
    """Return a value as YAML or JSON would have it: a dataclass as the mapping of its options, a
    tuple as a list."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in options_of(type(value))}
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value

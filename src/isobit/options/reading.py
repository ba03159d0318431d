"""Plain values, as YAML or JSON has them, to the frozen dataclass that declares them, or the first
mistake in them.

What is given must fit its declaration: an unknown key, a wrong type or a value outside its range is
refused. One value is taken for a list of one, and text that reads as a number for the number, since
PyYAML reads `1e-6` as text.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from isobit.errors import IsobitError, brief, did_you_mean
from isobit.options.declare import (
    REQUIRED,
    Example,
    Limit,
    OneOf,
    Option,
    Pattern,
    Preprocess,
    choices,
    is_union,
    options_of,
    unwrapped,
)

_Schema = TypeVar("_Schema")
KeyPath = tuple[str | int, ...]
"""Keys and positions in lists, from the outermost section."""


class OptionError(IsobitError):
    """A mistake in what was given. `path` is where, `text` what."""

    def __init__(self, path: KeyPath, text: str) -> None:
        super().__init__(f"{'.'.join(map(brief, path))}: {text}" if path else text)
        self.path, self.text = path, text


class Expected(OptionError):
    """A value that is not what was `wanted`."""

    def __init__(self, path: KeyPath, wanted: str, value: object) -> None:
        super().__init__(path, f"expected {wanted}, got {shown(value)}")
        self.wanted, self.value = wanted, value


class UnknownOption(OptionError):
    """A key that its section does not have; `known`: the keys that it has."""

    def __init__(self, path: KeyPath, value: object, known: Sequence[str]) -> None:
        super().__init__(
            path,
            f"unknown, {did_you_mean(str(path[-1]), known) if known else 'there are no options'}",
        )
        self.value, self.known = value, known


def read(schema: type[_Schema], values: object, path: KeyPath = ()) -> _Schema:
    """Return the dataclass `schema` with these options. Raises OptionError for the first mistake;
    `path` is where it is."""
    if not isinstance(values, Mapping):
        raise Expected(path, f"a section of keys{_example(schema)}", values)
    options: Mapping[str, Option] = options_of(schema)  # type: ignore[arg-type]
    values = renamed(values, options, path)
    for key, value in values.items():
        if key not in options:
            raise UnknownOption((*path, str(key)), value, list(options))
    chosen = {}
    for name, option in options.items():
        if name in values:
            chosen[name] = _value(option.kind, values[name], (*path, name))
        elif option.default is REQUIRED:
            raise OptionError((*path, name), "required, but not given")
    try:
        return schema(**chosen)
    except OptionError as error:
        raise OptionError((*path, *error.path), error.text) from None
    except IsobitError as error:
        raise OptionError(path, str(error)) from None


def renamed(
    values: Mapping[Any, Any], options: Mapping[str, Option], path: KeyPath
) -> Mapping[Any, Any]:
    """Return the values under the names that options have now. Raises OptionError where an option
    has its old name and its present one."""
    result = dict(values)
    for option in options.values():
        for former in option.former_names:
            now, old = dict(former.values), former.name
            if old not in result or (now and result[old] not in tuple(now)):
                continue
            if option.name in result:
                raise OptionError((*path, old), f"is called {option.name}, which is given too")
            value = result.pop(old)
            result[option.name] = now[value] if now else value
            was, new = (f": {value}", f": {now[value]}") if now else ("", "")
            say_renamed(".".join(map(str, (*path, old))) + was, option.name + new)
    return result


@cache
def say_renamed(old: str, new: str) -> None:
    """Warn, once, that an option is called otherwise now."""
    print(
        f"warning: {old} is called {new} now; the old name ends with this release", file=sys.stderr
    )


def read_own_fields(value: Any, schema: type) -> None:
    """Read the fields of a frozen dataclass that code makes too, in its `__post_init__`: those that
    are options of `schema` are replaced by their read values. Raises OptionError for the first
    mistake."""
    for name, option in options_of(schema).items():
        object.__setattr__(value, name, _value(option.kind, getattr(value, name), (name,)))


def shown(value: object) -> str:
    """Return a value as text for a message."""
    if isinstance(value, bool):
        return str(value).lower()
    return "nothing" if value is None else brief(repr(value), 200)


def _value(kind: Any, value: Any, path: KeyPath) -> Any:
    kind, marks = unwrapped(kind)
    for mark in marks:
        value = _asked(mark.change, value, path) if isinstance(mark, Preprocess) else value
    example = next((mark.example for mark in marks if isinstance(mark, Example)), "{name: value}")
    try:
        typed = _typed(kind, value, path, example)
    except Expected as error:
        for mark in marks:
            if error.path == path and isinstance(mark, (OneOf, Pattern)):
                raise Expected(path, _wanted(mark), value) from None
        raise
    for mark in marks:
        if isinstance(mark, Limit) and isinstance(typed, (int, float)) and not mark.holds(typed):
            raise Expected(path, mark.words, value)
        if isinstance(mark, OneOf) and typed is not None and typed not in mark.names:
            raise Expected(path, _wanted(mark), value)
        if (
            isinstance(mark, Pattern)
            and isinstance(typed, str)
            and not _asked(mark.fits, typed, path)
        ):
            raise Expected(path, _wanted(mark), value)
    return typed


def _wanted(mark: OneOf | Pattern) -> str:
    return mark.wanted if isinstance(mark, Pattern) else _or(list(mark.names))


def _asked(function: Callable[[Any], Any], value: Any, path: KeyPath) -> Any:
    """Call a declaration's own function on a value; its error is reported at this path."""
    try:
        return function(value)
    except IsobitError as error:
        raise OptionError(path, str(error)) from None


def _typed(kind: Any, value: Any, path: KeyPath, example: str) -> Any:
    origin, kinds = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_union(kind):
        return _of_union(kinds, value, path)
    if origin is Literal:
        if value not in kinds or isinstance(value, bool):
            raise Expected(path, _or([str(choice) for choice in kinds]), value)
        return value
    if origin is tuple:
        return _list(kinds, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise Expected(path, f"a mapping, such as {example}", value)
        return {
            str(name): _value(kinds[1], inner, (*path, str(name))) for name, inner in value.items()
        }
    if is_dataclass(kind) and isinstance(kind, type):
        return read(kind, value, path)
    return _SCALARS[kind](value, path)


def _of_union(members: tuple[Any, ...], value: Any, path: KeyPath) -> Any:
    """Return the value as the first type that it fits. Raises the mistake that is deepest in it, or
    one that names all types."""
    if value is None and type(None) in members:
        return None
    mistakes: list[OptionError] = []
    for member in members:
        if member is not type(None):
            try:
                return _value(member, value, path)
            except OptionError as error:
                mistakes.append(error)
    deepest = max(
        mistakes, key=lambda mistake: (len(mistake.path), not isinstance(mistake, Expected))
    )
    wanted = [
        mistake.wanted
        for mistake in mistakes
        if isinstance(mistake, Expected) and mistake.path == path
    ]
    if len(wanted) < len(mistakes):
        raise deepest
    raise Expected(path, " or ".join(wanted), value)


def _list(members: tuple[Any, ...], value: Any, path: KeyPath) -> tuple[Any, ...]:
    several = members[1:] == (Ellipsis,)
    if several and value is not None and not isinstance(value, (list, tuple)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise Expected(path, f"a list, such as [{next(iter(choices(members[0])), 'a, b')}]", value)
    kinds = members[:1] * len(value) if several else members
    if len(value) != len(kinds):
        raise Expected(path, f"a list of {len(kinds)}", value)
    return tuple(_value(kind, item, (*path, i)) for i, (kind, item) in enumerate(zip(kinds, value)))


def _whole(value: Any, path: KeyPath) -> int:
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and (value == value // 1):
        return int(value)
    raise Expected(path, "a whole number", value)


def _number(value: Any, path: KeyPath) -> float:
    try:
        number = (
            float(value)
            if isinstance(value, (int, float, str)) and not isinstance(value, bool)
            else None
        )
    except (ValueError, OverflowError):
        number = None
    if number is None or not math.isfinite(number):
        raise Expected(path, "a number" if number is None else "a finite number", value)
    return number


def _switch(value: Any, path: KeyPath) -> bool:
    switch = {"true": True, "false": False}.get(value) if isinstance(value, str) else value
    if not isinstance(switch, bool):
        raise Expected(path, "true or false", value)
    return switch


def _text(value: Any, path: KeyPath) -> str:
    if not isinstance(value, str):
        raise Expected(path, "text", value)
    return value


_SCALARS: Mapping[type, Callable[[Any, KeyPath], Any]] = {
    int: _whole,
    float: _number,
    bool: _switch,
    str: _text,
}


def _or(names: Sequence[str]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _example(schema: type) -> str:
    names = list(options_of(schema))[:2]
    return f", such as {{{', '.join(f'{name}: ...' for name in names)}}}" if names else ""

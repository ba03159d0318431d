"""Plain values, as YAML or JSON has them, to the frozen dataclass that declares them, or the first mistake in them.

What is given must fit its declaration: an unknown key, a wrong type or a value outside its range is refused. One value
is taken for a list of one, and text that reads as a number for the number, since PyYAML reads `1e-6` as text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
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
Place = tuple[str | int, ...]
"""Keys and positions in lists, from the outermost section."""


class OptionError(IsobitError):
    """A mistake in what was given. `place` is where, `text` what."""

    def __init__(self, place: Place, text: str) -> None:
        super().__init__(f"{'.'.join(map(brief, place))}: {text}" if place else text)
        self.place, self.text = place, text


class Expected(OptionError):
    """A value that is not what was `wanted`."""

    def __init__(self, place: Place, wanted: str, value: object) -> None:
        super().__init__(place, f"expected {wanted}, got {shown(value)}")
        self.wanted, self.value = wanted, value


class UnknownOption(OptionError):
    """A key that is no option of its section, which has those that are `known`."""

    def __init__(self, place: Place, value: object, known: Sequence[str]) -> None:
        super().__init__(place, f"unknown, {did_you_mean(str(place[-1]), known) if known else 'there are no options'}")
        self.value, self.known = value, known


def read(schema: type[_Schema], values: object, place: Place = ()) -> _Schema:
    """The dataclass `schema` with these options. Raises OptionError for the first mistake; `place` is where it is."""
    if not isinstance(values, Mapping):
        raise Expected(place, f"a section of keys{_example(schema)}", values)
    options: Mapping[str, Option] = options_of(schema)  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in options:
            raise UnknownOption((*place, str(key)), value, list(options))
    found = {}
    for name, option in options.items():
        if name in values:
            found[name] = _value(option.kind, values[name], (*place, name))
        elif option.default is REQUIRED:
            raise OptionError((*place, name), "required, but not given")
    try:
        return schema(**found)
    except OptionError as error:
        raise OptionError((*place, *error.place), error.text) from None
    except IsobitError as error:
        raise OptionError(place, str(error)) from None


def settle(value: Any, schema: type) -> None:
    """For `__post_init__` of a frozen dataclass that code makes too: its fields that are options of `schema` become
    what is read of them. Raises OptionError for the first mistake."""
    for name, option in options_of(schema).items():
        object.__setattr__(value, name, _value(option.kind, getattr(value, name), (name,)))


def shown(value: object) -> str:
    """A value in a message."""
    if isinstance(value, bool):
        return str(value).lower()
    return "nothing" if value is None else brief(repr(value), 200)


def _value(kind: Any, value: Any, place: Place) -> Any:
    kind, marks = unwrapped(kind)
    for mark in marks:
        value = _asked(mark.change, value, place) if isinstance(mark, Preprocess) else value
    example = next((mark.example for mark in marks if isinstance(mark, Example)), "{name: value}")
    try:
        found = _typed(kind, value, place, example)
    except Expected as error:
        for mark in marks:
            if error.place == place and isinstance(mark, (OneOf, Pattern)):
                raise Expected(place, _wanted(mark), value) from None
        raise
    for mark in marks:
        if isinstance(mark, Limit) and isinstance(found, (int, float)) and not mark.holds(found):
            raise Expected(place, mark.words, value)
        if isinstance(mark, OneOf) and found is not None and found not in mark.names:
            raise Expected(place, _wanted(mark), value)
        if isinstance(mark, Pattern) and isinstance(found, str) and not _asked(mark.fits, found, place):
            raise Expected(place, _wanted(mark), value)
    return found


def _wanted(mark: OneOf | Pattern) -> str:
    return mark.wanted if isinstance(mark, Pattern) else _or(list(mark.names))


def _asked(function: Callable[[Any], Any], value: Any, place: Place) -> Any:
    """What a declaration's own function says of a value; its error is of this place."""
    try:
        return function(value)
    except IsobitError as error:
        raise OptionError(place, str(error)) from None


def _typed(kind: Any, value: Any, place: Place, example: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_union(kind):
        return _of_union(parts, value, place)
    if origin is Literal:
        if value not in parts or isinstance(value, bool):
            raise Expected(place, _or([str(part) for part in parts]), value)
        return value
    if origin is tuple:
        return _list(parts, value, place)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise Expected(place, f"a mapping, such as {example}", value)
        return {str(name): _value(parts[1], inner, (*place, str(name))) for name, inner in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return read(kind, value, place)
    return _SCALARS[kind](value, place)


def _of_union(parts: tuple[Any, ...], value: Any, place: Place) -> Any:
    """The first type that the value fits. Else the mistake that is deepest in it, or all that could be there."""
    if value is None and type(None) in parts:
        return None
    mistakes: list[OptionError] = []
    for part in parts:
        if part is not type(None):
            try:
                return _value(part, value, place)
            except OptionError as error:
                mistakes.append(error)
    deepest = max(mistakes, key=lambda mistake: (len(mistake.place), not isinstance(mistake, Expected)))
    wanted = [mistake.wanted for mistake in mistakes if isinstance(mistake, Expected) and mistake.place == place]
    if len(wanted) < len(mistakes):
        raise deepest
    raise Expected(place, " or ".join(wanted), value)


def _list(parts: tuple[Any, ...], value: Any, place: Place) -> tuple[Any, ...]:
    several = parts[1:] == (Ellipsis,)
    if several and value is not None and not isinstance(value, (list, tuple)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise Expected(place, f"a list, such as [{next(iter(choices(parts[0])), 'a, b')}]", value)
    kinds = parts[:1] * len(value) if several else parts
    if len(value) != len(kinds):
        raise Expected(place, f"a list of {len(kinds)}", value)
    return tuple(_value(kind, each, (*place, i)) for i, (kind, each) in enumerate(zip(kinds, value)))


def _whole(value: Any, place: Place) -> int:
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and (value == value // 1):
        return int(value)
    raise Expected(place, "a whole number", value)


def _number(value: Any, place: Place) -> float:
    try:
        found = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        found = None
    if found is None or not math.isfinite(found):
        raise Expected(place, "a number" if found is None else "a finite number", value)
    return found


def _switch(value: Any, place: Place) -> bool:
    found = {"true": True, "false": False}.get(value) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise Expected(place, "true or false", value)
    return found


def _text(value: Any, place: Place) -> str:
    if not isinstance(value, str):
        raise Expected(place, "text", value)
    return value


_SCALARS: Mapping[type, Callable[[Any, Place], Any]] = {int: _whole, float: _number, bool: _switch, str: _text}


def _or(names: Sequence[str]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _example(schema: type) -> str:
    names = list(options_of(schema))[:2]
    return f", such as {{{', '.join(f'{name}: ...' for name in names)}}}" if names else ""

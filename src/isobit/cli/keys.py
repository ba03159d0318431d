"""Long options that are short forms of config keys: `--temperature 0` is `sampling.temperature=0`.

A command names its short forms and its schema. Type, range, default and description are those of
the key, as declared. What was given becomes overrides in front of those that were typed as
`key=value`. Left out: reading the overrides (`config/reading.py`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.core import TyperCommand, TyperOption

from isobit.errors import IsobitError
from isobit.options.declare import (
    FileName,
    Option,
    choices,
    members,
    options_of,
    sections,
    type_text,
    unwrapped,
)
from isobit.options.reading import say_renamed


@dataclass(frozen=True)
class Short:
    """A long option that stands for a key. `expand` returns the overrides for the given text, where
    they are others than `key=text`, and `help` says then what it does; a `former` option is hidden,
    and ends with this release."""

    flag: str
    key: str
    expand: Callable[[str], Sequence[str]] | None = None
    former: bool = False
    help: str = ""

    @property
    def name(self) -> str:
        """The name of typer's parameter."""
        return f"short_{self.flag.strip('-').replace('-', '_')}"


def formerly(**flags: str) -> tuple[Short, ...]:
    """Return short forms that end with this release, by the names of their flags."""
    return tuple(
        Short(f"--{name.replace('_', '-')}", key, former=True) for name, key in flags.items()
    )


class KeyCommand(TyperCommand):
    """A command with the argument `overrides`, keys of its `schema`, some of which have a short
    form."""

    shorts: tuple[Short, ...] = ()
    has_defaults = True
    """Whether the defaults of the schema are the command's."""
    _options: Sequence[TyperOption] = ()

    @staticmethod
    def schema() -> type:
        """Import and return the dataclass of the command's keys, which `isobit --help` does not
        need."""
        raise NotImplementedError

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command, its short forms, and --help."""
        if not self._options:
            self._options = [
                _option(short, option_at(self.schema(), short.key), self.has_defaults)
                for short in self.shorts
            ]
        *own, last = super().get_params(ctx)
        return [*own, *self._options, last]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and turn what short forms were given into overrides."""
        rest = super().parse_args(ctx, args)
        words = list[str]()
        for short in self.shorts:
            value = ctx.params.pop(short.name, None)
            if value not in (None, False, (), []):
                words += _overrides(short, option_at(self.schema(), short.key), value)
        ctx.params["overrides"] = [*words, *(ctx.params["overrides"] or ())]
        return rest


def option_at(schema: Any, key: str) -> Option:
    """Return the declaration of a dotted key."""
    *parents, last = key.split(".")
    for parent in parents:
        schema = next(sections(options_of(schema)[parent].kind))
    return options_of(schema)[last]


def first_override(word: Path | None, overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the model and the overrides of a command whose model may be left out: the first
    argument may be an override."""
    if word is None or "=" not in str(word) or word.exists():
        return word, list(overrides)
    return None, [str(word), *overrides]


def _form(kind: Any) -> str:
    """Return how a key is given as an option: a switch, text, texts (several times), numbers
    (between commas), or names (`NAME=VALUE`, several times)."""
    kind = members(kind)[0]
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "names"
    if origin is tuple:
        return "numbers" if parts[0] is int else "texts"
    return "switch" if kind is bool else "text"


def _option(short: Short, option: Option, default: bool) -> TyperOption:
    """Return the option of typer for a short form, which says its `default` or not."""
    form, marks = _form(option.kind), unwrapped(option.kind)[1]
    metavars = {"switch": None, "numbers": "N,N", "names": "NAME=VALUE", "texts": "TEXT"}
    number = type_text(option.kind) in ("number", "whole number")
    file = any(isinstance(mark, FileName) for mark in marks)
    names = choices(option.kind)
    help = ": ".join(
        filter(None, (short.key, short.help or re.split(r"\.(?: |$)", option.text)[0]))
    )
    if names and form == "text" and names[0] not in help:
        help += f": {', '.join(names)}"
    if form in ("names", "texts"):
        help += "; may be given several times"
    elif default and form != "switch" and isinstance(option.default, (int, float, str)):
        help += f" [default: {option.default}]"
    return TyperOption(
        param_decls=[short.flag, short.name],
        is_flag=form == "switch",
        multiple=form in ("texts", "names"),
        metavar=metavars.get(form, "FILE" if file else "NUMBER" if number else "TEXT"),
        hidden=short.former,
        help=help,
        autocompletion=lambda ctx, args, incomplete: [
            name for name in names if name.startswith(incomplete)
        ],
        type=bool if form == "switch" else str,
    )


def _overrides(short: Short, option: Option, value: Any) -> list[str]:
    """Return the overrides for the value of a short form, and warn of a former one."""
    from isobit.config.reading import override

    form, text = _form(option.kind), get_args(members(option.kind)[0])[1:] == (str,)
    if short.expand is not None:
        words = list(short.expand(value))
    elif form == "switch":
        words = [f"{short.key}=true"]
    elif form == "names" and not text:  # values are read as YAML
        words = [f"{short.key}.{name}={item}" for name, item in pairs(short.flag, value).items()]
    else:
        several: dict[str, Callable[[], Any]] = {
            "names": lambda: pairs(short.flag, value),
            "numbers": lambda: value.split(","),
            "texts": lambda: list(value),
        }
        words = [override(short.key, several.get(form, lambda: value)())]
    if short.former:
        say_renamed(short.flag, " ".join(words))
    return words


def pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the value of each name in texts `NAME=VALUE`. Raises IsobitError for another text, and
    for a name that comes twice."""
    values = dict[str, str]()
    for text in texts:
        name, _, value = text.partition("=")
        if not (name and value):
            raise IsobitError(f"{flag} {text!r}: expected NAME=VALUE")
        if name in values:
            raise IsobitError(f"{flag} {text!r}: {name} is {values[name]!r} already; give it once")
        values[name] = value
    return values

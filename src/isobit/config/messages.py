"""One line for a key that no section has: what was probably meant, or what the section has."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from isobit.config.aliases import WHY_NOT, counterpart
from isobit.errors import brief, listed
from isobit.options.declare import options_of, sections
from isobit.options.reading import OptionError, UnknownOption


def describe(error: OptionError, schema: type) -> str:
    """Describe the mistake in one line."""
    return _unknown(error, schema) if isinstance(error, UnknownOption) else str(error)


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield every key with its full path; those of a list's sections stand under the list's own
    key."""
    for name, option in options_of(schema).items():
        yield f"{prefix}{name}"
        for section in sections(option.kind):
            yield from keys_of(section, f"{prefix}{name}.")


def unknown_keys(values: Mapping[str, Any], schema: type, prefix: str = "") -> set[str]:
    """Return the full paths of all keys that the schema does not have."""
    unknown, options = set(), options_of(schema)
    for name, value in values.items():
        if name not in options:
            unknown.add(f"{prefix}{name}")
        elif isinstance(value, Mapping) and (known := list(sections(options[name].kind))):
            unknown |= set.intersection(
                *(unknown_keys(value, section, f"{prefix}{name}.") for section in known)
            )
    return unknown


def _unknown(error: UnknownOption, schema: type) -> str:
    *above, last = map(str, error.path)
    key, everywhere = ".".join((*above, last)), list(keys_of(schema))
    shown = brief(key)
    for name in _leaves(key, error.value):
        known, theirs = counterpart(name)
        if theirs in everywhere:
            return f"unknown key {brief(name)!r} (did you mean {theirs!r}?)"
        if known and theirs is None:
            reason = WHY_NOT.get(
                name.rpartition(".")[2],
                "isobit has no counterpart of it (docs/from-trl.md and its neighbours)",
            )
            return f"unknown key {brief(name)!r}: {reason}"
    if not above and "." in last and last in everywhere:
        section, _, inner = last.partition(".")
        return (
            f"unknown key {shown!r}: a key of a section stands in it: {section}: {{{inner}: ...}}"
        )
    if close := get_close_matches(last.lower(), error.known, 1):
        meant = ".".join((*(segment for segment in above if not segment.isdigit()), close[0]))
        return f"unknown key {shown!r} (did you mean {meant!r}?)"
    if same := [path for path in everywhere if path.rpartition(".")[2] == last]:
        return f"unknown key {shown!r} (did you mean {' or '.join(map(repr, same[:3]))}?)"
    ends = [path.rpartition(".")[2] for path in everywhere]
    if close := get_close_matches(last, ends, 1, cutoff=0.8):
        return f"unknown key {shown!r} (did you mean {everywhere[ends.index(close[0])]!r}?)"
    return f"unknown key {shown!r}; known here: {listed(error.known)}"


def _leaves(key: str, value: object) -> Iterator[str]:
    """Yield the key, and where it holds a section of another trainer's, the keys in that."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    yield key

"""One line for what a schema refuses: which key, what is wrong with it, and what would be right.

pydantic finds the mistake; the words are isobit's, so that a user reads of sections, lists and whole numbers, and not
of dictionaries, tuples and instances of classes.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from isobit.config.elsewhere import counterpart

_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list, such as [a, b]"),
    "finite_number": "a finite number",
    "string_type": "text",
    "dict_type": "a mapping, such as {name: value}",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def describe(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first mistake of several, in one line."""
    first = error.errors()[0]
    location, section = _follow(first["loc"], schema)
    key, kind = ".".join(str(part) for part in location), first["type"]
    if kind == "extra_forbidden":
        return _unknown(location, first["input"], schema, section)
    if kind == "missing" and isinstance(location[-1], int):
        return f"{'.'.join(map(str, location[:-1]))}: expected more than {location[-1]} of them"
    if kind == "missing":
        return f"{key}: required, but not given"
    if kind == "value_error":
        text = first["msg"].removeprefix("Value error, ")
        return f"{key}: {text}" if key else text
    return f"{key}: {_expected(first, section)}, got {_shown(first['input'])}"


def keys_of(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key with its full path; those of a list's sections stand under the list's own key."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        for section in sections(field.annotation):
            yield from keys_of(section, f"{prefix}{name}.")


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections in a type, however deep in unions, lists and annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections(part)


def _follow(loc: Sequence[int | str], schema: type[BaseModel]) -> tuple[list[int | str], type[BaseModel] | None]:
    """(the location without the names of a union's members, the section in which the last part is a key)."""
    location: list[int | str] = []
    section: type[BaseModel] | None = schema
    inner: type[BaseModel] | None = schema
    free = False  # whether the next part is a name of the user's own, in a mapping
    for i, part in enumerate(loc):
        if isinstance(part, int) or free:
            location.append(part)
            free = False
        elif inner is not None and (part in inner.model_fields or i == len(loc) - 1) and not part.startswith("<"):
            location.append(part)
            section = inner
            annotation = inner.model_fields[part].annotation if part in inner.model_fields else None
            inner, free = next(sections(annotation), None), get_origin(annotation) is dict
    return location, section


def _unknown(
    location: Sequence[int | str], value: object, schema: type[BaseModel], section: type[BaseModel] | None
) -> str:
    *above, last = map(str, location)
    key = ".".join((*above, last))
    prefix = ".".join((*(part for part in above if not part.isdigit()), ""))
    everywhere, here = list(keys_of(schema)), list(section.model_fields) if section is not None else []
    for name in _leaves(key, value):
        known, theirs = counterpart(name)
        if theirs in everywhere:
            return f"unknown key {name!r} (did you mean {theirs!r}?)"
        if known and theirs is None:
            return f"unknown key {name!r}: isobit has no counterpart of it (docs/from-trl.md and its neighbours)"
    if close := get_close_matches(last, here, 1):
        return f"unknown key {key!r} (did you mean {prefix + close[0]!r}?)"
    if same := [path for path in everywhere if path.rpartition(".")[2] == last]:
        return f"unknown key {key!r} (did you mean {' or '.join(map(repr, same[:3]))}?)"
    ends = [path.rpartition(".")[2] for path in everywhere]
    if close := get_close_matches(last, ends, 1, cutoff=0.8):
        return f"unknown key {key!r} (did you mean {everywhere[ends.index(close[0])]!r}?)"
    return f"unknown key {key!r}; known here: {', '.join(here)}"


def _leaves(key: str, value: object) -> Iterator[str]:
    """The key, and where it holds a section of another trainer's, the keys in that."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    yield key


def _expected(error: Mapping[str, Any], section: type[BaseModel] | None) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("string_type", "dict_type") and _field(error["loc"], section) == str | dict[str, Any]:
        return "expected text or a mapping, such as {preset: fp8, wgrad: bf16}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    if kind in _BOUNDS:
        word, bound = _BOUNDS[kind]
        limit = context[bound]
        return f"expected {word} {int(limit) if limit == int(limit) else limit:,}"
    if kind == "literal_error":
        return f"expected {context['expected'].replace(chr(39), '')}"
    if kind in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"expected a section of keys{_example(error['loc'], section)}"
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"expected {'at least' if kind == 'too_short' else 'at most'} {bound} of them"
    return f"{error['msg'][0].lower()}{error['msg'][1:]}"


def _shown(value: object) -> str:
    return "nothing" if value is None else f"{value!r:.200}"


def _field(loc: Sequence[int | str], section: type[BaseModel] | None) -> Any:
    names = [part for part in loc if isinstance(part, str) and section is not None and part in section.model_fields]
    return section.model_fields[names[-1]].annotation if section is not None and names else None


def _example(loc: Sequence[int | str], section: type[BaseModel] | None) -> str:
    inner = next(sections(_field(loc, section)), None)
    if inner is None:
        return ""
    return f", such as {{{', '.join(f'{name}: ...' for name in list(inner.model_fields)[:2])}}}"

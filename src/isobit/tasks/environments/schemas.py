"""What a tool looks like to a model: JSON schemas from a function's signature and docstring.

The result is that of `transformers.utils.get_json_schema`, which TRL uses, without its import of
torch; tests/environments/test_schemas.py compares the two. Docstrings are of Google's form, with a
description of each argument below `Args:`. Left out: images and tensors as arguments.
"""

import inspect
import json
import re
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from isobit.errors import IsobitError, brief

_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", re.DOTALL)
_ARGUMENT = re.compile(
    r"(?:^|\n)([ \t]*)(\w+)(?:[ \t]*\([^()\n]*\))?:\s*"  # indentation, name, maybe "(type)"
    r"(.*?)\s*"  # a description, maybe of several lines
    r"(?=\n(?!\1[ \t])[ \t]*\w+(?:[ \t]*\([^()\n]*\))?:|\Z)",  # up to the next name, or the end
    re.DOTALL,
)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_CONTAINERS = {list: "array", tuple: "array", dict: "object"}
_FORM = (
    "a tool has a docstring in Google's form, whose Args: describes each argument, and a type for "
    "each argument"
)


class _NoSchema(Exception):
    """A type that JSON does not have, in words."""


def tool_schema(function: Callable[..., Any], label: str) -> dict[str, Any]:
    """Build the schema of a function as a tool, {"type": "function", "function": {...}}. Raises
    IsobitError where its docstring or types do not say what is needed; `label`: the function's name
    in errors."""
    doc = (inspect.getdoc(function) or "").strip()
    if not doc:
        raise IsobitError(f"{label} has no docstring; {_FORM}")
    try:
        parameters = _parameters(function)
    except _NoSchema as error:
        raise IsobitError(f"{label}: {error}; {_FORM}") from None
    except NameError as error:  # of a type that is written as text
        raise IsobitError(f"{label}: its types cannot be read: {error}") from None
    described = _described(doc)
    for name, schema in parameters["properties"].items():
        if name == "return":
            continue
        if name not in described:
            raise IsobitError(f"{label}: its docstring does not describe {name!r}; {_FORM}")
        schema |= _with_choices(described[name], f"{label}, argument {name!r}")
    description = _DESCRIPTION.search(doc)
    assert description is not None  # it matches the empty text
    made = {
        "name": getattr(function, "__name__", "operation"),
        "description": description.group(1).strip(),
        "parameters": parameters,
    }
    returned = parameters["properties"].pop("return", None)
    if returned is not None:
        says = _RETURNS.search(doc)
        made["return"] = returned | ({"description": says.group(1).strip()} if says else {})
    return {"type": "function", "function": made}


def _described(doc: str) -> dict[str, str]:
    """Return the descriptions of the arguments in a docstring's `Args:` block, by name."""
    block = _ARGS.search(doc)
    if block is None:
        return {}
    lines = "\n".join(line for line in block.group(1).split("\n") if line.strip())
    return {
        name: re.sub(r"\s*\n+\s*", " ", text.strip()) for _, name, text in _ARGUMENT.findall(lines)
    }


def _with_choices(description: str, label: str) -> dict[str, Any]:
    """Return the schema's entries for an argument's description; `(choices: ["a", "b"])` at its end
    becomes the schema's `enum`."""
    choices_in_text = _CHOICES.search(description)
    if choices_in_text is None:
        return {"description": description}
    try:
        choices = json.loads(choices_in_text.group(1))
    except ValueError:
        raise IsobitError(
            f"{label}: its choices are no JSON list: {brief(choices_in_text[0])}"
        ) from None
    return {
        "enum": [choice.strip() if isinstance(choice, str) else choice for choice in choices],
        "description": description[: choices_in_text.start()].strip(),
    }


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments; the type of its result, where JSON has such a
    type, is the property `return`."""
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    first = next(iter(parameters), None)
    implicit = (
        first
        if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty
        else None
    )
    required = []
    for name, parameter in parameters.items():
        if name == implicit:
            continue
        if parameter.annotation is inspect.Parameter.empty:
            raise _NoSchema(f"its argument {name!r} has no type")
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    properties = {}
    for name, kind in hints.items():
        try:
            properties[name] = _type(kind)
        except _NoSchema:
            if name != "return":  # a model never writes the result
                raise
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | ({"required": required} if required else {})


def _type(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type annotation. Raises _NoSchema where JSON has no such type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return _bare(hint)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal and all(type(literal) in _SCALARS for literal in args):
        return _choice(list(args))
    if origin is list:
        return {"type": "array", "items": _type(args[0])}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_type(item) for item in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(args[1])}
    raise _NoSchema(f"JSON has no type {_name(hint)}")


def _bare(hint: Any) -> dict[str, Any]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        values = [member.value for member in hint]
        if not values or any(type(value) not in _SCALARS for value in values):
            raise _NoSchema(f"JSON has no choice among the members of {hint.__name__}")
        return _choice(values)
    if hint is Any:
        return {}
    name = _SCALARS.get(hint, _CONTAINERS.get(hint))
    if name is None:
        raise _NoSchema(f"JSON has no type {_name(hint)}")
    return {"type": name}


def _choice(values: list[Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(args: tuple[Any, ...]) -> dict[str, Any]:
    alternatives = [_type(kind) for kind in args if kind is not type(None)]
    if len(alternatives) == 1:
        made = alternatives[0]
    elif all(
        schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in alternatives
    ):
        names = sorted({schema["type"] for schema in alternatives})
        made = {"type": names[0] if len(names) == 1 else names}
    else:
        made = {"anyOf": alternatives}
    return made | ({"nullable": True} if type(None) in args else {})


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")

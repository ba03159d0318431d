"""What the schema of a tool says of its arguments, where a format writes all of them as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from isobit.data.foreign import BadJson, parse_json

_WORDS = {"True": True, "False": False, "None": None}
"""Python's words, which Qwen's templates write."""
_MOST_DEPTH = 20
"""The most schemas that may stand in one another, references followed."""
_SEVERAL = ("anyOf", "oneOf", "allOf")


def properties_of(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, "Schema"]:
    """Return the schemas of a tool's arguments, by their names; empty where none are known."""
    for tool in tools:
        function = _mapping(tool.get("function", tool))
        if function.get("name") == name:
            parameters = _mapping(function.get("parameters"))
            properties = _mapping(parameters.get("properties"))
            return {key: Schema(value, parameters) for key, value in properties.items()}
    return {}


def value_of(text: str, schema: "Schema | None", words: bool = False) -> Any:
    """Return the value of an argument that is written as text: text where its schema allows it,
    else JSON where it is some. `words`: Python's words are read too."""
    types = set[str]() if schema is None else schema.types()
    if "null" in types and text in ("null", "None"):
        return None
    if "string" in types or (schema is not None and text in schema.choices()):
        return text
    if words and text in _WORDS:
        return _WORDS[text]
    try:
        return parse_json(text)
    except BadJson:
        return text


class Schema:
    """A JSON schema, and the one that it stands in, to which its references lead."""

    def __init__(self, value: Any, root: Mapping[str, Any]) -> None:
        self._all = list[Mapping[str, Any]]()
        self._add(value, root, _MOST_DEPTH)

    def types(self) -> set[str]:
        """Return the names of the types that a value may have, as far as they are said."""
        named = [schema.get("type") for schema in self._all]
        several = [kind if isinstance(kind, list) else [kind] for kind in named]
        return {kind for kinds in several for kind in kinds if isinstance(kind, str)}

    def choices(self) -> set[str]:
        """Return the texts that are named as values."""
        named = [[*_list(schema.get("enum")), schema.get("const")] for schema in self._all]
        return {value for values in named for value in values if isinstance(value, str)}

    def _add(self, value: Any, root: Mapping[str, Any], depth: int) -> None:
        schema = _mapping(value)
        if not depth or len(self._all) > 1000:
            return
        self._all.append(schema)
        for key in _SEVERAL:
            for subschema in _list(schema.get(key)):
                self._add(subschema, root, depth - 1)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: Any = root
            for name in reference[2:].split("/"):
                target = _mapping(target).get(name)
            self._add(target, root, depth - 1)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()

"""Calls between `<tool_call>` and `</tool_call>`: Hermes' and Qwen's JSON, Qwen3-Coder's XML, and
GLM's keys and values (4.5; 4.7 writes no line breaks).

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    <tool_call><function=add><parameter=a>
    1
    </parameter></function></tool_call>
    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

What stands in XML is text: it is kept where the tool's schema says that the argument is text, and
read as JSON elsewhere, where it is some; Qwen's templates write Python's words for what JSON calls
true, false and null. Every character is looked at once or twice, whatever is not closed.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from isobit.data.foreign import BadJson, parse_json
from isobit.data.turns import Call
from isobit.errors import brief
from isobit.model.text.tool_formats.base import (
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    call_of,
    calls_in,
    dumped,
    json_value,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_NAME = re.compile(r"[^\s<>{}\"]+")
_PARAMETER, _END_OF_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?"), "</parameter>"
_WORDS = {"True": True, "False": False, "None": None}


def _tagged(pieces: Pieces, one: Callable[[str], Call]) -> Reply | None:
    """Calls between the tags; the last may lack its end."""
    ((_, text),) = pieces
    before, *parts = text.split(_OPEN)

    def read(part: str) -> list[Call]:
        body, _, behind = part.partition(_CLOSE)
        if behind.strip():
            raise NoCall(f"text behind {_CLOSE}: {brief(behind.strip(), 40)!r}")
        return [one(body.strip())]

    return calls_in(before, parts, read) if parts else None


def _hermes(pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, lambda body: call_of(json_value(body), "arguments"))


def _qwen3_coder(pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, partial(_function, tools))


def _function(tools: Tools, body: str) -> Call:
    if (found := _FUNCTION.fullmatch(body)) is None:
        raise NoCall("expected <function=NAME>...</function>")
    types, given, place = _types(tools, found[1]), dict[str, Any](), 0
    written = found[2].rstrip()
    while place < len(written):
        head = _PARAMETER.match(written, place)
        end = -1 if head is None else written.find(_END_OF_PARAMETER, head.end())
        if head is None or end < 0:
            extra = written[place : place + 100].strip()
            raise NoCall(f"expected <parameter=NAME>...</parameter>, got {brief(extra, 40)!r}")
        text, kind = written[head.end() : end].removesuffix("\n"), types.get(head[1])
        is_word = kind != "string" and text in _WORDS
        given[head[1]] = _WORDS[text] if is_word else _value(text, kind)
        place = end + len(_END_OF_PARAMETER)
    return Call(found[1], dumped(given))


def _glm45(pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, partial(_keyed, tools))


def _keyed(tools: Tools, body: str) -> Call:
    name, mark, rest = body.partition("<arg_key>")
    if not _NAME.fullmatch(name.strip()):
        raise NoCall("expected the name of a tool, without spaces")
    given, types = mark + rest, _types(tools, name.strip())
    found, place = dict[str, Any](), 0
    while place < len(given):
        if (argument := _ARGUMENT.match(given, place)) is None:
            wanted = "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
            raise NoCall(f"expected {wanted}, got {brief(given[place : place + 100], 40)!r}")
        key, text = argument[1].strip(), argument[2]
        found[key], place = _value(text, types.get(key)), argument.end()
    return Call(name.strip(), dumped(found))


def _types(tools: Tools, name: str) -> Mapping[str, Any]:
    """The types of a tool's arguments, by their names, as far as its schema says."""
    for tool in tools:
        function = _mapping(tool.get("function", tool))
        if function.get("name") == name:
            properties = _mapping(_mapping(function.get("parameters")).get("properties"))
            return {key: _mapping(schema).get("type") for key, schema in properties.items()}
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _value(text: str, kind: Any) -> Any:
    try:
        return text if kind == "string" else parse_json(text)
    except BadJson:
        return text


HERMES = ToolFormat((_OPEN,), _hermes)
QWEN3_CODER = ToolFormat((_OPEN,), _qwen3_coder)
GLM45 = ToolFormat((_OPEN,), _glm45)

"""Calls that are a whole answer, or a fenced block of it: Llama 3's JSON, and plain JSON.

    {"name": "add", "parameters": {"a": 1}}; {"name": "end", "parameters": {}}
    [{"name": "add", "arguments": {"a": 1}}, {"name": "end"}]

Llama 3's objects may stand anywhere, several behind one another, and `<|python_tag|>` may open them;
what stands around them is content. Plain JSON is an object or a list of them, and may stand in a
fence of three backticks, with text around it. An object is a call if it has a name and arguments:
other JSON is an answer.
"""

import re
from collections.abc import Iterator
from typing import Any

from isobit.data.foreign import BadJson, parse_json
from isobit.data.turns import Call
from isobit.errors import brief
from isobit.model.text.tool_formats.base import (
    Frame,
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    behind,
    call_of,
    calls_in,
    json_value,
)

_TAG = "<|python_tag|>"
_NAME, _GIVEN = re.compile(r'"name"\s*:'), re.compile(r'"(?:parameters|arguments)"\s*:')
_KEYS, _ALONE = ("parameters", "arguments"), {"name", "id", "type"}
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_BRACE = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[{}]', re.DOTALL)
_BETWEEN = re.compile(r"[\s;,]*")


def _llama3_json(pieces: Pieces, tools: Tools) -> Reply | None:
    text = "".join(text for _, text in pieces)
    content, objects, position = list[str](), list[str](), 0
    for start, stop in _objects(text):
        if _is_call(text[start:stop]):
            between = text[position:start]
            content.append("" if objects and _BETWEEN.fullmatch(between) else between)
            objects.append(text[start:stop])
            position = stop
    if not objects:
        tagged = any(mark == _TAG for mark, _ in pieces)
        return calls_in("", [text.strip()], _listed) if tagged else None
    content.append("" if _BETWEEN.fullmatch(text, position) else behind(text[position:]))
    text_around = "".join(content)
    text_around = text_around if text_around.strip() else ""
    return calls_in(text_around, objects, lambda body: [call_of(json_value(body), *_KEYS)])


def _objects(text: str) -> Iterator[tuple[int, int]]:
    """Yield the place of each JSON object in a text that stands in no other one; the last may lack
    its end."""
    start = text.find("{")
    while start >= 0:
        depth, stop = 0, len(text)
        for brace in _BRACE.finditer(text, start):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                stop = brace.end()
                break
        yield start, stop
        start = text.find("{", stop)


def _json(pieces: Pieces, tools: Tools) -> Reply | None:
    ((_, text),) = pieces
    content, body = "", text.strip()
    if (fenced := _FENCED.search(text)) is not None:
        content = text[: fenced.start()] + behind(text[fenced.end() :])
        body = fenced[1].strip()
    if not body.startswith(("{", "[")) or not _is_call(body):
        return None
    return calls_in(content, [body], _listed)


def _is_call(text: str) -> bool:
    """Return whether JSON is meant as a call: an object, or one in a list, has a name and
    arguments. What does not parse is meant as one if it names both keys."""
    if not (_NAME.search(text) and _GIVEN.search(text)):
        return False
    try:
        value = parse_json(text)
    except BadJson:
        return True
    return any(
        isinstance(entry, dict) and "name" in entry and any(key in entry for key in _KEYS)
        for entry in (value if isinstance(value, list) else [value])
    )


def _listed(text: str) -> list[Call]:
    value = json_value(text)
    return [_one(entry) for entry in (value if isinstance(value, list) else [value])]


def _one(value: Any) -> Call:
    """Read one of several: a call without arguments has nothing else, either."""
    other_keys = value.keys() - _ALONE if isinstance(value, dict) else ()
    if other_keys and not other_keys & {*_KEYS}:
        raise NoCall(f'expected "arguments", got {brief(min(other_keys), 40)!r}')
    return call_of(value, "arguments", "parameters")


LLAMA3_JSON = ToolFormat(
    ("{", _TAG),
    _llama3_json,
    (_TAG,),
    frames=(Frame('{"name": "NAME", "parameters": ', "}", between="; "),),
)
JSON = ToolFormat(
    ("{", "[", "```"),
    _json,
    frames=(Frame('{"name": "NAME", "arguments": ', "}", "[", "]", ", "),),
)

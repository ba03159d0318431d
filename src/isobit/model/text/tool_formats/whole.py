"""Calls that are a whole answer, or a fenced block of it: Llama 3's JSON, and plain JSON.

    {"name": "add", "parameters": {"a": 1}}
    [{"name": "add", "arguments": {"a": 1}}, {"name": "end"}]

Llama 3 writes one object, which `<|python_tag|>` may open. Plain JSON is an object or a list of
them, and may stand in a fence of three backticks, with text before it. What is JSON without a name
is an answer, and no call.
"""

import re

from isobit.data.turns import Call
from isobit.model.text.tool_formats.base import (
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    call_of,
    calls_in,
    json_value,
)

_TAG = "<|python_tag|>"
_NAMED = re.compile(r'"name"\s*:')
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def _llama3_json(pieces: Pieces, tools: Tools) -> Reply | None:
    text = "".join(text for _, text in pieces).strip()
    tagged = any(mark == _TAG for mark, _ in pieces)
    if not tagged and not (text.startswith("{") and _NAMED.search(text)):
        return None
    return calls_in("", [text], lambda body: [call_of(json_value(body), "parameters", "arguments")])


def _json(pieces: Pieces, tools: Tools) -> Reply | None:
    ((_, text),) = pieces
    before, body = "", text.strip()
    if (fenced := _FENCED.search(text)) is not None:
        before, body = text[: fenced.start()], fenced[1].strip()
    if not body.startswith(("{", "[")) or not _NAMED.search(body):
        return None
    return calls_in(before, [body], _listed)


def _listed(text: str) -> list[Call]:
    value = json_value(text)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise NoCall("the list of calls is empty")
    return [call_of(each, "arguments", "parameters") for each in values]


LLAMA3_JSON = ToolFormat(("{", _TAG), _llama3_json, (_TAG,))
JSON = ToolFormat(("{", "[", "```"), _json)

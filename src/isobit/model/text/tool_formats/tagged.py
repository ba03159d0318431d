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

A call is read from its beginning on, so a text in it may spell the tags. What does not parse goes
on to the next tag. Text between calls and behind them is content.

As vLLM does, XML is read without its opening `<tool_call>`, and a parameter without its end goes on
to the next one, or to the end of the function. What stands in XML or between keys is text: it is
kept where the tool's schema says that the argument may be text (`schemas.py`), and read as JSON
elsewhere, where it is some; Qwen's templates write Python's words for what JSON calls true, false
and null. Every character is looked at a few times, whatever is not closed.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from isobit.data.turns import Call
from isobit.errors import brief
from isobit.model.text.tool_formats.base import (
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    behind,
    call_of,
    dumped,
    json_value,
    numbered,
)
from isobit.model.text.tool_formats.schemas import properties_of, value_of

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_BARE = re.compile(r"<function=(?=[^<>\s]+>\s*(?:<parameter=|</function>))")
_QUOTED = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\Z)|({_OPEN}|{_CLOSE})', re.DOTALL)
_HEAD = re.compile(r"\s*<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?")
_END_OF_VALUE = re.compile(
    r"\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))|\n(?=<parameter=(?P<key>[^<>\s]+)>)"
    r"|\n?(?=</function>\s*(?:</?tool_call>|<function=|\Z))|(?P<next>" + _BARE.pattern + ")"
)
"""Where a parameter ends: with its tag, in front of the next `key`, with its function, or not at all
before the next call."""
_END_OF_FUNCTION = re.compile(r"\s*</function>")
_CLOSED = re.compile(r"\s*</tool_call>")
_KEY = re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>")
_END_OF_ARGUMENT = "</arg_value>"
_NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*(?=<arg_key>|</tool_call>|\Z)")

_Read = Callable[[str, int], tuple[Call, int]]
"""The call that begins at a place of a text, and the place behind it. Raises NoCall."""


def _tagged(pieces: Pieces, read: _Read, begins: re.Pattern[str]) -> Reply | None:
    """Return what a text says between and behind the calls that begin so; None: it has none."""
    ((_, text),) = pieces
    first = begin = begins.search(text)
    if first is None:
        return None
    content, calls, problems = [text[: first.start()]], list[Call](), list[str]()
    while begin is not None:
        place = begin.end() if begin[0] == _OPEN else begin.start()
        try:
            call, place = read(text, place)
            calls.append(call)
            closed = _CLOSED.match(text, place)
            place = place if closed is None else closed.end()
        except NoCall as error:
            problems.append(numbered(len(calls) + len(problems) + 1, error))
            tag = _TAG if begin[0] == _OPEN else re.compile(f"{_CLOSE}|{begins.pattern}")
            end = tag.search(text, begin.end())
            place = len(text) if end is None else end.end() if end[0] == _CLOSE else end.start()
        begin = begins.search(text, place)
        content.append(behind(text[place : len(text) if begin is None else begin.start()]))
    return Reply("".join(content), tuple(calls), problems=tuple(problems))


def _hermes(pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, _json_call, re.compile(_OPEN))


def _json_call(text: str, place: int) -> tuple[Call, int]:
    """Read a JSON object up to a tag that no text in it spells."""
    end = next((m.start() for m in _QUOTED.finditer(text, place) if m[1]), len(text))
    call = call_of(json_value(text[place:end].strip()), "arguments")
    return call, end


def _qwen3_coder(pieces: Pieces, tools: Tools) -> Reply | None:
    begins = re.compile(f"{_OPEN}|{_BARE.pattern}")
    return _tagged(pieces, partial(_function, tools), begins)


def _function(tools: Tools, text: str, place: int) -> tuple[Call, int]:
    head = _HEAD.match(text, place)
    if head is None:
        raise NoCall("expected <function=NAME>...</function>")
    types, arguments, place = properties_of(tools, head[1]), dict[str, Any](), head.end()
    while (found := _PARAMETER.match(text, place)) is not None:
        key, place = found[1], found.end()
        ends = _END_OF_VALUE.finditer(text, place)
        known = types.keys() - arguments.keys() - {key}
        end = next((m for m in ends if m["key"] is None or not types or m["key"] in known), None)
        value = "" if end is None else text[place : end.start()]
        eaten = end is not None and "</p" not in end[0] and "<parameter=" in value
        if end is None or end["next"] or eaten:
            raise NoCall(f"expected </parameter> behind the value of {brief(key, 40)}")
        arguments[key], place = value_of(value, types.get(key), words=True), end.end()
    if (last := _END_OF_FUNCTION.match(text, place)) is None:
        extra = brief(text[place : place + 100].strip(), 40)
        raise NoCall(f"expected <parameter=NAME>...</parameter> or </function>, got {extra!r}")
    return Call(head[1], dumped(arguments)), last.end()


def _glm45(pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, partial(_keyed, tools), re.compile(_OPEN))


def _keyed(tools: Tools, text: str, place: int) -> tuple[Call, int]:
    if (name := _NAME.match(text, place)) is None:
        raise NoCall("expected the name of a tool, without spaces")
    types, arguments, place = properties_of(tools, name[1]), dict[str, Any](), name.end()
    while (key := _KEY.match(text, place)) is not None:
        end = text.find(_END_OF_ARGUMENT, key.end())
        value = text[key.end() : end]
        if end < 0 or _KEY.search(value) is not None:
            raise NoCall(f"expected {_END_OF_ARGUMENT} behind the value of {brief(key[1], 40)}")
        arguments[key[1].strip()] = value_of(value, types.get(key[1].strip()))
        place = end + len(_END_OF_ARGUMENT)
    if text[place:].strip() and _CLOSED.match(text, place) is None:
        extra = brief(text[place : place + 100].strip(), 40)
        wanted = "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
        raise NoCall(f"expected {wanted} or {_CLOSE}, got {extra!r}")
    return Call(name[1], dumped(arguments)), place


HERMES = ToolFormat((_OPEN,), _hermes)
QWEN3_CODER = ToolFormat((_OPEN, _FUNCTION), _qwen3_coder)
GLM45 = ToolFormat((_OPEN,), _glm45)

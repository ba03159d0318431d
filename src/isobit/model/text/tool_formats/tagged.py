"""Calls between `<tool_call>` and `</tool_call>`: Hermes' and Qwen's JSON, Qwen3-Coder's XML, and
GLM's keys and values (4.5; 4.7 writes no line breaks); and MiniMax-M2's XML between other tags.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    <tool_call><function=add><parameter=a>
    1
    </parameter></function></tool_call>
    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>
    <minimax:tool_call><invoke name="add">
    <parameter name="a">1</parameter>
    </invoke></minimax:tool_call>

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
from typing import Any, NamedTuple

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
    dumped,
    json_value,
    numbered,
)
from isobit.model.text.tool_formats.schemas import properties_of, value_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_QUOTED = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\Z)|({_OPEN}|{_CLOSE})', re.DOTALL)


class _Tags(NamedTuple):
    """The tags around calls, and the pattern of what begins one."""

    open: str
    close: str
    begins: re.Pattern[str]


_TAGS = _Tags(_OPEN, _CLOSE, re.compile(_OPEN))


class _Xml(NamedTuple):
    """The XML in which calls are written: the `tags` around them; what the tags of a function and
    of a parameter begin with, the `end` of a function and the `quote` around names; and the
    patterns of these tags, and of what ends them."""

    tags: _Tags
    opens: str
    key: str
    end: str
    quote: str
    head: re.Pattern[str]
    parameter: re.Pattern[str]
    end_of_value: re.Pattern[str]
    end_of_function: re.Pattern[str]


def _xml(around: tuple[str, str], opens: str, key: str, end: str, quote: str, line: str) -> _Xml:
    """Return the patterns of XML: tags `around` calls, the beginnings `opens` and `key` of the tags
    of functions and their parameters, and the `end` of a function; names are between two of
    `quote`, and values between two of `line`. A parameter ends with its tag, in front of the next key, with its
    function, or not at all before the next call."""
    name = rf"[^<>\s{quote}]+"
    bare = rf"{opens}(?={name}{quote}>\s*(?:{key}|{end}))"
    return _Xml(
        _Tags(*around, re.compile(f"{around[0]}|{bare}")),
        *(opens, key, end, quote),
        re.compile(rf"\s*{opens}({name}){quote}>"),
        re.compile(rf"\s*{key}({name}){quote}>{line}"),
        re.compile(
            rf"{line}</parameter>(?=\s*(?:{key}|{end}|\Z))|\n(?={key}(?P<key>{name}){quote}>)"
            rf"|\n?(?={end}\s*(?:{'|'.join(around)}|{opens}|\Z))|(?P<next>{bare})"
        ),
        re.compile(rf"\s*{end}"),
    )


_QWEN = _xml((_OPEN, _CLOSE), "<function=", "<parameter=", "</function>", "", "\n?")
_AROUND = ("<minimax:tool_call>", "</minimax:tool_call>")
_MINIMAX = _xml(_AROUND, '<invoke name="', '<parameter name="', "</invoke>", '"', "")
_CLOSED = re.compile(r"\s*</tool_call>")
_KEY = re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>")
_END_OF_ARGUMENT = "</arg_value>"
_NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*(?=<arg_key>|</tool_call>|\Z)")

_Read = Callable[[str, int], tuple[Call, int]]
"""The call that begins at a place of a text, and the place behind it. Raises NoCall."""


def _tagged(pieces: Pieces, read: _Read, tags: _Tags = _TAGS) -> Reply | None:
    """Return what a text says between and behind the calls in these tags; None: it has none."""
    text, begins = "".join(mark + behind_mark for mark, behind_mark in pieces), tags.begins
    closing = re.compile(rf"\s*{tags.close}")
    first = begin = begins.search(text)
    if first is None:
        return None
    content, calls, problems = [text[: first.start()]], list[Call](), list[str]()
    while begin is not None:
        position = begin.end() if begin[0] == tags.open else begin.start()
        try:
            call, position = read(text, position)
            calls.append(call)
            closed = closing.match(text, position)
            position = position if closed is None else closed.end()
        except NoCall as error:
            problems.append(numbered(len(calls) + len(problems) + 1, error))
            next_one = tags.open if begin[0] == tags.open else begins.pattern
            end = re.compile(f"{tags.close}|{next_one}").search(text, begin.end())
            closes = end is not None and end[0] == tags.close
            position = len(text) if end is None else end.end() if closes else end.start()
        begin = begins.search(text, position)
        content.append(behind(text[position : len(text) if begin is None else begin.start()]))
    return Reply("".join(content), tuple(calls), problems=tuple(problems))


def _hermes(pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, _json_call)


def _json_call(text: str, position: int) -> tuple[Call, int]:
    """Read a JSON object up to a tag that no text in it spells."""
    end = next((m.start() for m in _QUOTED.finditer(text, position) if m[1]), len(text))
    call = call_of(json_value(text[position:end].strip()), "arguments")
    return call, end


def _in_xml(xml: _Xml, pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, partial(_function, xml, tools), xml.tags)


def _function(xml: _Xml, tools: Tools, text: str, position: int) -> tuple[Call, int]:
    head = xml.head.match(text, position)
    if head is None:
        raise NoCall(f"expected {xml.opens}NAME{xml.quote}>...{xml.end}")
    types, arguments, position = properties_of(tools, head[1]), dict[str, Any](), head.end()
    while (parameter := xml.parameter.match(text, position)) is not None:
        key, position = parameter[1], parameter.end()
        ends = xml.end_of_value.finditer(text, position)
        known = types.keys() - arguments.keys() - {key}
        end = next((m for m in ends if m["key"] is None or not types or m["key"] in known), None)
        value = "" if end is None else text[position : end.start()]
        eaten = end is not None and "</p" not in end[0] and xml.key in value
        if end is None or end["next"] or eaten:
            raise NoCall(f"expected </parameter> behind the value of {brief(key, 40)}")
        arguments[key], position = value_of(value, types.get(key), words=True), end.end()
    if (last := xml.end_of_function.match(text, position)) is None:
        extra = brief(text[position : position + 100].strip(), 40)
        raise NoCall(
            f"expected {xml.key}NAME{xml.quote}>...</parameter> or {xml.end}, got {extra!r}"
        )
    return Call(head[1], dumped(arguments)), last.end()


def _glm45(pieces: Pieces, tools: Tools) -> Reply | None:
    return _tagged(pieces, partial(_keyed, tools))


def _keyed(tools: Tools, text: str, position: int) -> tuple[Call, int]:
    if (name := _NAME.match(text, position)) is None:
        raise NoCall("expected the name of a tool, without spaces")
    types, arguments, position = properties_of(tools, name[1]), dict[str, Any](), name.end()
    while (key := _KEY.match(text, position)) is not None:
        end = text.find(_END_OF_ARGUMENT, key.end())
        value = text[key.end() : end]
        if end < 0 or _KEY.search(value) is not None:
            raise NoCall(f"expected {_END_OF_ARGUMENT} behind the value of {brief(key[1], 40)}")
        arguments[key[1].strip()] = value_of(value, types.get(key[1].strip()))
        position = end + len(_END_OF_ARGUMENT)
    if text[position:].strip() and _CLOSED.match(text, position) is None:
        extra = brief(text[position : position + 100].strip(), 40)
        wanted = "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
        raise NoCall(f"expected {wanted} or {_CLOSE}, got {extra!r}")
    return Call(name[1], dumped(arguments)), position


_FRAMES = (
    Frame(f'{_OPEN}\n{{"name": "NAME", "arguments": ', f"}}\n{_CLOSE}", between="\n"),
    Frame(
        f"{_OPEN}\n<function=NAME>\n",
        f"</function>\n{_CLOSE}",
        between="\n",
        parameter=("<parameter=KEY>\n", "\n</parameter>\n"),
    ),
    Frame(
        '<invoke name="NAME">\n',
        "</invoke>\n",
        opens=f"{_AROUND[0]}\n",
        closes=_AROUND[1],
        parameter=('<parameter name="KEY">', "</parameter>\n"),
    ),
    Frame(
        f"{_OPEN}NAME\n",
        _CLOSE,
        between="\n",
        parameter=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
)
HERMES = ToolFormat((_OPEN,), _hermes, frames=_FRAMES[:1])
QWEN3_CODER = ToolFormat((_OPEN, _QWEN.opens), partial(_in_xml, _QWEN), frames=_FRAMES[1:2])
MINIMAX_M2 = ToolFormat(
    (_AROUND[0], _MINIMAX.opens), partial(_in_xml, _MINIMAX), _AROUND, frames=_FRAMES[2:3]
)
GLM45 = ToolFormat((_OPEN,), _glm45, frames=_FRAMES[3:])

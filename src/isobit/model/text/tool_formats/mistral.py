"""Mistral's calls, behind `[TOOL_CALLS]`: a JSON list (tokenizers up to v7), or for each call that
token, the tool's name, and its arguments as a JSON object (v11 and later).

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]
    [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]end[ARGS]{}
    [TOOL_CALLS]add{"a": 1}

The ids that a model writes are left out: the server gives its own.
"""

import re

from isobit.data.turns import Call
from isobit.model.text.tool_formats.base import (
    Frame,
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    call_of,
    calls_in,
    json_value,
    named_call,
)

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s{}\[\]\"]+")


def _mistral(pieces: Pieces, tools: Tools) -> Reply | None:
    (_, front), *rest = pieces
    written: list[list[tuple[str, str]]] = []  # pieces of each opened call
    for mark, text in rest:
        if mark == _CALLS:
            written.append([])
        elif not written:
            return Reply(
                front, problems=(f"a tool call is invalid: {mark} without {_CALLS} before it",)
            )
        written[-1].append((mark, text))
    return calls_in(front, written, _calls) if written else None


def _calls(pieces: Pieces) -> list[Call]:
    """Return the calls behind one `[TOOL_CALLS]`. Raises NoCall."""
    marks, head = [mark for mark, _ in pieces[1:]], pieces[0][1].strip()
    if marks in ([_ARGUMENTS], [_ID, _ARGUMENTS]):
        return [_named(head, pieces[-1][1])]
    if marks:
        raise NoCall(f"expected one {_ARGUMENTS} behind the name, got {' '.join(marks)}")
    if not head.startswith("["):
        name, brace, rest = head.partition("{")
        return [_named(name.strip(), brace + rest)]
    values = json_value(head)
    if not values:
        raise NoCall("the list of calls is empty")
    return [call_of(value, "arguments") for value in values]


def _named(name: str, text: str) -> Call:
    if not _NAME.fullmatch(name):
        raise NoCall("expected the name of a tool, without spaces")
    return named_call(name, json_value(text))


MISTRAL = ToolFormat(
    (_CALLS,),
    _mistral,
    (_CALLS, _ID, _ARGUMENTS),
    frames=(
        Frame(f"{_CALLS}NAME{_ARGUMENTS}", ""),
        Frame('{"name": "NAME", "arguments": ', "}", f"{_CALLS} [", "]", ", "),
    ),
)

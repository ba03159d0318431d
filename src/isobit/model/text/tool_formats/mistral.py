"""Mistral's calls, behind `[TOOL_CALLS]`: a JSON list (tokenizers up to v7), or for each call that
token, the tool's name, and its arguments as a JSON object (v11 and later).

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]
    [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]end[ARGS]{}
    [TOOL_CALLS]add{"a": 1}

The ids that a model writes are left out: the server gives its own.
"""

import re

from isobit.data.foreign import BadJson, parse_json
from isobit.environments.base import Call
from isobit.model.text.tool_formats.base import Pieces, Reply, ToolFormat, call_of, dumped

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s{}\[\]\"]+")


def _mistral(pieces: Pieces) -> Reply | None:
    (_, before), *rest = pieces
    written: list[list[tuple[str, str]]] = []  # pieces of each opened call
    for mark, text in rest:
        if mark == _CALLS:
            written.append([])
        elif not written:
            return None
        written[-1].append((mark, text))
    calls: list[Call] = []
    for call in written:
        found = _calls(call)
        if not found:
            return None
        calls += found
    return Reply(before, tuple(calls)) if calls else None


def _calls(pieces: Pieces) -> list[Call]:
    """The calls behind one `[TOOL_CALLS]`; none where they do not parse."""
    marks, head = [mark for mark, _ in pieces[1:]], pieces[0][1].strip()
    if marks in ([_ARGUMENTS], [_ID, _ARGUMENTS]):
        return _named(head, pieces[-1][1])
    if marks:
        return []
    if head.startswith("["):
        return _listed(head)
    name, brace, rest = head.partition("{")
    return _named(name.strip(), brace + rest)


def _listed(text: str) -> list[Call]:
    """The calls of a JSON list; none where one of them is wrong."""
    try:
        values = parse_json(text)
    except BadJson:
        return []
    found = [call_of(value, "arguments") for value in values]
    return [call for call in found if call is not None] if None not in found else []


def _named(name: str, text: str) -> list[Call]:
    """The call of a name with arguments; none where they are no object."""
    try:
        given = parse_json(text)
    except BadJson:
        return []
    right = _NAME.fullmatch(name) and isinstance(given, dict)
    return [Call(name, dumped(given))] if right else []


MISTRAL = ToolFormat((_CALLS,), _mistral, (_CALLS, _ID, _ARGUMENTS))

"""Calls that are written as text: Hermes' and Qwen's JSON, Qwen3-Coder's XML, Llama 3's JSON."""

import re
from collections.abc import Callable
from typing import Any

from isobit.data.foreign import BadJson, parse_json
from isobit.environments.base import Call
from isobit.model.text.tool_formats.base import Pieces, Reply, ToolFormat, dumped, object_call

_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _tagged(pieces: Pieces, one: Callable[[str], Call | None]) -> Reply | None:
    """Calls between `<tool_call>` and `</tool_call>`; the last may lack its end."""
    ((_, text),) = pieces
    before, *parts = text.split("<tool_call>")
    bodies = [part.partition("</tool_call>") for part in parts]
    calls = [one(body.strip()) for body, _, _ in bodies]
    if not calls or any(rest.strip() for _, _, rest in bodies):
        return None
    found = [call for call in calls if call is not None]
    return Reply(before, tuple(found)) if len(found) == len(calls) else None


def _hermes(pieces: Pieces) -> Reply | None:
    return _tagged(pieces, lambda body: object_call(body, "arguments"))


def _qwen3_coder(pieces: Pieces) -> Reply | None:
    def one(body: str) -> Call | None:
        if (found := _FUNCTION.fullmatch(body)) is None:
            return None
        given = {name: _value(value) for name, value in _PARAMETER.findall(found[2])}
        return Call(found[1], dumped(given))

    return _tagged(pieces, one)


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except BadJson:
        return text


def _llama3_json(pieces: Pieces) -> Reply | None:
    ((_, text),) = pieces
    call = object_call(text.strip(), "parameters")
    return None if call is None else Reply("", (call,))


HERMES = ToolFormat(("<tool_call>",), _hermes)
QWEN3_CODER = ToolFormat(("<tool_call>",), _qwen3_coder)
LLAMA3_JSON = ToolFormat(("{",), _llama3_json)

"""Messages and tools of OpenAI's protocol as chat templates take them, and tool calls in what a
model wrote.

Models write calls in formats of their own; which one is seen from the chat template, or given by
name (`FORMATS`). A call that does not parse is text. Left out: images, audio, and forcing a call
(`tool_choice: required`), which takes constrained decoding.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.data.foreign import BadJson, parse_json
from isobit.errors import IsobitError, did_you_mean
from isobit.serve.requests import BadRequest

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_MESSAGES = 4096
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
Message = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` as JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. `marks` open one; `read` gives the text in front of the calls, and
    these; None: they do not parse."""

    marks: tuple[str, ...]
    read: Callable[[str], tuple[str, list[Call]] | None]


def messages_of(value: Any) -> list[Message]:
    """A request's messages. Raises BadRequest for what no template takes."""
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_MESSAGES:
        raise BadRequest(
            f"messages: expected a list of 1 to {_MOST_MESSAGES:,} messages", "messages"
        )
    return [_message(f"messages[{place}]", each) for place, each in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise BadRequest(
            f"{where}: expected an object with a role of {', '.join(_ROLES)}", "messages"
        )
    found = {key: part for key, part in value.items() if part is not None}
    found["content"] = _content(f"{where}.content", found.get("content", ""))
    if "tool_calls" in found:
        calls = found["tool_calls"]
        if not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls: expected a list", "messages")
        found["tool_calls"] = [_given_call(f"{where}.tool_calls", call) for call in calls]
    return found


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise BadRequest(f"{where}: expected text, or a list of parts of type text", "messages")
    return "\n".join(part["text"] for part in parts)


def _given_call(where: str, value: Any) -> dict[str, Any]:
    """A call of an earlier turn; templates take its arguments as an object."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: expected objects with a function that has a name", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except BadJson as error:
            raise BadRequest(
                f"{where}: arguments are not JSON: {error.reason}", "messages"
            ) from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}: expected arguments that are an object", "messages")
    return {**value, "function": {**function, "arguments": arguments}}


def variables_of(tools: Any, choice: Any, given: Any) -> dict[str, Any]:
    """The template's variables by `tools`, `tool_choice` and `chat_template_kwargs`. Raises
    BadRequest."""
    if tools is not None and not (
        isinstance(tools, list)
        and all(isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools)
    ):
        raise BadRequest("tools: expected a list of objects of type function", "tools")
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            "tool_choice: only auto and none are offered: nothing forces a model to call",
            "tool_choice",
        )
    if given is not None and (not isinstance(given, dict) or _RESERVED & given.keys()):
        raise BadRequest(
            f"chat_template_kwargs: expected an object without {', '.join(sorted(_RESERVED))}",
            "chat_template_kwargs",
        )
    offered = {} if not tools or choice == "none" else {"tools": tools}
    return {**(given or {}), **offered}


def format_of(name: str, template: str | None) -> ToolFormat:
    """The format of this name; `auto`: the template's, hermes where it shows none. Raises
    IsobitError."""
    if name in FORMATS:
        return FORMATS[name]
    if name != "auto":
        raise IsobitError(f"--tool-format {name}: {did_you_mean(name, ['auto', *FORMATS])}")
    text = template or ""
    if "<function=" in text:
        return FORMATS["qwen3_coder"]
    if "<tool_call>" in text:
        return FORMATS["hermes"]
    return FORMATS["llama3_json" if '"parameters"' in text else "hermes"]


def as_openai(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Calls as a response has them."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def _object_call(text: str, arguments: str) -> Call | None:
    """A call that is a JSON object with a name and `arguments`."""
    try:
        value = parse_json(text)
    except BadJson:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    return (
        Call(value["name"], json.dumps(given, ensure_ascii=False))
        if isinstance(given, dict)
        else None
    )


def _tagged(text: str, one: Callable[[str], Call | None]) -> tuple[str, list[Call]] | None:
    """Calls between `<tool_call>` and `</tool_call>`; the last may lack its end."""
    before, *parts = text.split("<tool_call>")
    bodies = [part.partition("</tool_call>") for part in parts]
    calls = [one(body.strip()) for body, _, _ in bodies]
    if not calls or any(rest.strip() for _, _, rest in bodies):
        return None
    found = [call for call in calls if call is not None]
    return (before, found) if len(found) == len(calls) else None


def _hermes(text: str) -> tuple[str, list[Call]] | None:
    return _tagged(text, lambda body: _object_call(body, "arguments"))


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _qwen3_coder(text: str) -> tuple[str, list[Call]] | None:
    def one(body: str) -> Call | None:
        if (found := _FUNCTION.fullmatch(body)) is None:
            return None
        given = {name: _value(value) for name, value in _PARAMETER.findall(found[2])}
        return Call(found[1], json.dumps(given, ensure_ascii=False))

    return _tagged(text, one)


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except BadJson:
        return text


def _llama3_json(text: str) -> tuple[str, list[Call]] | None:
    call = _object_call(text.strip(), "parameters")
    return None if call is None else ("", [call])


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(("<tool_call>",), _hermes),
    "qwen3_coder": ToolFormat(("<tool_call>",), _qwen3_coder),
    "llama3_json": ToolFormat(("{",), _llama3_json),
}
"""Formats by name: Hermes' and Qwen's JSON, Qwen3-Coder's XML, Llama 3's JSON."""

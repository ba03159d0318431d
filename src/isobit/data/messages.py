"""Messages, calls and tools in OpenAI's form, made of the words that data sets have for them.

A row says `function_call` and `observation` (ShareGPT), or `function` (OpenAI before tools), where
chat templates say `assistant` with `tool_calls`, and `tool`. Arguments of calls are an object or
its JSON text, and tools a list or its JSON text. What one template wants of these is
`model/text/conversation.py`'s to know.
"""

from collections.abc import Mapping
from typing import Any

from isobit.data.foreign import BadJson, parse_json
from isobit.data.text_rows import kind

TOOLS = "tools"
"""The column with the tools that a row's conversation knows, as in TRL."""
_ROLES = {"function_call": "assistant", "observation": "tool", "function": "tool"}
_LEARNED = ("weight", "train", "loss")
"""Keys by which OpenAI, axolotl and ms-swift say whether a message is learned."""


def standard_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with OpenAI's role and calls. Keys that are null, with which Parquet fills
    up, are left out at every depth. Raises ValueError for a call that cannot be read."""
    made: dict[str, Any] = without_nulls(message)
    role, calls = made.get("role"), made.pop("tool_calls", None) or []
    if role == "function_call":
        calls, made["content"] = _calls_in(made.get("content")), ""
    elif isinstance(made.get("function_call"), Mapping):
        calls = [made.pop("function_call")]
    if isinstance(role, str):
        made["role"] = _ROLES.get(role, role)
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls: expected a list, got {kind(calls)}")
    if calls:
        made["tool_calls"] = [_standard_call(call) for call in calls]
        made.setdefault("content", "")
    return made


def arguments_of(value: Any) -> Any:
    """Return the arguments of a call as an object: {} for null and empty text, a JSON text parsed.
    Another value is returned unchanged."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            parsed = parse_json(value, patient=True, finite=True)
        except BadJson:
            return value
        return parsed if isinstance(parsed, dict) else value
    return value


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row: a list of objects, or of their JSON texts, or one JSON text of all.
    Raises ValueError for another value."""
    tools = _parsed(value)
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list | tuple):
        raise ValueError(f"expected a list of tools or its JSON text, got {kind(tools)}")
    return [_tool(_parsed(tool)) for tool in tools if tool is not None]


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether a message of the assistant is learned, as its keys `weight`, `train` and `loss`
    say. Raises ValueError for a weight between."""
    for key in _LEARNED:
        value = message.get(key, 1)
        if value not in (0, 1):
            raise ValueError(f"{key}: expected 0 or 1, true or false, got {value!r:.40}")
        if not value:
            return False
    return True


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its mappings that are null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _calls_in(content: Any) -> list[Any]:
    calls = _parsed(content)
    return list(calls) if isinstance(calls, list | tuple) else [calls]


def _standard_call(call: Any) -> dict[str, Any]:
    call = _parsed(call)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("a call of a tool: expected an object with a name and arguments")
    fields = {key: value for key, value in call.items() if key not in ("name", "arguments")}
    arguments = arguments_of(function.get("arguments"))
    return {"type": "function", **fields, "function": {**function, "arguments": arguments}}


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("expected tools that are objects of a function with a name")
    made: dict[str, Any] = without_nulls(function)
    if isinstance(made.get("parameters"), str):
        made["parameters"] = _parsed(made["parameters"])
    return {"type": "function", "function": made}


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, and any other value unchanged."""
    try:
        return parse_json(value) if isinstance(value, str) and value.strip() else value
    except BadJson:
        return value

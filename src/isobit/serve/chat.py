"""Messages and tools of OpenAI's protocol as chat templates take them, and calls in its form.

Left out: how models write calls (`model/text/tool_formats/`), images and audio.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from isobit.data.dataset import TEMPLATE_KWARGS
from isobit.data.messages import arguments_of
from isobit.data.turns import Call
from isobit.errors import brief
from isobit.model.text.template_tools import writes_tools
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.protocol import TemplateKeys
from isobit.serve.requests import BadRequest, kind

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_MESSAGES = 4096
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
Message = dict[str, Any]


def messages_of(value: Any) -> list[Message]:
    """Return a request's messages. Raises BadRequest for a value that no template takes."""
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_MESSAGES:
        raise BadRequest(
            f"messages: expected a list of 1 to {_MOST_MESSAGES:,} messages", "messages"
        )
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise BadRequest(
            f"{where}: expected an object with a role of {', '.join(_ROLES)}", "messages"
        )
    message = {
        key: field for key, field in value.items() if field is not None and key != TEMPLATE_KWARGS
    }
    message["content"] = _content(f"{where}.content", message.get("content", ""))
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls: expected a list", "messages")
        message["tool_calls"] = [_given_call(f"{where}.tool_calls", call) for call in calls]
    return message


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    blocks = value if isinstance(value, list) else [value]
    for block in blocks:
        if (
            not isinstance(block, dict)
            or block.get("type") != "text"
            or not isinstance(block.get("text"), str)
        ):
            raise BadRequest(f"{where}: expected text, or a list of parts of type text", "messages")
    return "\n".join(block["text"] for block in blocks)


def _given_call(where: str, value: Any) -> dict[str, Any]:
    """Return a call of an earlier turn, whose arguments are an object where they say one. Raises
    BadRequest."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: expected objects with a function that has a name", "messages")
    arguments = arguments_of(function.get("arguments"))
    if not isinstance(arguments, dict | str):
        raise BadRequest(f"{where}: expected arguments that are an object or text", "messages")
    return {**value, "function": {**function, "arguments": arguments}}


def variables_of(keys: TemplateKeys) -> dict[str, Any]:
    """Return the template's variables. Raises BadRequest."""
    tools, kwargs = keys.tools, keys.chat_template_kwargs
    if tools is not None and not (
        isinstance(tools, list)
        and all(isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools)
    ):
        raise BadRequest("tools: expected a list of objects of type function", "tools")
    _check_choice(keys.tool_choice, tools or [])
    if kwargs is not None and (not isinstance(kwargs, dict) or _RESERVED & kwargs.keys()):
        raise BadRequest(
            f"chat_template_kwargs: expected an object without {', '.join(sorted(_RESERVED))}",
            "chat_template_kwargs",
        )
    variables = dict[str, Any]()
    if (effort := keys.reasoning_effort) is not None:  # as vLLM has it
        variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    offered = {} if not tools or keys.tool_choice == "none" else {"tools": tools}
    return variables | (kwargs or {}) | offered


def _check_choice(choice: Any, tools: Sequence[Message]) -> None:
    """Raise BadRequest for a `tool_choice` that is none, or that asks for a tool that is not
    there."""
    if choice is None or choice in ("auto", "none"):
        return
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and (name is None or choice.get("type") != "function"):
        raise BadRequest(
            'tool_choice: expected auto, none, required or {"type": "function", "function": {"name": '
            f"NAME}}}}, got {kind(choice)}",
            "tool_choice",
        )
    names = [tool["function"].get("name") for tool in tools]
    if not names or (choice != "required" and name not in names):
        called = "required" if choice == "required" else brief(repr(name), 80)
        raise BadRequest(
            f"tool_choice: {called}, but tools has {names or 'none'!s:.200}", "tool_choice"
        )


def check_continued(keys: TemplateKeys, messages: Sequence[Message]) -> None:
    """Raise BadRequest for vLLM's `add_generation_prompt` and `continue_final_message` where they
    ask for what is not done: a last message of the assistant is continued, and no other one."""
    last = messages[-1]["role"] == "assistant"
    for key, right in (("add_generation_prompt", not last), ("continue_final_message", last)):
        if getattr(keys, key) not in (None, right):
            raise BadRequest(
                f"{key}: only {right} is offered where the last message is of role "
                f"{messages[-1]['role']}: the assistant's is continued",
                key,
            )


def check_tools(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> None:
    """Raise BadRequest for tools that the template does not write: the model would not know of
    them."""
    if "tools" in variables and not writes_tools(tokenizer, messages, variables):
        raise BadRequest(
            "tools: the model's chat template shows none, so the model would not know of them; "
            "leave them out, or serve it with --chat-template FILE",
            "tools",
        )


def as_openai(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls in the form of OpenAI's responses."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]

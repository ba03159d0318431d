"""Messages and tools as templates take them."""

from typing import Any

import pytest

from isobit.serve.chat import messages_of, variables_of
from isobit.serve.protocol import TemplateKeys
from isobit.serve.requests import BadRequest


def test_messages_are_what_templates_take() -> None:
    given: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": None,
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
    ]
    first, second = messages_of(given)
    assert first == {"role": "user", "content": "a\nb"}
    assert second["content"] == ""
    assert second["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": {}}}]
    function = given[1]["tool_calls"][0]["function"]
    for arguments, wanted in (
        ("", {}),
        (None, {}),
        ("{", "{"),
        ("[1]", "[1]"),
        ('{"a": null}', {"a": None}),
    ):
        function["arguments"] = arguments
        assert messages_of(given)[1]["tool_calls"][0]["function"]["arguments"] == wanted
    for wrong in (3, [1]):
        function["arguments"] = wrong
        with pytest.raises(BadRequest, match="arguments"):
            messages_of(given)


def test_a_message_brings_no_variables_of_the_template() -> None:
    """A row of data may (`data/dataset.py`), a client has a field of its own for them, which is
    checked."""
    said = {"role": "user", "content": "a", "chat_template_kwargs": {"messages": []}}
    assert messages_of([said]) == [{"role": "user", "content": "a"}]


def test_variables_of_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]

    def made(**keys: Any) -> dict[str, Any]:
        return variables_of(TemplateKeys(**keys))

    given = {"thinking": True}
    assert made(tools=tools, chat_template_kwargs=given) == {"thinking": True, "tools": tools}
    assert made(tools=tools, tool_choice="none") == made(tool_choice="auto") == {}
    with pytest.raises(BadRequest, match="chat_template_kwargs: expected an object without"):
        made(chat_template_kwargs={"messages": []})
    with pytest.raises(BadRequest, match="tool_choice"):
        made(tools=tools, tool_choice={"type": "function"})

"""Messages, tools, and calls in every format that is read."""

import json
from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.serve.chat import FORMATS, format_of, messages_of, variables_of
from isobit.serve.requests import BadRequest

SAID = {
    "hermes": 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
    "<tool_call>"
    '{"name": "end"}</tool_call>',
    "qwen3_coder": "so\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=end>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", SAID)
def test_calls_are_read(name: str) -> None:
    read = FORMATS[name].read(SAID[name])
    assert read is not None
    text, calls = read
    assert text == "so\n"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("add", {"a": 1, "b": "x"}),
        ("end", {}),
    ]


def test_llama_s_call_is_the_whole_text() -> None:
    read = FORMATS["llama3_json"].read(' {"name": "add", "parameters": {"a": 1}} ')
    assert read is not None
    assert (read[0], read[1][0].name, json.loads(read[1][0].arguments)) == ("", "add", {"a": 1})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "no call"),
        ("hermes", "<tool_call>{not json}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> and more'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>[]</tool_call>'),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>'),
        ("llama3_json", "use {x} here"),
        ("llama3_json", '{"name": 3, "parameters": {}}'),
    ],
)
def test_what_does_not_parse_is_text(name: str, text: str) -> None:
    assert FORMATS[name].read(text) is None


def test_the_format_is_the_template_s() -> None:
    assert format_of("auto", None) is FORMATS["hermes"]
    assert format_of("auto", "... <tool_call>{{ call | tojson }}</tool_call>") is FORMATS["hermes"]
    assert format_of("auto", "... <tool_call><function={{ name }}>") is FORMATS["qwen3_coder"]
    assert (
        format_of("auto", 'respond with {"name": ..., "parameters": ...}') is FORMATS["llama3_json"]
    )
    assert format_of("hermes", "<function=") is FORMATS["hermes"]
    with pytest.raises(IsobitError, match="did you mean 'hermes'"):
        format_of("hermse", None)


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
    for arguments in ("{", "[1]", 3):
        given[1]["tool_calls"][0]["function"]["arguments"] = arguments
        with pytest.raises(BadRequest, match="arguments"):
            messages_of(given)


def test_variables_of_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert variables_of(tools, None, {"thinking": True}) == {"thinking": True, "tools": tools}
    assert variables_of(tools, "none", None) == variables_of(None, "auto", None) == {}
    with pytest.raises(BadRequest, match="chat_template_kwargs: expected an object without"):
        variables_of(None, None, {"messages": []})
    with pytest.raises(BadRequest, match="tool_choice"):
        variables_of(tools, {"type": "function"}, None)

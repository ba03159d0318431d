"""OpenAI's Responses, by the real client: items, streams, conversations that go on."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .helpers import TOKENS, Running, base_model, serving

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "rain",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["ulm", "bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model has room for a conversation."""
    folder = base_model(tmp_path_factory.mktemp("responses"), 2048)
    with serving(folder, kv_pages=2000, page_size=16) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0)


def chat(server: Running, messages: list[dict[str, Any]], **keys: Any) -> Any:
    given = {"messages": messages, "max_tokens": 12, **keys}
    return server.post("/v1/chat/completions", given).json()["choices"][0]["message"]["content"]


def test_a_response_is_the_message_of_a_conversation(client: Any, server: Running) -> None:
    """Of a text, of items, and with instructions; the sampling keys are those of messages."""
    user = {"role": "user", "content": "go"}
    made = client.responses.create(
        model="tiny", input="go", max_output_tokens=12, extra_body={"seed": 4}
    )
    assert made.output_text == chat(server, [user], seed=4)
    assert made.status == ("incomplete" if made.usage.output_tokens == 12 else "completed")
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"role": "user", "content": "on"},
    ]
    given: Any = {"input": items, "instructions": "be brief", "max_output_tokens": 12}
    made = client.responses.create(model="tiny", **given, temperature=0.7, extra_body={"seed": 5})
    messages = [
        {"role": "system", "content": "be brief"},
        user,
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "on"},
    ]
    assert made.output_text == chat(server, messages, seed=5, temperature=0.7)
    assert made.output_text != chat(server, messages[1:], seed=5, temperature=0.7), "the control"


def test_a_conversation_goes_on_from_a_response(client: Any, server: Running) -> None:
    """As with all its items, but for earlier instructions; of another tenant it is not known."""
    more: Any = {"model": "tiny", "max_output_tokens": 8, "extra_body": {"seed": 2}}
    first = client.responses.create(input="go", instructions="be brief", **more)
    second = client.responses.create(input="on", previous_response_id=first.id, **more)
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "on"},
    ]
    assert second.output_text == chat(server, messages, seed=2, max_tokens=8)
    third = client.responses.create(input="so", previous_response_id=second.id, **more)
    messages += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "so"},
    ]
    assert third.usage.input_tokens > second.usage.input_tokens
    unkept = client.responses.create(input="go", store=False, **more)
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKENS[1], max_retries=0)
    for asked, name in ((client, unkept.id), (client, "resp_none"), (other, first.id)):
        with pytest.raises(openai.NotFoundError, match=r"previous_response_id: .* is not kept"):
            asked.responses.create(input="on", previous_response_id=name, **more)


def test_a_stream_ends_with_the_response(client: Any) -> None:
    given: Any = {"model": "tiny", "input": "go", "max_output_tokens": 12}
    whole = client.responses.create(**given, extra_body={"seed": 4}, top_logprobs=2)
    with client.responses.stream(**given, extra_body={"seed": 4}, top_logprobs=2) as stream:
        events = list(stream)
        final = stream.get_final_response() if whole.status == "completed" else None
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-1] == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert told == whole.output_text
    response = final or events[-1].response
    assert response.output_text == whole.output_text
    assert response.usage == whole.usage.model_copy(
        update={"input_tokens_details": response.usage.input_tokens_details}
    )
    shown, same = (made.output[0].content[0].logprobs for made in (whole, response))
    assert [one.logprob for one in shown] == [one.logprob for one in same]
    assert len(shown) == whole.usage.output_tokens


def test_a_function_is_called_and_its_output_read(client: Any) -> None:
    pytest.importorskip("llguidance")
    asked: Any = {"model": "tiny", "tools": [TOOL], "max_output_tokens": 400}
    forced: Any = {"tool_choice": {"type": "function", "name": "rain"}, "extra_body": {"seed": 3}}
    made = client.responses.create(input="go", **asked, **forced)
    (call,) = made.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("ulm", "bonn")
    events = list(client.responses.create(input="go", stream=True, **asked, **forced))
    (told,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert told.arguments == call.arguments
    assert events[-1].response.output[0].name == "rain"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    plain: Any = {"model": "tiny", "tools": [TOOL], "max_output_tokens": 6}
    on = client.responses.create(input=[output], previous_response_id=made.id, **plain)
    items: Any = [{"role": "user", "content": "go"}, call.model_dump(), output]
    again = client.responses.create(input=items, **plain)
    assert on.usage.input_tokens > made.usage.total_tokens, "the tokens that were sampled are kept"
    assert again.usage.input_tokens < on.usage.input_tokens, "and white space is written anew"


def test_a_text_has_the_form_that_is_asked_for(client: Any) -> None:
    pytest.importorskip("llguidance")
    form: Any = {"type": "json_schema", "name": "a", "schema": TOOL["parameters"]}
    made = client.responses.create(
        model="tiny", input="go", text={"format": form}, max_output_tokens=400
    )
    assert json.loads(made.output_text)["city"] in ("ulm", "bonn")


CALL = {"type": "function_call", "call_id": "c", "name": "rain", "arguments": "{}"}


def test_items_behind_an_earlier_response_keep_their_numbers(server: Running) -> None:
    first = server.post("/v1/responses", {"input": "go", "max_output_tokens": 3}).json()
    keys = {"previous_response_id": first["id"], "max_output_tokens": 3}
    right = {"role": "user", "content": "b"}
    for items, where in (
        ([{**right, "role": "a"}], "[0]"),
        ([right, {**right, "role": "a"}], "[1]"),
    ):
        response = server.post("/v1/responses", {**keys, "input": items})
        error = response.json()["error"]
        assert error["message"].startswith(f"input{where}: expected an object with a role")
        assert error["param"] == "input"
    assert server.post("/v1/responses", {**keys, "input": [right]}).status_code == 200


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"input": None}, "input: expected a text or a list of items"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type: expected message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: expected an object of type function"),
        ({"background": True}, "background: responses that are read later: not served"),
        ({"include": ["all"]}, "include: expected a list of message.output_text.logprobs"),
        ({"n": 2}, "n: a response is one answer"),
        ({"truncation": "auto"}, "truncation: prompts that are cut: not served"),
        ({"max_output_token": 3}, "unknown key 'max_output_token'; did you mean"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: expected text"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format: expected an object with a"),
        ({"response_format": {"type": "xml"}}, "response_format.type: expected text"),
        ({"max_output_tokens": 0}, "max_output_tokens: expected a whole number from 1"),
        ({"max_output_tokens": 99999}, "'max_output_tokens' is too large: 99999"),
        ({"max_tokens": 5}, "max_tokens: max_output_tokens is given too"),
        ({"max_completion_tokens": 5}, "max_completion_tokens: max_output_tokens is given too"),
        (
            {"max_output_tokens": None, "max_tokens": 0},
            "max_tokens: expected a whole number from 1",
        ),
        ({"min_tokens": 9}, "min_tokens: expected at most max_output_tokens, 3, got 9"),
        ({"input": [{"role": "a", "content": "b"}]}, "input[0]: expected an object with a role"),
        (
            {"instructions": "b", "input": [CALL, CALL, {"role": "a", "content": "b"}]},
            "input[2]: expected an object with a role",
        ),
        (
            {"input": [{"role": "user", "content": "a"}, {**CALL, "name": None}]},
            "input[1].tool_calls: expected objects with a function that has a name",
        ),
        (
            {"input": [{"type": "", "role": "user", "content": "a"}]},
            "input[0].type: expected message",
        ),
        ({"temperature": -1}, "temperature: expected at least 0"),
    ],
)
def test_what_is_not_served_is_refused(server: Running, keys: dict[str, Any], problem: str) -> None:
    response = server.post("/v1/responses", {"input": "go", "max_output_tokens": 3, **keys})
    assert response.status_code == 400, response.text
    assert problem in response.json()["error"]["message"]

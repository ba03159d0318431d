"""Answers that are held to schemas, patterns, choices, grammars and calls, over HTTP."""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import openai
import pydantic
import pytest

from isobit.engine.token_bits import full
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import ToolFormat
from isobit.model.text.tool_formats.table import FORMATS
from isobit.serve.protocol import ChatRequest
from isobit.serve.requests import Limits, read
from isobit.serve.structured import MOST_BYTES, Grammars

from .helpers import Running, base_model, serving
from .test_bounds import references, rules
from .test_tool_formats import tokenizer_of

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["ulm", "bonn"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "rain", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "sun"}},
]
RAIN = {"type": "function", "function": {"name": "rain"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 300}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "abc", "max_tokens": 300}}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model has room for JSON of single characters."""
    folder = base_model(tmp_path_factory.mktemp("roomy"), 2048)
    with serving(folder, kv_pages=2000, page_size=16) as running:
        yield running


def choices(server: Running, path: str, **keys: Any) -> list[dict[str, Any]]:
    response = server.post(path, {**PATHS[path], **keys})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def text(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}


def is_rain(written: str) -> bool:
    value = json.loads(written)
    return (
        value.keys() == {"city", "days"}
        and value["city"] in ("ulm", "bonn")
        and isinstance(value["days"], int)
        and value["days"] <= 9
    )


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": ({"response_format": schema(SCHEMA)}, is_rain),
    "schema as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_rain),
    "SGLang's schema": ({"json_schema": json.dumps(SCHEMA)}, is_rain),
    "regex": ({"structured_outputs": {"regex": "[a-c]{3}/x"}}, re.compile("[a-c]{3}/x").fullmatch),
    "SGLang's regex": ({"regex": "[a-c]{3}"}, re.compile("[a-c]{3}").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    "Lark": ({"structured_outputs": {"grammar": 'start: "a" /[0-9]{3}/'}}, re.compile("a[0-9]{3}").fullmatch),
    "GBNF": ({"ebnf": 'root ::= "a" [0-9] "b"'}, re.compile("a[0-9]b").fullmatch),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_what_is_asked_for(roomy: Running, path: str, kind: str) -> None:
    """Each of several, and without it, as the control, it is not."""
    keys, right = KINDS[kind]
    for choice in choices(roomy, path, n=3, seed=5, **keys):
        assert choice["finish_reason"] == "stop"
        assert right(text(choice)), text(choice)
    for choice in choices(roomy, path, n=3, seed=5, max_tokens=40):
        with pytest.raises((AssertionError, ValueError)):
            assert right(text(choice))


def test_a_large_pattern_is_done_piece_by_piece(roomy: Running) -> None:
    """The work of each mask is bounded, whatever the pattern unfolds to."""
    keys = {"regex": "((a{1000}){1000}){1000}", "max_tokens": 5}
    assert text(choices(roomy, "/v1/completions", **keys)[0]) == "aaaaa"


@pytest.mark.slow
def test_any_object(roomy: Running) -> None:
    for keys in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        found = [text(c) for c in choices(roomy, "/v1/chat/completions", n=8, seed=1, **keys)]
        assert all(found_text.startswith("{") for found_text in found)
        whole = [json.loads(found_text) for found_text in found if found_text.endswith("}")]
        assert any(isinstance(value, dict) for value in whole)


def test_a_format_that_asks_for_nothing_changes_nothing(roomy: Running) -> None:
    for path in PATHS:
        plain = choices(roomy, path, seed=3, max_tokens=9)
        assert choices(roomy, path, seed=3, max_tokens=9, response_format={"type": "text"}) == plain


def bits(server: Running, number: int, path: str = "/v1/chat/completions") -> Any:
    """The tokens and log-probabilities of a request of its own kind, the likeliest ones too."""
    keys = list(KINDS.values())[number % len(KINDS)][0]
    likeliest = {"logprobs": True, "top_logprobs": 3} if "chat" in path else {"logprobs": 3}
    more = {**keys, **likeliest, "seed": number, "return_token_ids": True, "n": 1 + number % 2}
    found = choices(server, path, temperature=0.9, top_k=20, max_tokens=60, **more)
    return [(choice["token_ids"], choice["logprobs"]) for choice in found]


@pytest.mark.slow
def test_bits_are_the_same_alone_and_among_others(roomy: Running) -> None:
    """Also beside plain requests, whose bits stay what they are alone, under preemption, and after
    a restart. The control is another grammar."""
    plain = {"prompt": "abcabc", "logprobs": 1, "seed": 8, "max_tokens": 30, "n": 2}
    alone = [bits(roomy, number) for number in range(24)]
    own = roomy.post("/v1/completions", plain).json()["choices"]
    with ThreadPoolExecutor(26) as pool:
        beside = [pool.submit(roomy.post, "/v1/completions", plain) for _ in range(3)]
        assert list(pool.map(lambda number: bits(roomy, number), range(24))) == alone
        assert all(request.result().json()["choices"] == own for request in beside)
    folder = Path(roomy.gateway.folder)
    with serving(folder, kv_pages=40, page_size=16, max_batch_tokens=24) as small:
        with ThreadPoolExecutor(26) as pool:
            assert list(pool.map(lambda number: bits(small, number), range(24))) == alone
        assert bits(small, 3) != bits(small, 3 + 1)


def test_log_probabilities_are_those_of_what_is_allowed(roomy: Running) -> None:
    """They add up to one over the tokens that may come, and a token that has to come has all."""
    (choice,) = choices(
        roomy,
        *("/v1/completions",),
        structured_outputs={"choice": ["ab", "cb"]},
        logprobs=5,
        seed=2,
    )
    first, second, *_ = choice["logprobs"]["top_logprobs"]
    assert first.keys() == {"a", "c"}
    assert sum(2.718281828459045**p for p in first.values()) == pytest.approx(1, abs=1e-6)
    assert second == {"b": 0.0}
    assert choice["logprobs"]["token_logprobs"][1] == 0.0


def test_a_stream_is_the_answer(roomy: Running) -> None:
    keys = {"n": 3, "seed": 4, "response_format": schema(SCHEMA)}
    whole = [text(choice) for choice in choices(roomy, "/v1/chat/completions", **keys)]
    parts = ["", "", ""]
    for event in roomy.stream("/v1/chat/completions", {**CHAT, **keys, "stream": True})[:-1]:
        for choice in json.loads(event)["choices"]:
            parts[choice["index"]] += choice["delta"].get("content") or ""
    assert parts == whole


def calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    made = choice["message"].get("tool_calls") or []
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in made]


@pytest.mark.slow
def test_a_call_is_forced(roomy: Running) -> None:
    """Of any tool, of one, and of one alone; the controls are auto and none."""
    path = "/v1/chat/completions"
    for choice in choices(roomy, path, tools=TOOLS, tool_choice=RAIN, n=3, seed=1):
        ((name, arguments),) = calls(choice)
        assert choice["finish_reason"] == "tool_calls"
        assert name == "rain"
        assert is_rain(json.dumps(arguments))
    several = choices(roomy, path, tools=TOOLS, tool_choice="required", n=12, seed=1)
    made = [calls(choice) for choice in several if choice["finish_reason"] == "tool_calls"]
    assert {name for found in made for name, _ in found} == {"rain", "sun"}
    assert all(is_rain(json.dumps(a)) if n == "rain" else a == {} for c in made for n, a in c)
    one = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert all(len(calls(choice)) == 1 for choice in choices(roomy, path, n=6, seed=1, **one))
    for choice in ("auto", "none"):
        plain = choices(roomy, path, tools=TOOLS, tool_choice=choice, n=3, seed=1, max_tokens=30)
        assert not any(map(calls, plain))


def test_a_stream_tells_of_forced_calls(roomy: Running) -> None:
    keys = {"tools": TOOLS, "tool_choice": RAIN, "seed": 1}
    ((name, arguments),) = calls(choices(roomy, "/v1/chat/completions", **keys)[0])
    events = roomy.stream("/v1/chat/completions", {**CHAT, **keys, "stream": True})[:-1]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    (told,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (told[0]["function"]["name"], json.loads(told[0]["function"]["arguments"])) == (
        name,
        arguments,
    )
    assert not any(delta.get("content") for delta in deltas)


@dataclass(frozen=True)
class Answer:
    """Of tokens that are allowed, one after the other, until the answer ends."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str


def walked(tokenizer: Tokenizer, form: ToolFormat, keys: dict[str, Any], seed: int) -> Answer:
    """A random walk through what a request allows. The end is taken where it may come, and a mark
    that is a token, so that walks are short."""
    asked = read(ChatRequest, {**CHAT, "tools": TOOLS, **keys}, Limits())
    prompt, size = tokenizer.encode("go"), tokenizer.vocab_size
    grammar = Grammars(tokenizer, size).of_chat(asked, form, prompt, asked.tools)
    assert grammar is not None
    state, chosen, tokens = grammar.begin(), Random(seed), list[int]()
    bits = full(1, size)[0]
    for _ in range(2000):
        state.allow(bits)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        special = [token for token in allowed if tokenizer.is_special(token)]
        ends = [token for token in allowed if token in tokenizer.eos_ids]
        tokens.append(chosen.choice(ends or special or allowed))
        state.accept(tokens[-1:])
        if ends:
            return Answer(prompt, tokens, tokenizer.decode_completion(prompt, tokens[:-1]))
    raise AssertionError(tokenizer.decode(tokens[:400]))


FRAMED = sorted(name for name, form in FORMATS.items() if form.frames)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FRAMED)
def test_a_call_is_forced_in_each_format_that_has_a_frame(name: str, special: bool) -> None:
    """The reader of the format reads what the grammar allows, whether its marks are special tokens
    or spelled. The control is a body, which is no call."""
    form = FORMATS[name]
    if name == "harmony" and not special:
        return  # a walk would not find the end of thoughts that is spelled
    tokenizer = tokenizer_of(*(form.marks if special else ()))
    names = set()
    for seed in range(6):
        answer = walked(tokenizer, form, {"tool_choice": "required"}, seed)
        reply = form.of(answer, tokenizer, TOOLS)
        assert not reply.problems
        assert reply.calls, answer.text
        names |= {call.name for call in reply.calls}
        assert all(
            is_rain(c.arguments) if c.name == "rain" else c.arguments == "{}" for c in reply.calls
        )
        one = walked(tokenizer, form, {"tool_choice": RAIN}, seed)
        assert [call.name for call in form.of(one, tokenizer, TOOLS).calls] == ["rain"]
        only = {"tools": [], "response_format": schema(SCHEMA)}
        body = form.of(walked(tokenizer, form, only, seed), tokenizer)
        assert is_rain(body.content or body.said)
        assert not body.calls
    assert names == {"rain", "sun"}


def test_a_format_without_a_frame_says_so(roomy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**CHAT, "tools": TOOLS, "max_tokens": 3}
    for name in ("pythonic", "gemma4"):
        monkeypatch.setattr(roomy.gateway, "tools", FORMATS[name])
        response = roomy.post("/v1/chat/completions", {**keys, "tool_choice": "required"})
        assert response.status_code == 400
        assert "calls cannot be forced" in response.json()["error"]["message"]
    monkeypatch.setattr(roomy.gateway, "tools", FORMATS["llama3_json"])
    response = roomy.post("/v1/chat/completions", {**keys, "tools": STRICT})
    assert "without a mark in front of them" in response.json()["error"]["message"]
    assert roomy.post("/v1/chat/completions", keys).status_code == 200


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]


@pytest.mark.slow
def test_a_strict_tool_is_held_to_its_schema(roomy: Running) -> None:
    """In an answer that says something first; another tool's arguments may be any."""
    path = "/v1/chat/completions"
    prefill = [*CHAT["messages"], {"role": "assistant", "content": "well <tool_call>"}]
    prefilled = {"messages": prefill, "n": 4, "seed": 2, "max_tokens": 60}
    loose = choices(roomy, path, tools=TOOLS, **prefilled)
    assert not any(map(calls, loose)), "the control"
    bias = {"logit_bias": {str(roomy.gateway.tokenizer.encode("<")[-1]): 7}}
    found = choices(roomy, path, tools=STRICT, n=16, seed=2, max_tokens=400, **bias)
    whole = [choice for choice in found if choice["finish_reason"] == "tool_calls"]
    for choice in whole:
        for name, arguments in calls(choice):
            assert name == "sun" or is_rain(json.dumps(arguments))


@pytest.mark.slow
def test_tools_beside_a_schema(roomy: Running) -> None:
    """An answer is a call or the schema's value."""
    keys = {"tools": TOOLS, "response_format": schema(SCHEMA), "n": 8, "seed": 1}
    for choice in choices(roomy, "/v1/chat/completions", **keys):
        assert choice["finish_reason"] != "stop" or is_rain(text(choice))


def test_openai_s_client_parses(roomy: Running) -> None:
    class Rain(pydantic.BaseModel):
        city: str
        days: int

    client = openai.OpenAI(base_url=f"{roomy.url}/v1", api_key=roomy.token, max_retries=0)
    for seed in range(6):
        try:
            answer = client.chat.completions.parse(
                model="tiny", response_format=Rain, seed=seed, **CHAT
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Rain)
        return
    raise AssertionError("every answer was too long")


def with_schema(**inner: Any) -> dict[str, Any]:
    return {"response_format": schema({"type": "object", "properties": inner})}


DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a type": (
        with_schema(a={"type": "array", "items": {"type": "strang"}}),
        "response_format.json_schema.schema.properties.a.items: Invalid type: strang",
    ),
    "a keyword": (with_schema(a={"not": {}}), "schema.properties.a: Unimplemented keys"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema: expected an object"),
    "a format": ({"response_format": {"type": "xml"}}, "response_format.type: expected text, json"),
    "an unknown key": ({"response_format": {"typ": "text"}}, "type: required, but not given"),
    "no JSON": ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: not JSON"),
    "a list": ({"structured_outputs": {"json": [1]}}, "structured_outputs.json: expected a JSON"),
    "a pattern": ({"regex": "(a"}, "regex: error: unclosed group"),
    "a choice": ({"structured_outputs": {"choice": []}}, "choice: expected a list of texts"),
    "a grammar": (
        {"structured_outputs": {"grammar": "start: foo"}},
        "grammar: at 1(8): unknown name",
    ),
    "GBNF": ({"ebnf": 'root ::= ("a"'}, "ebnf: "),
    "two": (
        {"regex": "a", "structured_outputs": {"choice": ["a"]}},
        "structured_outputs.choice and regex: give one of them",
    ),
    "tags": ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag: calls by tags"),
    "long": ({"regex": "a" * (MOST_BYTES + 1)}, "regex: at most 64 KiB, got 65,537 bytes"),
    "nested": ({"regex": "(" * 20000 + ")" * 20000}, "regex: "),
    "a deep grammar": (
        {"structured_outputs": {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}},
        "grammar: ",
    ),
    "a deep schema": ({"json_schema": json.dumps(DEEP)}, "json_schema"),
    "itself": ({"json_schema": {"$ref": "#"}}, "json_schema: "),
    "many": (
        {"json_schema": {"type": "object", "properties": {f"{i}": {} for i in range(3000)}}},
        "the answer cannot go on: Parser Error: Current row has 12007 items; max is 2000",
    ),
    "another's": ({"json_schema": {"$ref": "http://a.example/b"}}, "json_schema: "),
    "a chain": (
        {"structured_outputs": {"grammar": rules(301)}},
        "structured_outputs.grammar: at most 300 rules (colons)",
    ),
    "GBNF's chain": ({"ebnf": rules(301).replace(":", " ::=")}, "ebnf: at most 300 rules"),
    "references": (
        {"json_schema": references(301, lambda value: value)},
        "json_schema: at most 300 $ref, which stand in",
    ),
    "a multiple": (
        with_schema(a={"multipleOf": 99999989}),
        "response_format.json_schema.schema.properties.a.multipleOf: expected at most 10,000",
    ),
    "a tool's multiple": (
        {
            "tools": [
                {"type": "function", "function": {"name": "a", "parameters": {"multipleOf": 1e9}}}
            ],
            "tool_choice": "required",
        },
        "tools: a.multipleOf: expected at most 10,000",
    ),
    "the server's grammar": ({"ebnf": "start: @body"}, "ebnf: @body: expected a rule of this"),
    "letters it has not": (
        {"regex": "\u4e00"},
        "regex: no text of this model's tokens is what it asks for",
    ),
    "no tool": ({"tool_choice": "required"}, "tool_choice: required, but tools has none"),
    "another tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fog"}}},
        "tool_choice: 'fog', but tools has ['rain', 'sun']",
    ),
    "a kind": (
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        "tool_choice: expected auto, none",
    ),
    "a name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"},
        "tools: expected names of 1 to 128 letters",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_wrong_is_refused_in_one_line_that_names_the_place(
    roomy: Running, kind: str
) -> None:
    keys, problem = REFUSED[kind]
    response = roomy.post("/v1/chat/completions", {**CHAT, **keys})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert problem in message
    assert "\n" not in message
    assert len(message) < 400


def test_without_the_library_one_line_says_what_is_missing(
    roomy: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for keys in ({"regex": "q"}, with_schema(q={"type": "number"}), {"ebnf": 'root ::= "q"'}):
        response = roomy.post("/v1/chat/completions", {**CHAT, **keys, "max_tokens": 3})
        assert response.status_code == 400
        assert "pip install llguidance" in response.json()["error"]["message"]
    assert roomy.post("/v1/chat/completions", {**CHAT, "max_tokens": 3}).status_code == 200


@pytest.mark.slow
def test_thoughts_come_before_what_is_held(roomy: Running) -> None:
    """Where a prompt has begun them, the form holds behind their end."""
    prefill = [*CHAT["messages"], {"role": "assistant", "content": "<think>"}]
    keys = {"messages": prefill, "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 900}
    found = choices(roomy, "/v1/chat/completions", seed=3, n=4, **keys)
    for choice in found:
        said = text(choice)
        assert choice["finish_reason"] == "length" or said in ("yes", "no")
        assert choice["finish_reason"] == "stop" or not said
        assert choice["message"].get("reasoning_content")

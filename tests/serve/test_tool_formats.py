"""Calls of tools in every format: as published templates write them, streamed or not; what does not
parse, or only looks like a call, is text."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import Reply
from isobit.model.text.tool_formats.harmony import MARKS
from isobit.model.text.tool_formats.table import FORMATS, format_by_template, format_of
from isobit.serve.answers import Asked, ChoiceStream
from isobit.serve.prompts import Front
from tests.model.test_appending import of_file

from .helpers import ALPHABET

ADD_END = [("add", {"a": 1, "b": "x"}), ("end", {})]
SAID = {
    "hermes": 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
    "<tool_call>"
    '{"name": "end"}</tool_call>',
    "qwen3_coder": "so\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=end>\n</function>\n</tool_call>",
    "mistral": 'so\n[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "end", "arguments": {}, "id": "abcdefghi"}]',
    "mistral named": 'so\n[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]end[ARGS]{}',
    "mistral with ids": 'so\n[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": "x"}'
    "[TOOL_CALLS]end[CALL_ID]bcdefghij[ARGS]{}",
    "mistral bare": 'so\n[TOOL_CALLS]add{"a": 1, "b": "x"}[TOOL_CALLS]end{}',
    "pythonic": 'so\n<|tool_call_start|>[add(a=1, b="x"), end()]<|tool_call_end|>',
    "pythonic of llama 4": "so\n<|python_start|>[add(a = 1, b='x',),end()]<|python_end|>",
    "glm45": "so\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n<tool_call>end\n</tool_call>",
    "glm45 of 4.7": "so\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
    "<arg_value>x</arg_value></tool_call><tool_call>end</tool_call>",
    "gemma4": 'so\n<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|><|tool_call>call:end{}<tool_call|>',
    "deepseek_v3": "so\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>end\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3 of 3.1": "so\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": "x"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>end<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "json": 'so\n```json\n[{"name": "add", "arguments": {"a": 1, "b": "x"}}, {"name": "end"}]\n```',
    "harmony": "<|channel|>final<|message|>so\n<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>'
    "<|start|>assistant to=functions.end<|channel|>commentary json<|message|>{}<|call|>",
}
MISTRAL_V3 = """{%- for message in messages %}
{%- if message.role == "user" %}{{ "[INST] " + message.content + "[/INST]" }}
{%- elif message.tool_calls %}{{ "[TOOL_CALLS] [" }}{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}{{ out[:-1] }}{{ ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{ ", " }}{% else %}{{ "]" + eos_token }}{% endif %}{%- endfor %}
{%- else %}{{ " " + message.content + eos_token }}{%- endif %}{%- endfor %}"""
"""How the template of Mistral's v3 tokenizer writes turns; a Tekken one (v13) is the next."""
MISTRAL_V13 = """{%- for message in messages %}
{%- if message.role == "user" %}{{ "[INST]" + message.content + "[/INST]" }}
{%- elif message.tool_calls %}{%- for call in message.tool_calls %}
{{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- else %}{{ message.content + eos_token }}{%- endif %}{%- endfor %}"""


def calls_of(reply: Reply | None) -> list[tuple[str, Any]]:
    assert reply is not None
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


def tokenizer_of(*special: str) -> Tokenizer:
    """A token for each character, and for each of these names."""
    made = Tokenizer.characters(ALPHABET + "[]|`｜▁;")
    made.fast.add_special_tokens([AddedToken(name, special=True) for name in special])
    return Tokenizer(made.fast, made.settings, made.eos_ids, None)


def answered(
    name: str, tokenizer: Tokenizer, ids: list[int], *, tools: bool = True, **sampling: Any
) -> tuple[str, dict[str, Any]]:
    """(finish reason, message) of an answer, which streamed is the same."""
    prompt = tokenizer.encode("ask")
    visible = ids[:-1] if ids[-1] in tokenizer.eos_ids else ids
    text = tokenizer.decode_completion(prompt, visible)
    for stop in sampling.get("stop", ()):
        text = text.partition(stop)[0]
    zeros = [0.0] * len(ids)
    completion = Completion(0, 0, prompt, ids, text, zeros, "stop", 0)
    asked = Asked(
        "m",
        tokenizer,
        [prompt],
        Sampling(**sampling),
        True,
        form=FORMATS[name],
        tools=[{}] if tools else (),
    )
    reason, message = asked.message(completion)
    stream, pieces = ChoiceStream(asked, 0, 0, Front()), list[dict[str, Any]]()
    for token in ids:
        stream.feed(token, 0.0, [])
        pieces += [piece["delta"] for piece in [stream.take()] if piece is not None]
    last = stream.end(completion)
    pieces.append(last["delta"])
    for key in ("content", "reasoning_content"):
        assert "".join(piece.get(key, "") for piece in pieces) == (message.get(key) or "")
    calls = [call["function"] for call in last["delta"].get("tool_calls", [])]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    assert last["finish_reason"] == reason
    message["pieces"] = len(pieces)
    return reason, message


@pytest.mark.parametrize("said", SAID)
def test_calls_are_read(said: str) -> None:
    reply = FORMATS[said.split()[0]].read_text(SAID[said])
    assert reply is not None
    assert reply.content == "so\n"
    assert calls_of(reply) == ADD_END


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("special", [True, False])
def test_streamed_and_whole_are_read_alike(said: str, special: bool) -> None:
    """Whether the model has the format's marks as special tokens or writes them as text. What
    opens a call is in no piece, and what is in front of it is told before the end."""
    form = FORMATS[said.split()[0]]
    tokenizer = tokenizer_of(*(form.marks if special else ()))
    ids = [*tokenizer.encode(SAID[said]), tokenizer.eos_ids[0]]
    reason, message = answered(said.split()[0], tokenizer, ids)
    assert reason == "tool_calls"
    assert message["content"] == "so\n"
    assert len(message["tool_calls"]) == 2
    assert message["pieces"] > 1 or (said == "harmony" and not special)


def test_llama_s_call_is_the_whole_text() -> None:
    reply = FORMATS["llama3_json"].read_text(' {"name": "add", "parameters": {"a": 1}} ')
    assert reply is not None
    assert (reply.content, calls_of(reply)) == ("", [("add", {"a": 1})])


DEEP = '{"a": ' * 3000 + "1" + "}" * 3000


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", "no call", None),
        ("hermes", "<tool_call>{not json}</tool_call>",
         "tool call 1 is invalid JSON: expected a key in double quotes at column 2"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'expected a "name", which is text'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
         'expected "arguments" that are a JSON object, got a list'),
        ("hermes", '<tool_call>{"a": }</tool_call>', "call 1 is invalid JSON: expected a value at column 7"),
        ("hermes", '<tool_call>{"name": "f"', "invalid JSON: expected ',' at column 13"),
        ("hermes", '<tool_call>{"name": "f</tool_call>', "without its closing quote, which begins at"),
        ("hermes", '<tool_call>{"name": "f"}}</tool_call>', "expected its end at column 14"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>[]</tool_call>',
         "call 2 is invalid: expected a JSON object with name and arguments, got a list"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>", "expected <function=NAME"),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "expected <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</tool_call>", "expected </parameter> b"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1<parameter=b>2</function></tool_call>",
         "expected </parameter> behind the value of a"),
        ("qwen3_coder", "use <function=f> here", None),
        ("qwen3_coder", "<function=f><parameter=a>1", "call 1 is invalid: expected </parameter>"),
        ("llama3_json", "use {x} here", None),
        ("llama3_json", '{"a": 3}', None),
        ("llama3_json", '{"name": 3, "parameters": {}}', 'expected a "name", which is text'),
        ("llama3_json", '{"name": "f", "parameters": {}', "tool call 1 is invalid JSON: expected ','"),
        ("json", "[1, 2]", None),
        ("json", '```json\n{"name": "f", "arguments": 3}\n```', '"arguments" that are a JSON object'),
        ("json", '[{"name": "f", "arguments": {}}, 3]', "expected a JSON object with name and argu"),
        ("json", '[{"name": "f", "arguments": {}}, {"name": "f", "a": 3}]', "expected \"arguments\""),
        ("json", '[{"name": "Bob", "age": 3}]', None),
        ("llama3_json", '{"name": "Bob", "age": 3}', None),
        ("llama3_json", '{"people": [{"name": "Bob"}], "parameters": 3}', None),
        ("llama3_json", '{"name": "Bob", "age": ', None),
        ("llama3_json", "<|python_tag|>print(1)", "invalid JSON: expected a value at column 1"),
        ("pythonic", "[1, 2]", None),
        ("pythonic", "see [f(x)] here", None),
        ("pythonic", "[f(1)]", "expected NAME=VALUE, got '1'"),
        ("pythonic", "[f(a=g)]", "expected a value, got 'g'"),
        ("pythonic", "[f(a=1)", "expected ']', got the end"),
        ("pythonic", "[f(a=1)] and", "text behind the list: 'and'"),
        ("pythonic", "[f(a='x)]", "not Python: "),
        ("pythonic", "[f(a=" + "[" * 3000, "nested in more than 100 levels"),
        ("pythonic", "[f(a=" + "9" * 5000 + ")]", "more than 300 digits"),
        ("glm45", "no call", None),
        ("glm45", "<tool_call></tool_call>", "expected the name of a tool, without spaces"),
        ("glm45", "<tool_call>two words</tool_call>", "expected the name of a tool, without spaces"),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>', "expected the name of a tool"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key></tool_call>", "expected <arg_key>KEY</arg_key>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "expected </arg_value> behind"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>so</tool_call>", "got 'so"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1\n<arg_key>b</arg_key><arg_value>2"
         "</arg_value></tool_call>", "expected </arg_value> behind the value of a"),
        ("gemma4", "no call", None),
        ("gemma4", "<tool_call|>", None),
        ("gemma4", '5 <|"|> 6', None),
        ("gemma4", "<|tool_call><tool_call|>", "expected call:NAME{KEY:VALUE, ...}"),
        ("gemma4", "<|tool_call>f{}<tool_call|>", "expected call:NAME{KEY:VALUE, ...}"),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", "invalid JSON: expected a value"),
        ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>", "invalid JSON: expected a value"),
        ("gemma4", "<|tool_call>call:f{a:1", "invalid JSON: expected"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', 'a text in it does not end with <|"|>'),
        ("gemma4", "<|tool_call>call:f{<|channel>}<tool_call|>", "does not end with"),
        ("gemma4", '<|tool_call>call:f{<|channel>a<|"|>:1}<tool_call|>', "expected no <|channel> in"),
        ("gemma4", "<|tool_call>call:f" + DEEP.replace('"', ""), "nested too deeply"),
        ("gemma4", "<|tool_call>call:f{a:" + "9" * 5000 + "}", "a whole number of 5,000 digits"),
        ("deepseek_v3", "no call", None),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜> without <｜tool▁call▁begin｜>"),
        ("deepseek_v3", "<｜tool▁sep｜>", "<｜tool▁sep｜> without <｜tool▁call▁begin｜> before it"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f", "expected <｜tool▁sep｜> behind what it is"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "invalid JSON: expected a key in double quotes"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]", "that are a JSON object, got a list"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", "the name of a tool, without space"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{x}\n```", "invalid JSON: exp"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a b\n```json\n{}\n```", "of a tool"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁sep｜>{}", "nothing behind it"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + DEEP, "nested too deeply"),
        ("mistral", "no call", None),
        ("mistral", "[TOOL_CALLS]", "expected the name of a tool"),
        ("mistral", "[TOOL_CALLS] []", "the list of calls is empty"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": []}]', '"arguments" that are a JSON'),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}] and more', "invalid JSON: expected its end"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}, 3]', "expected a JSON object with name and arg"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{not json}", "invalid JSON: expected a key in double quotes"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "expected the arguments that are a JSON object, got"),
        ("mistral", "[TOOL_CALLS][ARGS]{}", "expected the name of a tool"),
        ("mistral", "[TOOL_CALLS]two words[ARGS]{}", "the name of a tool, without spaces"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[ARGS]{}", "expected one [ARGS] behind the name"),
        ("mistral", "[ARGS]{}[TOOL_CALLS]f[ARGS]{}", "[ARGS] without [TOOL_CALLS] before it"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]", "call 2 is invalid: expected the name"),
        ("mistral", "[TOOL_CALLS]f[ARGS]" + DEEP, "nested too deeply"),
        ("mistral", "[TOOL_CALLS] " + "[" * 3000, "nested too deeply"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ' + "9" * 5000 + "}", "a whole number of 5,000 digits"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "\\ud800"}', "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_what_does_not_parse_is_text(name: str, text: str, problem: str | None) -> None:
    """And where it looks like a call, one line says why it is none."""
    reply = FORMATS[name].read_text(text)
    tokenizer = tokenizer_of()
    if set(text) <= set(ALPHABET + "[]|`"):
        _, message = answered(name, tokenizer, tokenizer.encode(text))
        assert message["content"] == text
    if problem is None:
        assert reply is None
        return
    assert reply is not None
    (line,) = reply.problems
    assert problem in line
    assert len(line) < 200
    assert "\n" not in line


@pytest.mark.parametrize(
    "given", ["{not json}", "[1]", "", DEEP, '{"a": ' + "9" * 5000 + "}", '{"a": "\\udc00"}']
)
def test_a_call_in_channels_that_does_not_parse_is_content(given: str) -> None:
    """The control parses."""
    written = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>"
    for body, right in ((given, False), ("{}", True)):
        found = FORMATS["harmony"].read_text(written + f"commentary json<|message|>{body}<|call|>")
        assert found is not None
        assert (found.content, found.reasoning) == ("" if right else given, "hm")
        assert calls_of(found) == ([("f", {})] if right else [])
        assert len(found.problems) == (0 if right else 1)
        assert all(line.startswith("tool call 1 is invalid") for line in found.problems)


CODER = "<function=f><parameter=a>\n1\n</parameter></function>"
TEXT: dict[str, Any] = {"type": "string"}
TYPED: dict[str, Any] = {
    "s": TEXT, "b": {"type": "boolean"}, "any": {},
    "or null": {"anyOf": [TEXT, {"type": "null"}]}, "listed": {"type": ["integer", "string"]},
    "one of": {"oneOf": [{"type": "integer"}, {"allOf": [TEXT]}]}, "number": {"type": ["integer", "null"]},
    "enum": {"enum": ["1", 2]}, "const": {"const": "1"}, "ref": {"$ref": "#/$defs/size"},
    "own": {"$ref": "#/properties/own"}, "wrong": {"anyOf": 3, "enum": "1", "type": [3], "$ref": "#/x"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "None", "None"), ("s", "1", "1"), ("s", "\n x\n", "\n x\n"), ("s", "", ""),
        ("s", "a <parameter=b> b", "a <parameter=b> b"), ("s", "</tool_call> <tool_call>", None),
        ("s", "the end is </function> so", None), ("s", "a </parameter> b", None),
        ("b", "True", True), ("b", "false", False), ("b", "False", False), ("b", "none", "none"),
        ("any", "None", None), ("any", "null", None), ("any", "[true]", [True]),
        ("other", "False", False), ("other", "[None]", "[None]"),
        ("or null", "123", "123"), ("or null", "null", None), ("or null", "None", None),
        ("listed", "123", "123"), ("listed", "None", "None"), ("one of", "1", "1"),
        ("number", "123", 123), ("number", "None", None),
        ("enum", "1", "1"), ("enum", "2", 2), ("const", "1", "1"), ("const", "2", 2),
        ("ref", "1", "1"), ("own", "1", 1), ("wrong", "1", 1),
    ],
)  # fmt: skip
def test_values_of_parameters_in_xml(key: str, written: str, value: Any) -> None:
    """As the tool's schema says: text where it may be some, and Python's words for what is no text,
    which Qwen's templates write. GLM's keys and values are read alike, those words aside."""
    if value is None and "null" not in written and "None" not in written:
        value = written
    given = {"properties": TYPED, "$defs": {"size": TEXT | {"enum": ["1", "2"]}}}
    tools = [{"function": {"name": "f", "parameters": given}}]
    body = f"<function=f><parameter={key.replace(' ', '-')}>\n{written}\n</parameter></function>"
    given["properties"] = {name.replace(" ", "-"): each for name, each in TYPED.items()}
    reply = FORMATS["qwen3_coder"].read_text(f"<tool_call>{body}</tool_call>", tools)
    ((_, found),) = calls_of(reply)
    key = key.replace(" ", "-")
    assert (found, type(found[key])) == ({key: value}, type(value))
    keyed = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{written}</arg_value></tool_call>"
    ((_, found),) = calls_of(FORMATS["glm45"].read_text(keyed, tools))
    assert found == {
        key: value if written not in ("True", "False") and key != "any" else found[key]
    }


@pytest.mark.parametrize(
    ("name", "said", "calls", "content"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=s>\nx\n<parameter=b>\ntrue\n</parameter>"
         "</function></tool_call>", [{"s": "x", "b": True}], ""),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>\nx\n<parameter=s>\n</parameter>"
         "</function></tool_call>", [{"s": "x\n<parameter=s>"}], ""),
        ("qwen3_coder", "so <function=f><parameter=s>x</parameter></function></tool_call>and",
         [{"s": "x"}], "so and"),
        ("qwen3_coder", "<tool_call><function=f></function><function=f></function></tool_call>",
         [{}, {}], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\"<tool_call>"}}'
         "</tool_call>", [{"s": '</tool_call> "<tool_call>'}], ""),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>a<tool_call>{"name": "f"}</tool_call>\nb',
         [{}, {}], "ab"),
        ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "f"}', [{}, {}], ""),
        ("llama3_json", 'So {"name": "f", "parameters": {"s": "{;"}}; {"name": "f", "arguments": {}} on',
         [{"s": "{;"}, {}], "So  on"),
        ("llama3_json", '{"is": {"name": "f"}} {"name": "f", "parameters": {}}', [{}],
         '{"is": {"name": "f"}} '),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value></tool_call></arg_value></tool_call>",
         [{"s": "</tool_call>"}], ""),
    ],
)  # fmt: skip
def test_calls_that_are_not_as_templates_write_them(
    name: str, said: str, calls: list[Any], content: str
) -> None:
    """Are read as vLLM reads them; text around them is content."""
    tools = [{"function": {"name": "f", "parameters": {"properties": TYPED}}}]
    reply = FORMATS[name].read_text(said, tools)
    assert calls_of(reply) == [("f", each) for each in calls]
    assert reply is not None
    assert (reply.content, reply.problems) == (content, ())


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("'he said 'yes', and left'", "he said 'yes', and left"),
        ("'two\nlines and a \\ b'", "two\nlines and a \\ b"),
        ('"a "b" (c)"', 'a "b" (c)'),
        ("'it\\'s'", "it's"),
        ("''x''", "'x'"),
    ],
)
def test_texts_whose_quotes_are_not_escaped_are_arguments_whole(written: str, text: str) -> None:
    for call in (
        f"[f(a={written}, b=1), g(c={written})]",
        f"[f(a={written}, b=1,), g(c={written},)]",
    ):
        reply = FORMATS["pythonic"].read_text(call)
        assert calls_of(reply) == [("f", {"a": text, "b": 1}), ("g", {"c": text})]


@pytest.mark.slow
def test_long_answers_are_read_at_once() -> None:
    """Many marks and large arguments; no quadratic time shows as a test that never ends."""
    many = 50_000
    large = json.dumps({"a": "x" * 1_000_000})
    for name, text in (
        ("mistral", "[TOOL_CALLS]f[ARGS]{}" * many),
        ("mistral", "[TOOL_CALLS]f[ARGS]" + large),
        ("harmony", "<|start|>assistant to=functions.f<|message|>{}<|call|>" * many),
        ("harmony", "<|start|>assistant to=functions.f<|message|>" + large),
        ("gemma4", "<|tool_call>call:f{}<tool_call|>" * many),
        ("gemma4", "<|tool_call>call:f" + large.replace('"a"', "a").replace('"', '<|"|>')),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>" * many),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + large),
        ("pythonic", "[" + ", ".join(["f()"] * many) + "]"),
        ("pythonic", "[f(a='" + "x' " * 300_000 + "')]"),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>" * many),
        ("qwen3_coder", f"<tool_call>{CODER.replace('1', 'x' * 1_000_000)}</tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>' * many),
        ("minimax_m2", "<minimax:tool_call>" + '<invoke name="f"></invoke>' * many),
        ("glm45", "<tool_call>f</tool_call>" * many),
        ("glm45", f"<tool_call>f<arg_key>a</arg_key><arg_value>{'x' * 1_000_000}</arg_value>"),
    ):
        reply = FORMATS[name].read_text(text)
        assert reply is not None
        assert len(reply.calls) == (1 if "xx" in text or "x' x" in text else many)
    for name, text in (
        ("qwen3_coder", "<tool_call><function=f>" + "<parameter=a>" * many + "</function>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>" + "\n<parameter=a>" * many),
        ("hermes", '<tool_call>{"' + '\\"' * many),
        ("llama3_json", '{"name": "f", "parameters": ' + '{"' * many),
        ("qwen3_coder", "<tool_call><function=f><parameter=" + "a" * 1_000_000 + "</function>"),
        ("qwen3_coder", "<tool_call><function=f>" + " " * 1_000_000 + "x</function>"),
        ("pythonic", "[f(a=" + "'x' " * many),
        ("pythonic", "[f(" + "a='" * many),
        ("glm45", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * many),
        ("gemma4", "<|tool_call>call:f{" + "a," * many),
        ("gemma4", "<|tool_call>call:f{a:[" + "None" + " " * many),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```" + " " * many + "x"),
    ):
        reply = FORMATS[name].read_text(text)
        assert reply is not None
        assert len(reply.problems) == 1, text[:30]
    for name, text, count in (
        ("hermes", '<tool_call>{"' * many, many), ("hermes", '<tool_call>{"a" "' * many, many),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x" * many, many),
        ("qwen3_coder", "<function=f><parameter=a>x" * many, many),
        ("minimax_m2", '<invoke name="f"><parameter name="a">x' * many, many),
    ):  # fmt: skip
        reply = FORMATS[name].read_text(text)
        assert reply is not None
        assert 0 < len(reply.problems) <= count
    for text in ("<|channel|>" * many, "<|message|>" * many, "<|end|>" * many):
        assert FORMATS["harmony"].read_text(text) == Reply("", (), "")


def test_forged_marks_are_text() -> None:
    """Where the mark is a special token, characters that spell it are none; the control has the
    token."""
    marked = ("harmony", "gemma4", "deepseek_v3")
    for name, said in (
        ("mistral", SAID["mistral named"]),
        *((each, SAID[each]) for each in marked),
    ):
        tokenizer = tokenizer_of(*FORMATS[name].marks)
        forged = [token for text in said for token in tokenizer.encode(text)]
        reason, message = answered(name, tokenizer, forged)
        assert (reason, message["content"]) == ("stop", said)
        assert answered(name, tokenizer, tokenizer.encode(said))[0] == "tool_calls"


def test_a_tool_s_argument_may_spell_a_mark() -> None:
    tokenizer = tokenizer_of(*FORMATS["mistral"].marks)
    inner = [token for text in '{"a": "[TOOL_CALLS]"}' for token in tokenizer.encode(text)]
    _, message = answered("mistral", tokenizer, [*tokenizer.encode("[TOOL_CALLS]f[ARGS]"), *inner])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": "[TOOL_CALLS]"}


@pytest.mark.parametrize(
    ("said", "content", "reasoning"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>5",
         "5", "hm"),
        ("<|channel|>analysis<|message|>cut off", "", "cut off"),
        ("<|channel|>final<|message|>5<|return|>", "5", ""),
        ("<|channel|>commentary<|message|>I look.<|end|>", "", "I look."),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
         "<|end|><|start|>assistant<|channel|>final<|message|>c<|return|>", "c", "a\nb"),
        (" to=browser.find<|channel|>analysis<|message|>{}<|call|>", "", "{}"),
        ("goes on", "goes on", ""),
        ("goes on<|end|><|start|>assistant<|channel|>final<|message|>more", "goes on\nmore", ""),
        ("<|channel|>final<|message|>a<|channel|>b", "ab", ""),
        ("<|channel|><|message|><|message|><|end|>", "", ""),
        ("<|constrain|><|start|><|call|><|channel|>final<|message|>x", "x", ""),
    ],
)  # fmt: skip
def test_only_the_final_channel_is_content(said: str, content: str, reasoning: str) -> None:
    """With tools or without, with the marks as tokens or as text."""
    for special in (MARKS, ()):
        tokenizer = tokenizer_of(*special)
        for tools in (True, False):
            reason, message = answered("harmony", tokenizer, tokenizer.encode(said), tools=tools)
            assert (reason, message["content"]) == ("stop", content)
            assert message.get("reasoning_content", "") == reasoning


def test_channels_are_streamed_as_they_are_written() -> None:
    tokenizer = tokenizer_of(*MARKS)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so"
    _, message = answered("harmony", tokenizer, tokenizer.encode(said))
    assert message["pieces"] == 5  # of four characters, and the end
    _, message = answered("harmony", tokenizer, tokenizer.encode(said), stop=("nofi", "q"))
    assert message["pieces"] == 1


def test_a_stop_string_ends_a_message() -> None:
    tokenizer = tokenizer_of(*MARKS, *FORMATS["mistral"].marks)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a.b"
    _, message = answered("harmony", tokenizer, tokenizer.encode(said)[:-1], stop=(".",))
    assert (message["content"], message["reasoning_content"]) == ("a", "hm")
    ids = tokenizer.encode("so[TOOL_CALLS]f[ARGS]{}.")
    _, message = answered("mistral", tokenizer, ids, stop=(".",))
    assert message["content"] == "so"
    assert message["tool_calls"][0]["function"]["name"] == "f"


def test_calls_of_no_tool_that_was_given_are_content() -> None:
    tokenizer = tokenizer_of(*MARKS)
    said = '<|channel|>commentary to=functions.f json<|message|>{"a": 1}<|call|>'
    reason, message = answered("harmony", tokenizer, tokenizer.encode(said), tools=False)
    assert (reason, message["content"]) == ("stop", '{"a": 1}')
    assert "tool_calls" not in message


def asked_of(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation with these calls of functions."""
    made = [
        {"id": f"abcdefgh{place}", "type": "function", "function": call}
        for place, call in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": made},
    ]


CALLS: list[dict[str, Any]] = [
    {"name": "rain", "arguments": {"city": "Ulm", "days": [1, 2]}},
    {"name": "end", "arguments": {}},
]


@pytest.mark.parametrize("template", [MISTRAL_V3, MISTRAL_V13])
def test_mistral_s_templates(template: str) -> None:
    tokenizer = tokenizer_of(*FORMATS["mistral"].marks)
    tokenizer.chat_template = template
    whole = tokenizer.render_chat(asked_of(*CALLS), False)
    ids = tokenizer.encode(whole[whole.index("[/INST]") + len("[/INST]") :])
    _, message = answered("mistral", tokenizer, ids)
    found = [call["function"] for call in message["tool_calls"]]
    assert [call["name"] for call in found] == ["rain", "end"]
    assert [json.loads(call["arguments"]) for call in found] == [c["arguments"] for c in CALLS]
    assert format_of("auto", template) is FORMATS["mistral"]


def templates_of_trl() -> list[Path]:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not here")
    return sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))


def test_gpt_oss_s_template() -> None:
    """A call, and a final answer after its thoughts, as the published template renders them."""
    (file,) = (path for path in templates_of_trl() if path.stem == "gptoss")
    tokenizer = tokenizer_of(*MARKS)
    tokenizer.chat_template = file.read_text()
    form = format_of("auto", tokenizer.chat_template)
    assert form is FORMATS["harmony"]
    tools = [
        {
            "type": "function",
            "function": {
                "name": "rain",
                "description": "Rain in a city.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
    asked = {"role": "user", "content": "Rain?"}
    called = asked_of(CALLS[0])
    called[1]["thinking"] = "I ask."
    final = {"role": "assistant", "content": "None.", "thinking": "It is dry."}
    for messages, read in (
        (called, Reply("", (), "I ask.")),
        ([asked, final], Reply("None.", (), "It is dry.")),
    ):
        before = tokenizer.render_chat(messages[:1], True, {"tools": tools})
        whole = tokenizer.render_chat(messages, False, {"tools": tools})
        assert whole.startswith(before)
        ids = tokenizer.encode(whole[len(before) :])
        _, message = answered("harmony", tokenizer, ids)
        assert (message["content"] or "") == read.content
        assert message["reasoning_content"] == read.reasoning
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert [json.loads(call["arguments"]) for call in calls] == (
            [CALLS[0]["arguments"]] if messages is called else []
        )


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


M2 = (
    "{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
"""As MiniMax-M2's writes answers and calls."""


@pytest.mark.parametrize("special", [(), ("<minimax:tool_call>", "</minimax:tool_call>")])
def test_minimax_s_template(special: tuple[str, ...]) -> None:
    """Its calls are read back, with values of all kinds and behind thoughts, also where its marks
    are special tokens. The control: another format reads none."""
    tokenizer = tokenizer_of("]~b]", "[e~[", "<bos>", *special)
    tokenizer.chat_template = M2
    assert format_of("auto", M2) is FORMATS["minimax_m2"]
    assert format_by_template("auto", tokenizer) is FORMATS["minimax_m2"]
    calls = ({"name": "rain", "arguments": GIVEN}, CALLS[1])
    asked, said = asked_of(*calls)
    whole = tokenizer.render_chat([asked, said | {"reasoning_content": "hm"}], False)
    prompt = tokenizer.encode_chat([asked])
    text = whole[whole.index("<think>\n") + len("<think>\n") : whole.rindex("[e~[")]
    ids = tokenizer.encode(text)
    plain = tokenizer.decode_completion(prompt, ids)
    answer = Completion(0, 0, prompt, ids, plain, [0.0] * len(ids), "stop", 0)
    schema = {"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": "rain", **schema}}]
    reply = FORMATS["minimax_m2"].of(answer, tokenizer, tools)
    assert (reply.problems, reply.reasoning) == ((), "hm")
    assert calls_of(reply) == [("rain", GIVEN), ("end", {})]
    assert FORMATS["hermes"].of(answer, tokenizer, tools).calls == ()


def test_the_formats_of_published_templates() -> None:
    """Of those that TRL carries, each that has a format here."""
    shown: dict[str, set[str]] = {}
    names = {id(form): name for name, form in FORMATS.items()}
    for file in templates_of_trl():
        found = names[id(format_of("auto", file.read_text()))]
        shown.setdefault(found, set()).add(file.stem.removesuffix("_training"))
    assert shown["harmony"] == {"gptoss"}
    assert "mistral" not in shown
    assert {"llama3_1", "llama3_2"} <= shown["llama3_json"]
    assert {"qwen3_5_think", "qwen3_6"} <= shown["qwen3_coder"]
    assert {"qwen2_5", "qwen3", "qwen3_instruct_2507"} <= shown["hermes"]


@pytest.mark.slow
def test_a_format_is_the_one_that_reads_what_a_template_writes() -> None:
    """Of TRL's templates; what no format reads is not taken for another, and a template that writes
    no calls leaves it to what its text shows."""
    found: dict[str | None, set[str]] = {}
    names = {id(form): name for name, form in FORMATS.items()}
    for file in templates_of_trl():
        form = format_by_template("auto", of_file(file))
        found.setdefault(names.get(id(form)), set()).add(file.stem.removesuffix("_training"))
    assert found[None] == {"muse_glimmer"}
    gemma4 = {"gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"}
    assert found["gemma4"] == gemma4
    assert found["glm45"] == {"glm4moe"}
    assert found["deepseek_v3"] == {"deepseekv3", "deepseek_r1_distill"}
    assert found["harmony"] == {"gptoss"}
    assert found["llama3_json"] == {"llama3_1", "llama3_2"}
    assert found["pythonic"] == {"lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}
    coder = {"qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"}
    nemotron = {f"nemotron_3_{name}" for name in ("nano", "super", "ultra", "5_lightning")}
    assert found["qwen3_coder"] == coder | nemotron
    assert {"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"} <= found["hermes"]
    tokenizer = of_file(next(file for file in templates_of_trl() if file.stem == "muse_glimmer"))
    assert format_by_template("json", tokenizer) is FORMATS["json"]


GIVEN: dict[str, Any] = {
    "city": "Ulm, {so}: [it] 'is'\nhere",
    "days": [1, 2.5, "x", True, None],
    "more": {"of": {"it": [], "a b": "true"}},
    "count": -12,
}


def written_by(tokenizer: Tokenizer) -> Completion | None:
    """An answer with two calls, or one, as a template writes it; None where it writes none."""
    for arguments, second in ((GIVEN, {}), (json.dumps(GIVEN), "{}")):
        first: dict[str, Any] = {"name": "rain", "arguments": arguments}
        for calls in ((first, {"name": "end", "arguments": second}), (first,)):
            said = asked_of(*calls)
            try:
                before = tokenizer.encode_chat(said[:1])
                whole = tokenizer.encode_chat(said, False)
            except IsobitError:
                continue
            pairs = enumerate(zip(before, whole))
            start = next((i for i, (a, b) in pairs if a != b), len(before))
            before, ids = whole[:start], whole[start:]
            ends = [place for place, token in enumerate(ids) if token in tokenizer.eos_ids]
            ids = ids[: ends[0]] if ends else ids
            if "Ulm" in (text := tokenizer.decode(ids)):
                return Completion(0, 0, before, ids, text, [0.0] * len(ids), "stop", 0)
    return None


@pytest.mark.slow
def test_calls_of_published_templates_are_read_back() -> None:
    """Of TRL's templates that write calls in a format here: texts, numbers, lists, objects,
    nothing. Two of LFM2.5's write texts without their quotes and line breaks escaped."""
    schema = {"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": "rain", **schema}}]
    read = dict[str, set[str]]()
    names = {id(form): name for name, form in FORMATS.items()}
    for file in templates_of_trl():
        tokenizer = of_file(file)
        form, answer = format_by_template("auto", tokenizer), written_by(tokenizer)
        if form is None or answer is None:
            continue
        reply = form.of(answer, tokenizer, tools)
        assert reply is not None, file.stem
        assert reply.problems == (), file.stem
        calls = [("rain", GIVEN), ("end", {})]
        assert calls_of(reply) in (calls, calls[:1]), file.stem
        read.setdefault(names[id(form)], set()).add(file.stem)
    assert {name: len(files) for name, files in read.items()}.items() >= {
        "glm45": 2, "gemma4": 7, "deepseek_v3": 2, "harmony": 2
    }.items()  # fmt: skip
    assert {"lfm2_2_5", "lfm2_2_5_v2", "lfm2_v2", "lfm2_2_5_vl"} <= read["pythonic"]
    assert {"hermes", "qwen3_coder", "llama3_json"} < read.keys()

"""One table of what models write: read alike by a rollout and by the server, streamed or not."""

import json
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from isobit.data.turns import Turn
from isobit.engine.types import Completion, Sampling
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.table import FORMATS
from isobit.model.text.tool_formats.thoughts import CLOSES, LABELS, begun_by
from isobit.model.text.tool_formats.turn import turn_of
from isobit.serve.answers import Asked, ChoiceStream
from isobit.serve.prompts import Front

from .test_tool_formats import tokenizer_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
F, G = ("f", {"a": "1", "b": 2}), ("g", {})


@dataclass(frozen=True)
class Written:
    """How a format writes calls: one, two, one that is broken, a mark that is none; how it thinks,
    and whether it takes text before and behind a call."""

    one: str
    two: str
    broken: str
    mark: str
    thinks: str = "<think>"
    before: bool = True
    behind: bool = True


JSON_F, XML_G = '{"name": "f", "arguments": {"a": "1", "b": 2}}', "<function=g>\n</function>"
XML_F = "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
GLM_F = "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
M2_F = '<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="b">2</parameter>\n</invoke>'
M2_G = '<invoke name="g">\n</invoke>'
GEMMA_F = '<|tool_call>call:f{a:<|"|>1<|"|>,b:2}<tool_call|>'
SEEK, SEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEEK_F = f'{SEEK}f<｜tool▁sep｜>{{"a": "1", "b": 2}}{SEEK_END}'
LLAMA_F = '{"name": "f", "parameters": {"a": "1", "b": 2}}'


def tagged(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def invoked(*bodies: str) -> str:
    return "\n".join(["<minimax:tool_call>", *bodies, "</minimax:tool_call>"])


TABLE = {
    "hermes": Written(
        tagged(JSON_F), tagged(JSON_F, '{"name": "g", "arguments": {}}'), tagged('{"name": }'),
        "<tool_call>",
    ),
    "qwen3_coder": Written(
        tagged(XML_F), tagged(XML_F, XML_G), tagged("<function=f>\n1\n</function>"), "<tool_call>"
    ),
    "qwen3_coder without its opening": Written(
        f"{XML_F}\n</tool_call>", f"{XML_F}\n{XML_G}", "<function=f>\n<parameter=a>\n1", "<function="
    ),
    "qwen3_coder without ends": Written(
        tagged(XML_F.replace("\n</parameter>", "")),
        tagged(XML_F.replace("\n</parameter>", "") + XML_G),
        tagged("<function=f>\n<parameter=a>\n1"), "<tool_call>",
    ),
    "glm45": Written(
        tagged(GLM_F), tagged(GLM_F, "g"), tagged("f\n<arg_key>a</arg_key>\n<arg_value>1"),
        "<tool_call>",
    ),
    "minimax_m2": Written(
        invoked(M2_F), invoked(M2_F, M2_G), invoked('<invoke name="f">\n1\n</invoke>'),
        "<minimax:tool_call>",
    ),
    "minimax_m2 without its opening": Written(
        f"{M2_F}\n</minimax:tool_call>", f"{M2_F}\n{M2_G}", '<invoke name="f">\n<parameter name="a">1',
        "<invoke name=",
    ),
    "minimax_m2 without ends": Written(
        invoked(M2_F.replace("</parameter>", "")), invoked(M2_F.replace("</parameter>", ""), M2_G),
        invoked('<invoke name="f">\n<parameter name="a">1'), "<minimax:tool_call>",
    ),
    "llama3_json": Written(
        LLAMA_F, LLAMA_F + '; {"name": "g", "parameters": {}}', '{"name": "f", "parameters": {',
        '{"name"',
    ),
    "json": Written(
        f"```json\n{JSON_F}\n```", f'```json\n[{JSON_F}, {{"name": "g"}}]\n```',
        '```json\n{"name": "f", "arguments": {\n```', "```",
    ),
    "pythonic": Written(
        '<|tool_call_start|>[f(a="1", b=2)]<|tool_call_end|>',
        '<|tool_call_start|>[f(a="1", b=2), g()]<|tool_call_end|>',
        "<|tool_call_start|>[f(a=]<|tool_call_end|>", "<|tool_call_start|>",
    ),
    "pythonic without marks": Written(
        '[f(a="1", b=2)]', '[f(a="1", b=2), g()]', "[f(a=]", "[f(", before=False, behind=False
    ),
    "mistral": Written(
        '[TOOL_CALLS]f[ARGS]{"a": "1", "b": 2}',
        '[TOOL_CALLS]f[ARGS]{"a": "1", "b": 2}[TOOL_CALLS]g[ARGS]{}', "[TOOL_CALLS]f[ARGS]{",
        "[TOOL_CALLS]", "[THINK]", behind=False,
    ),
    "mistral of v3": Written(
        f"[TOOL_CALLS] [{JSON_F}]", f'[TOOL_CALLS] [{JSON_F}, {{"name": "g", "arguments": {{}}}}]',
        '[TOOL_CALLS] [{"name": ', "[TOOL_CALLS]", "[THINK]", behind=False,
    ),
    "gemma4": Written(
        GEMMA_F, GEMMA_F + "<|tool_call>call:g{}<tool_call|>", "<|tool_call>call:f{a:}<tool_call|>",
        "<|tool_call>", "<|channel>",
    ),
    "deepseek_v3": Written(
        f"<｜tool▁calls▁begin｜>{SEEK_F}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{SEEK_F}\n{SEEK}g<｜tool▁sep｜>{{}}{SEEK_END}<｜tool▁calls▁end｜>",
        f"{SEEK}f<｜tool▁sep｜>{{{SEEK_END}", SEEK,
    ),
}  # fmt: skip
"""What vLLM's parsers of these names read as these calls, broken ones aside. Where it drops text
behind a call (Hermes, GLM, DeepSeek) or around one (Llama), that is content here."""


def tokenizer_for(name: str, special: bool) -> Tokenizer:
    """A token for each character; the marks that published models have as special tokens are some
    here, or none is."""
    thinks = TABLE[name].thinks
    own = (thinks, CLOSES[thinks]) if thinks != "<think>" else ()
    marks = {*FORMATS[name.split()[0]].marks, *own} if special else ()
    return tokenizer_of(*marks)


def read(
    name: str, tokenizer: Tokenizer, prompt: str, ids: list[int], tools: Any = TOOLS
) -> tuple[Turn, dict[str, Any]]:
    """Return an answer as a rollout and as the server read it; streamed it is the same."""
    asked_ids, form = tokenizer.encode(prompt), FORMATS[name.split()[0]]
    text = tokenizer.decode_completion(asked_ids, ids)
    answer = Completion(0, 0, asked_ids, ids, text, [0.0] * len(ids), "stop", 0)
    asked = Asked("m", tokenizer, [asked_ids], Sampling(), True, form=form, tools=tools)
    reason, message = asked.message(answer)
    stream, told = ChoiceStream(asked, 0, 0, Front()), dict[str, str]()
    deltas = list[dict[str, Any]]()
    for token in ids:
        stream.feed(token, 0.0, [])
        deltas += [piece["delta"] for piece in [stream.take()] if piece is not None]
    last = stream.end(answer)
    for delta in [*deltas, last["delta"]]:
        for key in ("content", "reasoning_content"):
            told[key] = told.get(key, "") + (delta.get(key) or "")
    assert told["content"] == (message["content"] or ""), (
        prompt,
        tokenizer.decode(ids, special=True),
    )
    assert told["reasoning_content"] == message.get("reasoning_content", ""), (
        prompt,
        tokenizer.decode(ids, special=True),
    )
    assert (last["finish_reason"], len(last["delta"].get("tool_calls", ()))) == (
        reason,
        len(message.get("tool_calls", ())),
    )
    message["pieces"] = sum(map(bool, deltas))
    return turn_of(0, answer, tokenizer, form, tools), message


def calls_of(turn: Turn, message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the calls that both have."""
    served = [call["function"] for call in message.get("tool_calls", ())]
    assert [(call.name, call.arguments) for call in turn.calls] == [
        (call["name"], call["arguments"]) for call in served
    ]
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("begun", ["", "begun", "written"])
@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str, begun: str, special: bool) -> None:
    """A call, two, text before and behind, broken; without thoughts, and with thoughts that the
    prompt has begun, or the answer. What thoughts name of a call is none."""
    written, tokenizer = TABLE[name], tokenizer_for(name, special)
    opened = written.thinks + LABELS.get(written.thinks, "\n")
    prompt = "ask" + (opened if begun == "begun" else "")
    hm = (
        f"hm {written.mark} or\nnot" if written.mark not in FORMATS[name.split()[0]].marks else "hm"
    )
    thoughts = f"{hm}\n{CLOSES[written.thinks]}\n\n" if begun else ""
    thoughts = (opened if begun == "written" else "") + thoughts
    for before, calls, behind in (
        ("", 0, "It is 5."), ("", 1, ""), ("", 2, ""), ("So:\n", 1, ""), ("", 1, "\nI wait."),
        ("So:\n", 2, "\nI wait."),
    ):  # fmt: skip
        if (before and not written.before) or (calls and behind and not written.behind):
            continue
        body = ("", written.one, written.two)[calls]
        ids = tokenizer.encode(thoughts + before + body + behind)
        turn, message = read(name, tokenizer, prompt, ids)
        assert turn.problems == ()
        assert calls_of(turn, message) == [F, G][:calls]
        said = before + (behind.strip("\n") if calls else behind)
        assert turn.content.replace("\n\n", "\n") == said
        assert (message["content"] or "") == turn.content
        assert turn.reasoning == message.get("reasoning_content", "") == (hm if begun else "")
        assert message["pieces"] > 0 or not (before or begun)
    turn, message = read(name, tokenizer, prompt, tokenizer.encode(thoughts + written.broken))
    (problem,) = turn.problems
    assert problem.startswith("tool call 1 is invalid")
    assert calls_of(turn, message) == []
    assert turn.reasoning == message.get("reasoning_content", "") == (hm if begun else "")
    assert message["content"], "the server tells what was written"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TABLE)
def test_without_tools_thoughts_are_told_apart_as_well(name: str, special: bool) -> None:
    """And calls are text of no tool. The control: an answer without thoughts is all content."""
    thinks, tokenizer = TABLE[name].thinks, tokenizer_for(name, special)
    opened, close = thinks + LABELS.get(thinks, ""), CLOSES[thinks]
    for prompt, said in (
        ("ask", f"{opened}hm{close}It is 5."),
        (f"ask{opened}", f"hm{close}It is 5."),
    ):
        turn, message = read(name, tokenizer, prompt, tokenizer.encode(said), ())
        assert (turn.content, turn.reasoning) == ("It is 5.", "hm")
        assert (message["content"], message["reasoning_content"]) == ("It is 5.", "hm")
    turn, message = read(name, tokenizer, "ask", tokenizer.encode("It is 5."), ())
    assert (turn.content, message["content"], turn.reasoning) == ("It is 5.", "It is 5.", "")
    turn, message = read(name, tokenizer, f"ask{opened}", tokenizer.encode("cut"), ())
    assert (message["content"], message["reasoning_content"], turn.content) == ("", "cut", "")


def test_a_call_in_thoughts_that_do_not_end_is_told() -> None:
    tokenizer = tokenizer_of()
    turn, message = read("hermes", tokenizer, "ask<think>", tokenizer.encode(TABLE["hermes"].one))
    assert turn.calls == ()
    (problem,) = turn.problems
    assert problem == "a tool call is invalid: expected </think> before it, where thoughts end"
    assert message["content"] == ""
    turn, _ = read("hermes", tokenizer, "ask<think>", tokenizer.encode("thinking on"))
    assert turn.problems == ()


@pytest.mark.parametrize("name", TABLE)
def test_streams_are_what_is_read(name: str) -> None:
    """Of random answers made of marks and text, whatever the prompt has begun."""
    rng, written = random.Random(name), TABLE[name]
    form = FORMATS[name.split()[0]]
    parts = [
        *form.marks, *form.opens, written.thinks, CLOSES[written.thinks], "<think>", "</think>",
        written.one, written.broken, "\n", " ", "so", "thought\n", "<", "th", "</think", "{", "}",
    ]  # fmt: skip
    for special in (True, False):
        tokenizer = tokenizer_for(name, special)
        for _ in range(40):
            prompt = "ask" + rng.choice(["", written.thinks, f"{written.thinks}\nhm"])
            text = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))
            ids = tokenizer.encode(text)
            for tools in (TOOLS, ()):
                turn, message = read(name, tokenizer, prompt, ids, tools)
                assert turn.reasoning == message.get("reasoning_content", ""), text
                if tools and not turn.problems:
                    assert turn.content == (message["content"] or ""), text


def test_a_client_may_ask_for_one_call() -> None:
    """The control asks for all."""
    tokenizer = tokenizer_of()
    ids = tokenizer.encode(TABLE["hermes"].two)
    answer = Completion(0, 0, [1], ids, tokenizer.decode(ids), [0.0] * len(ids), "stop", 0)
    for one_call, count in ((True, 1), (False, 2)):
        asked = Asked("m", tokenizer, [[1]], Sampling(), True, form=FORMATS["hermes"], tools=TOOLS)
        _, message = replace(asked, one_call=one_call).message(answer)
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"][:count]


def test_what_a_user_spells_begins_no_thoughts() -> None:
    """The control: what the template writes at the end, and an answer that is continued."""
    tokenizer = tokenizer_of("<|turn|>")
    for prompt, begun in (
        ("<|turn|>ask <think> why<|turn|>", ""), ("<|turn|>ask<|turn|><think>\n", "<think>"),
        ("<|turn|>ask<|turn|><think>\nhm, ", "<think>"), ("<|turn|>ask<|turn|>the <think", ""),
        ("<|turn|>ask<|turn|><think>\n\n</think>\n\n", ""), ("<think> why", ""), ("", ""),
    ):  # fmt: skip
        assert begun_by(tokenizer.encode(prompt), tokenizer) == begun, prompt

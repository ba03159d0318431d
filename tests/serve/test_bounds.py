"""What is refused before llguidance compiles it, and that what is taken compiles, in a process of its
own: a chain that is too long ends it."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from isobit.serve.bounds import MOST_REFS, MOST_RULES, check_grammar, check_schemas, check_size
from isobit.serve.requests import BadRequest

COMPILES = """
import json, sys, threading
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from isobit.serve.structured import _LIMITS

class Words:
    tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
    special_token_ids, eos_token_id, bos_token_id = [256], 256, None
    def __call__(self, text): return []

words = LLTokenizer(TokenizerWrapper(Words()), eos_token=[256])
for part in json.loads(sys.stdin.read()):
    text = json.dumps({"grammars": [part]})
    made = []
    def compile(): made.append(LLMatcher(words, text, log_level=0, limits=LLParserLimits(**_LIMITS)))
    thread = threading.Thread(target=compile)
    thread.start()
    thread.join()
    assert not made[0].is_error(), made[0].get_error()
"""


def rules(count: int) -> str:
    """A chain of so many rules."""
    chain = [f"r{i}: r{i + 1}" for i in range(count - 2)]
    return "\n".join(["start: r0", *chain, f'r{count - 2}: "a"'])


def references(count: int, inner: Callable[[Any], Any]) -> dict[str, Any]:
    """A chain of so many references."""
    chain = {f"d{i}": inner({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count - 1)}
    chain[f"d{count - 1}"] = {"type": "integer"}
    return {"$ref": "#/$defs/d0", "$defs": chain}


INNER: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "anyOf": lambda value: {"anyOf": [value, {"type": "null"}]},
    "items": lambda value: {"type": "array", "items": value},
    "properties": lambda value: {"type": "object", "properties": {"a": value}},
    "allOf": lambda value: {"allOf": [value]},
}


def test_chains_at_the_bound_compile() -> None:
    pytest.importorskip("llguidance")
    schemas = [references(MOST_REFS, inner) for inner in INNER.values()]
    for schema in schemas:
        check_schemas("json_schema", [("json_schema", schema)])
    grammars = [rules(MOST_RULES), "start: x\nx: %json " + json.dumps(schemas[1])]
    for grammar in grammars:
        check_grammar("ebnf", grammar)
    parts = [{"json_schema": schema} for schema in schemas]
    parts += [{"lark_grammar": grammar} for grammar in grammars]
    made = subprocess.run(
        [sys.executable, "-c", COMPILES], input=json.dumps(parts), text=True, capture_output=True
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("inner", INNER)
def test_longer_chains_of_references_are_refused(inner: str) -> None:
    schema = references(MOST_REFS + 1, INNER[inner])
    problem = "at most 300 [$]ref, which stand in at most 1,500 levels together, got 301"
    with pytest.raises(BadRequest, match=f"json_schema: {problem}"):
        check_schemas("json_schema", [("json_schema", schema)])
    with pytest.raises(BadRequest, match=f"ebnf: {problem}"):
        check_grammar("ebnf", "start: x\nx: %json" + json.dumps(schema))
    halves = [
        ("tools: a", references(151, INNER[inner])),
        ("tools: b", references(151, INNER[inner])),
    ]
    check_schemas("tools", halves[:1])
    with pytest.raises(BadRequest, match=r"tools: at most 300 [$]ref"):
        check_schemas("tools", halves)


def test_deep_references_and_many_rules_are_refused() -> None:
    deep = references(30, INNER["alone"])
    for name in deep["$defs"]:
        for _ in range(60):
            deep["$defs"][name] = {"items": deep["$defs"][name]}
    with pytest.raises(
        BadRequest, match=r"at most 300 [$]ref, which stand in at most 1,500 levels"
    ):
        check_schemas("a", [("a", deep)])
    for text in (rules(MOST_RULES + 1), rules(MOST_RULES + 1).replace(":", " ::=")):
        with pytest.raises(BadRequest, match=r"ebnf: at most 300 rules \(colons\)"):
            check_size("ebnf", text)
    nested = "\n".join(f"r{i}: {'(' * 20}r{i + 1}{')?' * 20}" for i in range(100))
    with pytest.raises(BadRequest, match="1,500 brackets, got 103 and 2,000"):
        check_grammar("ebnf", f'start: r0\n{nested}\nr100: "::="')


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"multipleOf": 99999989}, "a.multipleOf"),
        ({"items": [{"multipleOf": 10001.0}]}, "a.items[0].multipleOf"),
        ({"properties": {"b": {"multipleOf": 2.0**-20}}}, "a.properties.b.multipleOf"),
        ({"multipleOf": 1e300}, "a.multipleOf"),
        ({"multipleOf": 997, "allOf": [{"multipleOf": 991}]}, "a.allOf[0].multipleOf"),
    ],
)
def test_multiples_are_bounded(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_schemas("a", [("a", schema)])
    assert str(refused.value).startswith(f"{place}: expected at most 10,000 without")
    with pytest.raises(BadRequest, match="multipleOf: expected at most 10,000"):
        check_grammar("ebnf", "start: x\nx: %json  " + json.dumps(schema))


def test_what_is_small_is_taken() -> None:
    """Control: cents, several multiples that have a small one in common, and what only looks like
    an operator of tokens, or stands in a text."""
    money = {"multipleOf": 0.01, "properties": {"multipleOf": {"multipleOf": 9973}}}
    more = {"anyOf": [{"multipleOf": n} for n in (5, 10, 250, 0, True, "b", None)]}
    check_schemas("a", [("a", money), ("b", more), ("c", None), ("d", True)])
    check_grammar("ebnf", 'start: "a"~3 "&" /[&~]@body/ // & @answer\n# ~ / & /\nx: "@body"')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("start: T\nT: /(a{997})*/ & /(a{991})*/", "ebnf: &: not offered between tokens"),
        ("start: T\nT: ~(~/(a{997})*/ | ~/(a{991})*/)", "ebnf: ~: not offered between tokens"),
        ("start: @answer", "ebnf: @answer: expected a rule of this grammar"),
        ('start: "a" @body', "ebnf: @body: expected a rule of this grammar"),
        ("start: %json {", "ebnf: expected JSON behind %json"),
    ],
)
def test_what_a_grammar_may_not_have(text: str, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        check_grammar("ebnf", text)

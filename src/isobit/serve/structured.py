"""Grammars, to which answers are held: a schema, a pattern, a choice, a grammar, a call.

llguidance compiles these and says which tokens may come next; the mask is one more filter of the
distribution that is sampled (`engine/shaping.py`). What a stranger sends is bounded: its bytes here,
its rules and numbers in `bounds.py`, and by llguidance's own counters, which no clock moves, the work
of compiling and of each mask. What is wrong is refused before anything is sampled. Left out:
structural tags.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

from isobit.data.foreign import BadJson, parse_json
from isobit.engine.shaping import Grammar, Matcher
from isobit.engine.token_bits import Bits, full
from isobit.errors import IsobitError, brief
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import ToolFormat, Tools
from isobit.model.text.tool_formats.grammar import BODY, JSON_OPTIONS, Asked, grammar, held
from isobit.serve.bounds import check_grammar, check_schemas, check_size
from isobit.serve.protocol import ChatRequest, SamplingKeys
from isobit.serve.requests import BadRequest
from isobit.serve.words import token_bytes, token_words

MOST_BYTES = 64 << 10
"""The most bytes of a schema, a pattern or a grammar, and of the tools of a request that has calls
held to theirs."""
_LIMITS = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_KEPT = 32  # compiled grammars, the last that were used
_PLACES, _SEARCHED_BYTES = 32, 8 << 10  # schemas in a schema that are tried, to say which is wrong
_INNER = ("properties", "$defs", "definitions", "patternProperties", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True)
class Body:
    """A form that a request asks for: a `grammar` of llguidance's, by a `key` of the request.
    `schema`: the JSON schema that it is, None: it is none."""

    key: str
    grammar: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None


class Grammars:
    """The grammars of a model with this tokenizer and size of its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = Lock()  # requests are read in several threads

    def of_text(self, keys: SamplingKeys) -> Grammar | None:
        """Return the grammar that a request asks for, whose answer continues its prompt; None: it
        asks for none. Raises BadRequest."""
        body = self._body(keys)
        return None if body is None else self._made(Asked(body=True), body, None, ())

    def of_chat(
        self, keys: ChatRequest, form: ToolFormat, prompt: Sequence[int], tools: Tools
    ) -> Grammar | None:
        """Return the grammar that a conversation asks for, behind thoughts; `tools`: those that the
        model is shown. Raises BadRequest."""
        body, choice = self._body(keys), keys.tool_choice
        if isinstance(choice, Mapping) or choice == "required":
            if isinstance(choice, Mapping):
                tools = [
                    t for t in tools if t["function"].get("name") == choice["function"]["name"]
                ]
            several = choice == "required" and keys.parallel_tool_calls
            asked = Asked(calls=True, tools=tools, several=several, strict=True)
            return self._made(asked, None, form, prompt)
        calls = bool(tools) and (any(map(held, tools)) or (body is not None and bool(form.frames)))
        if body is None and not calls:
            return None
        or_else = "" if not calls else "text" if body is None else "body"
        several = keys.parallel_tool_calls
        asked = Asked(body is not None, calls, or_else, tools if calls else (), several)
        return self._made(asked, body, form, prompt)

    def _body(self, keys: SamplingKeys) -> Body | None:
        """Return what the keys of a request ask an answer to be."""
        bodies = [body for body in _bodies(keys) if body is not None]
        if len(bodies) > 1:
            several = " and ".join(body.key for body in bodies)
            raise BadRequest(f"{several}: give one of them", bodies[1].key)
        return bodies[0] if bodies else None

    def _made(
        self, asked: Asked, body: Body | None, form: ToolFormat | None, prompt: Sequence[int]
    ) -> Grammar:
        key = "tools" if body is None else body.key
        if asked.calls and len(json.dumps(asked.tools)) > MOST_BYTES:
            raise BadRequest(
                f"tools: at most {MOST_BYTES >> 10} KiB where calls are held to them", "tools"
            )
        if asked.calls:
            functions = [tool["function"] for tool in asked.tools]
            check_schemas(
                "tools",
                [(f"tools: {f.get('name')!s:.40}", f.get("parameters")) for f in functions],
            )
        try:
            answer = grammar(asked, form, self._tokenizer, prompt)
        except IsobitError as error:
            raise BadRequest(str(error), "tools") from None
        parts = [{"name": "answer", "lark_grammar": answer}]
        return self._compile(parts + ([] if body is None else [dict(body.grammar)]), key, body)

    def _compile(self, parts: list[dict[str, Any]], key: str, body: Body | None) -> Grammar:
        """Return the compiled grammar, after its first mask was made."""
        text = json.dumps({"grammars": parts})
        with self._lock:
            compiled = self._compiled.pop(text, None)
        if compiled is None:
            compiled, bits = self._matcher(text, key), full(1, self._vocabulary)[0]
            try:
                compiled.begin().allow(bits)
                problem = "" if bits.any() else "no text is what it asks for"
            except IsobitError as error:
                problem = str(error)
            if problem:
                raise BadRequest(f"{key}{self._place(body)}: {problem}", key)
        with self._lock:
            self._compiled[text] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def _matcher(self, text: str, key: str) -> "_Compiled":
        library = _llguidance(key)
        limits = library.LLParserLimits(**_LIMITS)
        with self._lock:
            words = self._words
        return _Compiled(library.LLMatcher(words, text, log_level=0, limits=limits))

    def _place(self, body: Body | None) -> str:
        """Return where in a schema the innermost schema is that is wrong by itself; "": in the
        whole."""
        if body is None or body.schema is None or len(json.dumps(body.schema)) > _SEARCHED_BYTES:
            return ""
        place, schema, left = "", body.schema, _PLACES
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}

        def wrong(value: Any) -> bool:
            nonlocal left
            left -= 1
            if left < 0 or not isinstance(value, Mapping):
                return False
            alone = {"grammars": [{"json_schema": {**shared, **value}}]}
            return self._matcher(json.dumps(alone), body.key).problem is not None

        while True:
            inner = next((pair for pair in _inside(schema) if wrong(pair[1])), None)
            if inner is None:
                return place
            place, schema = f"{place}.{inner[0]}", inner[1]

    @cached_property
    def _words(self) -> Any:
        """The vocabulary as llguidance takes it. A token whose bytes are not known never comes."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self._tokenizer.eos_ids:
            raise BadRequest(
                "the model has no token that ends an answer, so none is held to a form"
            )
        words = LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocabulary)),
            eos_token=[token for token in self._tokenizer.eos_ids if token < self._vocabulary],
        )
        return words


class _Vocabulary:
    """The bytes of each token, under the names that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        ids = tokenizer.fast.get_vocab(with_added_tokens=True).values()
        known = sorted(token for token in ids if token < size)
        plain = (token for token in known if not tokenizer.is_special(token))
        before = next((t for t in plain if tokenizer.decode([t]).strip()), known[0])
        self.tokens = [b""] * size
        for token in known:
            (word,) = token_words(tokenizer, before, [token], False)
            self.tokens[token] = token_bytes(tokenizer, token, word) or b""
        self.special_token_ids = [token for token in known if tokenizer.is_special(token)]
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], None

    def __call__(self, text: str | bytes) -> list[int]:
        """Return no tokens: nothing is forced, so no text is encoded."""
        return []


class _Compiled:
    """A grammar that llguidance has compiled."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def problem(self) -> str | None:
        """Why it could not be compiled."""
        return _problem(self._matcher)

    def begin(self) -> Matcher:
        """Return the state in front of an answer."""
        return _State(self._matcher.deep_copy())


class _State:
    """The state behind some tokens of an answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens; what comes behind the end of an answer changes nothing."""
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self._check()

    def allow(self, bits: Bits) -> None:
        """Write the tokens that may come next."""
        assert bits.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()

    def _check(self) -> None:
        if (problem := _problem(self._matcher)) is not None:
            raise IsobitError(problem)


def _problem(matcher: Any) -> str | None:
    """Return the error of a matcher in one line."""
    if not matcher.is_error():
        return None
    text = matcher.get_error().replace("<non-verbose/>", "")
    if "NoExtensionBias" in text:
        return "no text of this model's tokens is what it asks for"
    reason = next((line for line in text.splitlines() if line.startswith("error: ")), text)
    return brief(" ".join(reason.split()), 200)


def _llguidance(key: str) -> Any:
    """Return the library. Raises BadRequest where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise BadRequest(
            f"{key}: answers are held to a form by the package llguidance, which is not installed "
            "where this server runs (pip install llguidance)",
            key,
        ) from None
    return llguidance


def _bodies(keys: SamplingKeys) -> Iterator[Body | None]:
    """Yield what each key of a request asks for, in the order of its name. Raises BadRequest."""
    form = keys.response_format
    if form is not None:
        key = "response_format"
        if form.type == "json_object":
            yield _schema(key, {"type": "object"})
        elif form.type == "json_schema":
            key = "response_format.json_schema"
            value = (form.json_schema or {}).get("schema")
            if not isinstance(value, Mapping):
                raise BadRequest(f"{key}: expected an object with a schema", key)
            yield _schema(f"{key}.schema", value)
        elif form.type != "text":
            raise BadRequest(
                f"{key}.type: expected text, json_object or json_schema, got {form.type!r:.80}", key
            )
    outputs = keys.structured_outputs
    if outputs is not None:
        key = "structured_outputs"
        yield None if outputs.json is None else _schema(f"{key}.json", outputs.json)
        yield _schema(f"{key}.json_object", {"type": "object"}) if outputs.json_object else None
        yield None if outputs.regex is None else _regex(f"{key}.regex", outputs.regex)
        yield None if outputs.choice is None else _choice(f"{key}.choice", outputs.choice)
        yield None if outputs.grammar is None else _lark(f"{key}.grammar", outputs.grammar)
    yield None if keys.json_schema is None else _schema("json_schema", keys.json_schema)
    yield None if keys.regex is None else _regex("regex", keys.regex)
    yield None if keys.ebnf is None else _lark("ebnf", keys.ebnf)


def _bounded(key: str, text: str) -> str:
    if len(text.encode()) > MOST_BYTES:
        raise BadRequest(
            f"{key}: at most {MOST_BYTES >> 10} KiB, got {len(text.encode()):,} bytes", key
        )
    return text


def _schema(key: str, value: Any) -> Body:
    """Return the body of a JSON schema, which may be given as text."""
    if isinstance(value, str):
        try:
            value = parse_json(_bounded(key, value))
        except BadJson as error:
            raise BadRequest(f"{key}: not JSON: {error.reason}", key) from None
    if not isinstance(value, Mapping):
        raise BadRequest(f"{key}: expected a JSON schema, which is an object", key)
    _bounded(key, json.dumps(value))
    check_schemas(key, [(key, value)])
    return Body(key, {"name": BODY, "json_schema": {**value, "x-guidance": JSON_OPTIONS}}, value)


def _regex(key: str, text: str) -> Body:
    written = _llguidance(key).LLMatcher.grammar_from_regex(_bounded(key, text))
    return Body(key, {**json.loads(written)["grammars"][0], "name": BODY})


def _choice(key: str, texts: Any) -> Body:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise BadRequest(f"{key}: expected a list of texts", key)
    _bounded(key, "".join(texts))
    return Body(key, {"name": BODY, "lark_grammar": "start: " + " | ".join(map(json.dumps, texts))})


def _lark(key: str, text: str) -> Body:
    """Return the body of a grammar in Lark's notation, or in GBNF's (`::=`)."""
    check_size(key, _bounded(key, text))
    if "::=" in text:
        _llguidance(key)
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # of a text that is none
            raise BadRequest(f"{key}: {brief(' '.join(str(error).split()), 200)}", key) from None
    check_grammar(key, _bounded(key, text))
    return Body(key, {"name": BODY, "lark_grammar": text})


def _inside(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that stand in a schema, each with its place."""
    for name in _INNER:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield from ((f"{name}.{brief(key, 40)}", value) for key, value in inner.items())
        elif isinstance(inner, list):
            yield from ((f"{name}[{index}]", value) for index, value in enumerate(inner))
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            yield name, schema[name]

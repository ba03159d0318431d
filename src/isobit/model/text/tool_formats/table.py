"""Formats by name, and which one a chat template writes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from isobit.data.turns import Call
from isobit.errors import IsobitError, did_you_mean
from isobit.model.text.chat import TookTooMuch
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import ToolFormat
from isobit.model.text.tool_formats.deepseek import DEEPSEEK_V3
from isobit.model.text.tool_formats.gemma import GEMMA4
from isobit.model.text.tool_formats.harmony import HARMONY
from isobit.model.text.tool_formats.mistral import MISTRAL
from isobit.model.text.tool_formats.pythonic import PYTHONIC
from isobit.model.text.tool_formats.tagged import (
    GLM45,
    HERMES,
    MINIMAX_M2,
    QWEN3_CODER,
)
from isobit.model.text.tool_formats.whole import JSON, LLAMA3_JSON

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "pythonic": PYTHONIC,
    "glm45": GLM45,
    "minimax_m2": MINIMAX_M2,
    "gemma4": GEMMA4,
    "deepseek_v3": DEEPSEEK_V3,
    "json": JSON,
}
_CALL = Call("qznamex", '{"qzkeyx": "qzvaluex"}')
_SHOWN = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call>call:", "gemma4"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<tool_call>", "hermes"),
    ('"parameters"', "llama3_json"),
)
"""What a template has in it, and the format that this shows."""


def format_of(name: str, template: str | None) -> ToolFormat:
    """Return the format of this name; `auto`: the template's, hermes where it shows none. Raises
    IsobitError."""
    if name in FORMATS:
        return FORMATS[name]
    if name != "auto":
        raise IsobitError(f"--tool-format {name}: {did_you_mean(name, ['auto', *FORMATS])}")
    text = template or ""
    return FORMATS[next((format_name for mark, format_name in _SHOWN if mark in text), "hermes")]


def format_by_template(name: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """Return a format as `format_of` does, but `auto` is the format that reads the call which the
    tokenizer's template writes. Where the template writes no calls, it is the one that its text
    shows; None: it writes calls that no format reads."""
    if name != "auto":
        return format_of(name, tokenizer.chat_template)
    written = _written(tokenizer)
    if written is None:
        return format_of(name, tokenizer.chat_template)
    for form in FORMATS.values():
        reply = form.of(written, tokenizer)
        if reply.calls == (_CALL,) and not reply.problems:
            return form
    return None


def _written(tokenizer: Tokenizer) -> "_Written | None":
    """Return an answer that calls a tool, as the template writes it; None where it writes no
    calls."""
    question = {"role": "user", "content": "qzaskedx"}
    for arguments in (json.loads(_CALL.arguments), _CALL.arguments):
        function = {"name": _CALL.name, "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            prompt = tokenizer.encode_chat([question])
            whole = tokenizer.encode_chat([question, answer], False)
        except TookTooMuch:
            raise
        except IsobitError:
            continue
        start = next(
            (i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b),
            min(len(prompt), len(whole)),
        )
        tokens = whole[start:]
        ends = [index for index, token in enumerate(tokens) if token in tokenizer.eos_ids]
        tokens = tokens[: ends[0]] if ends else tokens
        text = tokenizer.decode_completion(prompt, tokens)
        return _Written(whole[:start], tokens, text) if _CALL.name in text else None
    return None


@dataclass(frozen=True)
class _Written:
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str

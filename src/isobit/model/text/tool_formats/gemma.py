"""Gemma 4's calls: marks that open and close, texts between `<|"|>`.

    <|tool_call>call:rain{city:<|"|>Ulm<|"|>,days:[1,2]}<tool_call|>

All but texts is JSON except for its keys, which need no quotes; Python's `None` is null. Text behind
a call is content, where the template writes it.
"""

import json
import re
from collections.abc import Iterator

from isobit.data.turns import Call
from isobit.model.text.tool_formats.base import (
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    behind,
    calls_in,
    json_value,
    named_call,
)

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
_HEAD = re.compile(r"\s*call:([^\s{}\[\]\"]+?)\s*(\{.*)", re.DOTALL)
_KEY = re.compile(r"([{,])([^{}\[\],:\"]+):")
_NULL = re.compile(r"([:\[,]\s*)None(?=\s*[,\]}])")


def _gemma4(pieces: Pieces, tools: Tools) -> Reply | None:
    content, written, inside = list[str](), list[list[tuple[str, str]]](), False
    for mark, text in pieces:
        if mark == _OPEN:
            inside = True
            written.append([])
        inside = inside and mark != _CLOSE
        if inside:
            written[-1].append((mark, text))
        else:
            content.append(behind(text) if written else text)
    return calls_in("".join(content), written, _one) if written else None


def _one(pieces: Pieces) -> list[Call]:
    """Return the call of these pieces, from its opening mark on. Raises NoCall."""
    match = _HEAD.fullmatch("".join(_as_json(pieces)).strip())
    if match is None:
        raise NoCall("expected call:NAME{KEY:VALUE, ...}")
    return [named_call(match[1], json_value(match[2]))]


def _as_json(pieces: Pieces) -> Iterator[str]:
    """Yield a call's pieces with its texts and keys as JSON writes them. Raises NoCall."""
    if len(pieces) % 2 == 0:
        raise NoCall(f"a text in it does not end with {_QUOTE}")
    for index, (mark, text) in enumerate(pieces):
        if mark != (_QUOTE if index else _OPEN):
            raise NoCall(f"expected no {mark} in it")
        if index % 2:
            yield json.dumps(text)
        else:
            keyed = _KEY.sub(lambda match: f"{match[1]}{json.dumps(match[2].strip())}:", text)
            yield _NULL.sub(r"\1null", keyed)


GEMMA4 = ToolFormat(
    (_OPEN,), _gemma4, (_OPEN, _CLOSE, _QUOTE, _CHANNEL, _CHANNEL_END), closes=(_CLOSE,)
)

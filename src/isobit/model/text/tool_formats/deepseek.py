"""DeepSeek's calls, between marks that are single tokens: V3 and R1, and V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes the name in the place of `function`, and behind it the JSON alone.
"""

import re

from isobit.data.turns import Call
from isobit.errors import brief
from isobit.model.text.tool_formats.base import (
    Frame,
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

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(r"[^\s{}\[\]\"`]+")
_FENCE = "```"


def _deepseek(pieces: Pieces, tools: Tools) -> Reply | None:
    (_, text_before), *rest = pieces
    written, content = list[list[tuple[str, str]]](), [text_before]
    for mark, text in rest:
        if mark == _CALL:
            written.append([(mark, text)])
        elif written and mark in (_CALL_END, _CALLS_END):
            content.append(behind(text))
        elif written:
            written[-1].append((mark, text))
        elif mark == _CALLS:
            content.append(text.strip())
        else:
            return Reply(
                text_before, problems=(f"a tool call is invalid: {mark} without {_CALL} before it",)
            )
    if rest and not written:
        return Reply(
            text_before, problems=(f"a tool call is invalid: {_CALLS} without {_CALL} behind it",)
        )
    return calls_in("".join(content), written, _one) if written else None


def _one(pieces: Pieces) -> list[Call]:
    """Return the call that begins these pieces. Raises NoCall."""
    (_, head), *rest = pieces
    if not rest or rest[0][0] != _SEP:
        raise NoCall(f"expected {_SEP} behind what it is")
    if rest[1:]:
        raise NoCall(f"expected nothing behind it, got {brief(''.join(rest[1]).strip(), 60)!r}")
    name, body = head.strip(), rest[0][1].strip()
    name_line, fence, fenced = body.partition(f"\n{_FENCE}")
    if fence and fenced.endswith(_FENCE):
        name, body = name_line.strip(), fenced.removesuffix(_FENCE).removeprefix("json")
    if not _NAME.fullmatch(name):
        raise NoCall("expected the name of a tool, without spaces")
    return [named_call(name, json_value(body))]


DEEPSEEK_V3 = ToolFormat(
    (_CALLS, _CALL),
    _deepseek,
    (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END),
    frames=(
        Frame(
            f"{_CALL}function{_SEP}NAME\n{_FENCE}json\n",
            f"\n{_FENCE}{_CALL_END}",
            opens=_CALLS,
            closes=_CALLS_END,
            between="\n",
        ),
    ),
)

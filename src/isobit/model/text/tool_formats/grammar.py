"""The grammar of answers in a format, in llguidance's Lark, for answers that are held to one
(`serve/structured.py`): thoughts, then a body that the client asks for, or calls of tools.

A `Frame` says how a format writes calls; a format that has none forces none. A mark that is a special
token of the model is that token here, as it is where answers are read (`base.py`). Where arguments
are written one by one (XML), a text's own `enum` holds, and no other bound on texts: no mark would
end them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import Frame, ToolFormat, Tools, special_tokens
from isobit.model.text.tool_formats.schemas import properties_of
from isobit.model.text.tool_formats.thoughts import CLOSES, begun_by

BODY = "body"
"""The name of the grammar of what a client asks for, beside this one."""
_HEAD = '%llguidance {"no_forcing": true}'
_TEXT = r"TEXT: /(.|\n)*/"
_NAME = re.compile(r"[\w.-]{1,128}")
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,40}", "coerce_one_of": True}
"""White space in JSON has an end, which a model may not find; of several schemas any may hold."""


@dataclass(frozen=True)
class Asked:
    """The bounds of an answer. `body`: the client's own grammar, else any text. With `calls` it is
    a call of one of the `tools`, or of several, or else what `or_else` says: "", nothing; "body";
    or "text", behind which a call may stand. `strict`: the schemas of all tools hold, and not only of
    those that say so."""

    body: bool = False
    calls: bool = False
    or_else: str = ""
    tools: Tools = ()
    several: bool = True
    strict: bool = False


def grammar(
    asked: Asked, form: ToolFormat | None, tokenizer: Tokenizer, prompt: Sequence[int]
) -> str:
    """Return the grammar of an answer to a prompt; `form`: how the model writes messages, None:
    it continues a text. Raises IsobitError for calls that the format cannot force."""
    writer = _Writer(form, tokenizer)
    answer = writer.answer(asked)
    thoughts = "" if form is None else writer.thoughts(prompt)
    return "\n".join([_HEAD, f"start: {thoughts} ({answer})", *writer.rules, _TEXT])


class _Writer:
    """The writer of a grammar: `rules` are its further rules."""

    def __init__(self, form: ToolFormat | None, tokenizer: Tokenizer) -> None:
        self._form, self._tokenizer = form, tokenizer
        names = (*(() if form is None else form.marks), *CLOSES, *CLOSES.values())
        self._special = {name: token for token, name in special_tokens(names, tokenizer).items()}
        self.rules = list[str]()

    def answer(self, asked: Asked) -> str:
        """Return what an answer is behind its thoughts."""
        form = self._form
        channels = form is not None and form.channels
        content = f"{self._text(self._frame().content)} " if channels else ""
        body = f"{content}@{BODY}" if asked.body else f"{content}TEXT"
        if not asked.calls:
            return body
        calls = self._calls(asked, "text" in asked.or_else and not channels)
        return f"{calls} | {body}" if asked.or_else else calls

    def thoughts(self, prompt: Sequence[int]) -> str:
        """Return the thoughts in front of an answer, which the prompt may have begun."""
        if self._form is not None and self._form.channels:
            opens, ends = self._frame().thought
            return f"({self._until('thought', ends, self._text(opens))})*"
        begun = begun_by(prompt, self._tokenizer)
        known = [mark for mark in CLOSES if self._tokenizer.fast.token_to_id(mark) is not None]
        thoughts = [
            self._until(f"thought_{index}", CLOSES[mark], "" if begun else self._text(mark))
            for index, mark in enumerate([begun] if begun else known)
        ]
        some = rf"(({' | '.join(thoughts)}) /\n{{0,2}}/)"
        return f"{some}{'' if begun else '?'}" if thoughts else ""

    def _frame(self) -> Frame:
        """Return the first frame whose marks are tokens of this model, else the last one."""
        form = self._form
        if form is None or not form.frames:
            raise IsobitError("the format in which this model writes calls cannot be forced")

        def fits(frame: Frame) -> bool:
            return all(mark in self._special for mark in form.marks if mark in frame.text)

        return next(filter(fits, form.frames), form.frames[-1])

    def _calls(self, asked: Asked, behind_text: bool) -> str:
        """Return one call or several; text may stand in front of the first."""
        frame, first, later = self._frame(), list[str](), list[str]()
        for index, tool in enumerate(asked.tools):
            name = tool["function"].get("name")
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise IsobitError(
                    f"tools: expected names of 1 to 128 letters, digits, '_', '-' and '.', which "
                    f"calls that are held to a grammar need, got {name!r:.80}"
                )
            self._arguments(frame, index, tool, asked.strict or held(tool))
            rest = f"arguments_{index} {self._text(frame.tail)}"
            head, opening = (
                text.replace("NAME", name) for text in (frame.head, frame.opens + frame.head)
            )
            self.rules.append(f"call_{index}: {self._text(head)} {rest}")
            later.append(f"call_{index}")
            starts = self._behind_text(opening) if behind_text else [self._text(opening)]
            first += [f"{start} {rest}" for start in starts]
        self.rules += [f"first: {' | '.join(first)}", f"later: {' | '.join(later)}"]
        several = asked.several and frame.several
        more = f" ({self._text(frame.between)} later)*" if several else ""
        return f"first{more} {self._text(frame.closes)}"

    def _behind_text(self, opening: str) -> list[str]:
        """Return what opens a call, behind any text: from each mark on that opens calls. Raises
        IsobitError for a format in which text and calls begin alike."""
        marks = () if self._form is None else self._form.opens
        if any(len(mark) < 2 or mark not in opening for mark in marks):
            raise IsobitError(
                "strict: this model writes calls without a mark in front of them, so only a call "
                "that tool_choice asks for is held to its schema; leave strict out"
            )
        return [
            f"{self._until(f'opens_{number}', mark)} {self._text(opening.partition(mark)[2])}"
            for number, mark in enumerate(marks)
        ]

    def _arguments(self, frame: Frame, index: int, tool: Mapping[str, Any], strict: bool) -> None:
        """Add the rule of a call's arguments."""
        function = tool["function"]
        schema: Any = (function.get("parameters") or _EMPTY) if strict else {"type": "object"}
        if not isinstance(schema, Mapping):
            raise IsobitError(f"tools: the parameters of {function['name']}: expected an object")
        if frame.parameter is None:
            self.rules.append(f"arguments_{index}: {_json(schema)}")
            return
        opens, closes = frame.parameter
        opening, closing = map(self._text, opens.split("KEY"))
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        written = []
        if not isinstance(schema.get("properties"), Mapping):
            key = self._until(f"value_{index}", closes)
            written = [f'({opening} /[^<>"\\s]+/ {closing} {key})*']
        types = properties_of([tool], function["name"]) if not written else {}
        for number, (key, kind) in enumerate(types.items()):
            rule, value = f"value_{index}_{number}", schema["properties"][key]
            value = value if isinstance(value, Mapping) else {}
            if choices := sorted(kind.choices()):
                text = f"({' | '.join(map(json.dumps, choices))}) {self._text(closes)}"
            elif "string" in kind.types():
                text = self._until(rule, closes)
            else:
                shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                text = f"{_json({**shared, **value})} {self._text(closes)}"
            maybe = "" if key in required else "?"
            written.append(f"({self._text(opens.replace('KEY', key))} {text}){maybe}")
        self.rules.append(f"arguments_{index}: {' '.join(written)}")

    def _until(self, rule: str, mark: str, before: str = "") -> str:
        """Return text up to a mark, with the mark."""
        if any(mark.startswith(name) for name in self._special):
            return f"{before} TEXT {self._text(mark)}"
        lazy = f"{rule}[lazy]: TEXT {json.dumps(mark)}"
        if lazy not in self.rules:
            self.rules.append(lazy)
        return f"{before} {rule}"

    def _text(self, text: str) -> str:
        """Return text, in which the marks that are special tokens are these."""
        names = "|".join(map(re.escape, self._special))
        pieces = re.split(f"({names})", text) if names else [text]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece)
            for piece in pieces
            if piece
        )


def held(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool's calls are held to its schema in any case."""
    return tool["function"].get("strict") is True


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"

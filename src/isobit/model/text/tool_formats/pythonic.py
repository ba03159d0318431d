"""Calls as Python writes them, in a list: Llama 3.2's and 4's, LFM2's.

    [add(a=1, b="x"), end()]
    <|tool_call_start|>[add(a=1, b="x")]<|tool_call_end|>

They are read by the grammar below and never run: names, and keyword arguments that are text,
numbers, True, False, None, lists, tuples and dicts of these (JSON's words for them too). A list is
the whole answer, or stands between the marks, with text before them.

Some templates of LFM2.5 write texts as they are, with quotes, line breaks and backslashes in them.
So an argument whose first quote does not end it goes on, as it is written, to the first one behind
which another argument, another call or the end of the list stands.
"""

import ast
import re
from typing import Any

from isobit.data.foreign import MOST_DEPTH, MOST_DIGITS
from isobit.data.turns import Call
from isobit.errors import brief
from isobit.model.text.tool_formats.base import (
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    behind,
    calls_in,
    dumped,
)

_OPENS, _CLOSES = (
    ("<|tool_call_start|>", "<|python_start|>"),
    ("<|tool_call_end|>", "<|python_end|>"),
)
_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"""
    r"""|(?P<name>[^\W\d][\w.]*)|(?P<sign>[\[\](){},:=])|(?P<end>\Z))""",
    re.DOTALL,
)
_NEXT = r"(?:,\s*[^\W\d][\w.]*\s*=|,?\s*\)\s*(?:,\s*[^\W\d][\w.]*\s*\(|,?\s*\]))"
_QUOTE, _ENDS = re.compile(r"\s*([\"'])"), {q: re.compile(rf"{q}(?=\s*{_NEXT})") for q in "\"'"}
"""Where a text begins, and where one that is an argument ends, by its quotes."""
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def _pythonic(pieces: Pieces, tools: Tools) -> Reply | None:
    marks = [mark for mark, _ in pieces]
    if any(mark in _OPENS for mark in marks):
        written = [text for mark, text in pieces if mark in _OPENS]
        first = marks.index(next(mark for mark in marks if mark in _OPENS))
        later = "".join(behind(text) for mark, text in pieces[first:] if mark not in _OPENS)
        content = "".join(text for _, text in pieces[:first]) + later
        return calls_in(content, written, lambda text: _Reader(text).calls())
    text = "".join(text for _, text in pieces).strip()
    return calls_in("", [text], lambda text: _Reader(text).calls()) if _BEGINS.match(text) else None


class _Reader:
    """A single pass over a list of calls; each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text, self._place, self._depth = text, 0, 0
        self._kind, self._token = "", ""
        self._next()

    def calls(self) -> list[Call]:
        """Return the calls of the whole text. Raises NoCall."""
        self._take("[")
        calls = [self._call()]
        while self._token == ",":
            self._next()
            calls.append(self._call())
        self._take("]")
        if self._kind != "end":
            raise NoCall(f"text behind the list: {self._shown()}")
        return calls

    def _call(self) -> Call:
        name, arguments = self._name("the name of a tool"), dict[str, Any]()
        self._take("(")
        while self._token != ")":
            key = self._name("NAME=VALUE")
            self._take("=", argument=True)
            arguments[key] = self._value()
            if self._token != ")":
                self._take(",")
        self._take(")")
        return Call(name, dumped(arguments))

    def _name(self, wanted: str) -> str:
        if self._kind != "name":
            raise NoCall(f"expected {wanted}, got {self._shown()}")
        name = self._token
        self._next()
        return name

    def _value(self) -> Any:
        kind, token = self._kind, self._token
        if kind == "sign" and token in "[({":
            return self._nested({"[": "]", "(": ")", "{": "}"}[token])
        self._next()
        if kind == "as it is":
            return token
        if kind == "text":
            return _text(token)
        if kind == "number":
            return _number(token)
        if kind == "name" and token in _WORDS:
            return _WORDS[token]
        raise NoCall(f"expected a value, got {brief(token, 40)!r}")

    def _nested(self, close: str) -> Any:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise NoCall(f"nested in more than {MOST_DEPTH} levels")
        self._next()
        keys, values = list[str](), list[Any]()
        while self._token != close or self._kind != "sign":
            values.append(self._value())
            if close == "}":
                keys.append(str(values.pop()))
                self._take(":")
                values.append(self._value())
            if self._token != close:
                self._take(",")
        self._next()
        self._depth -= 1
        return dict(zip(keys, values)) if close == "}" else values

    def _take(self, sign: str, argument: bool = False) -> None:
        if self._kind != "sign" or self._token != sign:
            raise NoCall(f"expected {sign!r}, got {self._shown()}")
        self._next(argument)

    def _next(self, argument: bool = False) -> None:
        match = _TOKEN.match(self._text, self._place)
        quote = _QUOTE.match(self._text, self._place) if argument else None
        if quote is not None:
            ends = _ENDS[quote[1]]
            if match is None or ends.match(self._text, match.end() - 1) is None:
                end = ends.search(self._text, quote.end())
                if end is not None:
                    self._kind, self._token = "as it is", self._text[quote.end() : end.start()]
                    self._place = end.end()
                    return
        if match is None:
            raise NoCall(f"not Python: {brief(self._text[self._place :].strip(), 40)!r}")
        self._place, self._kind = match.end(), str(match.lastgroup)
        self._token = match[self._kind]

    def _shown(self) -> str:
        return "the end" if self._kind == "end" else repr(brief(self._token, 40))


def _text(token: str) -> str:
    try:
        text = str(ast.literal_eval(token))
        text.encode()
    except (SyntaxError, ValueError):
        raise NoCall(f"not a text: {brief(token, 40)}") from None
    return text


def _number(token: str) -> int | float:
    if len(token) > MOST_DIGITS:
        raise NoCall(f"a number of more than {MOST_DIGITS} digits")
    return int(token) if token.lstrip("+-").isdigit() else float(token)


PYTHONIC = ToolFormat((*_OPENS, "["), _pythonic, (*_OPENS, *_CLOSES), closes=_CLOSES)

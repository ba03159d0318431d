"""gpt-oss's harmony: messages in channels, each with a header in front of its text.

    <|channel|>analysis<|message|>It asks for rain.<|end|><|start|>assistant to=functions.rain
    <|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>

What the channel `final` says is content. A message to `functions.NAME`, which the header names
behind its role or its channel, is a call, and content if its text is no JSON object. All else, the
analysis first of all, is reasoning. Left out: the model's own tools (browser, python), which no
server here has: what is said to them is reasoning too.

Source: OpenAI, "OpenAI harmony response format" (2025).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isobit.data.foreign import BadJson, parse_json
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.streams import TextStream
from isobit.serve.tool_formats.base import (
    Call,
    Pieces,
    Reply,
    ToolFormat,
    dumped,
    special_tokens,
)

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_TO = re.compile(r"\bto=functions\.([^\s<]+)")
_NEXT = "\n"
"""Between two messages of the same kind, as vLLM joins them."""


@dataclass
class _Header:
    """What stands in front of a message's text: `said` as a whole, and the `channel`."""

    said: str = ""
    channel: str = ""

    def add(self, mark: str, text: str) -> None:
        """One more piece of it."""
        if mark == _CHANNEL:
            self.channel = (text.split() or [""])[0]
        self.said += f" {text}"

    @property
    def tool(self) -> str | None:
        """Whom a call is to."""
        found = _TO.search(self.said)
        return None if found is None else found[1]


def _messages(pieces: Pieces) -> Iterator[tuple[_Header, str]]:
    """Each message of an answer: its header and its text. What an answer that goes on inside a
    message begins with is of the channel final."""
    header, inside = _Header(), bool(pieces[0][1]) and not pieces[0][1].startswith(" to=")
    body = pieces[0][1] if inside else ""
    if inside:
        header.channel = "final"
    else:
        header.add("", pieces[0][1])
    for mark, text in pieces[1:]:
        if mark == _MESSAGE and not inside:
            inside, body = True, text
        elif mark in (_START, *_ENDS):
            if inside:
                yield header, body
            header, inside = _Header(text), False
        elif inside:  # no message has such a mark in it
            body += text
        else:
            header.add(mark, text)
    if inside:
        yield header, body


def _harmony(pieces: Pieces) -> Reply | None:
    content, reasoning, calls = list[str](), list[str](), list[Call]()
    for header, body in _messages(pieces):
        if header.tool is not None:
            given = _arguments(body)
            if given is None:
                content.append(body)
            else:
                calls.append(Call(header.tool, given))
        else:
            (content if header.channel == "final" else reasoning).append(body)
    return Reply(_NEXT.join(content), tuple(calls), _NEXT.join(reasoning))


def _arguments(text: str) -> str | None:
    try:
        given = parse_json(text)
    except BadJson:
        return None
    return dumped(given) if isinstance(given, dict) else None


class ChannelStream:
    """What of an answer in channels is certain with each token. Joined, the texts of a kind are a
    beginning of what `_harmony` reads. A call, and what follows it, is held back until the end; so
    is all of an answer with `stop` strings, which reach from one message into the next, and of a
    model whose marks are no special tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._marks = special_tokens(MARKS, tokenizer)
        self._closed = bool(stop) or len(self._marks) < len(MARKS)
        self._header, self._mark, self._run = _Header(), "", list[int]()
        self._text: TextStream | None = None  # of the message that is written
        self._begun = set[str]()

    @property
    def kind(self) -> str:
        """Of what is told."""
        return "content" if self._header.channel == "final" else "reasoning_content"

    def feed(self, token: int) -> str:
        """The text of `kind` that is certain with one more token."""
        mark = self._marks.get(token)
        if self._closed:
            return ""
        if mark is None:
            self._run.append(token)
            return "" if self._text is None else self._text.feed(token)
        text, before = self._tokenizer.decode(self._run), self._mark
        self._mark, self._run = mark, []
        if self._text is not None:
            rest, self._text = self._text.rest(text), None
            self._closed = mark not in (_START, *_ENDS)
            return rest
        if before in _ENDS:
            self._header = _Header()
        if before == _START:
            self._header = _Header(text)
        elif before or not text or text.startswith(" to="):
            self._header.add(before, text)
        else:
            self._closed = True  # it goes on inside a message
        return self._begin(token) if mark == _MESSAGE else ""

    def _begin(self, token: int) -> str:
        if self._closed or self._header.tool is not None:
            self._closed = True
            return ""
        self._text = TextStream(self._tokenizer, [token])
        told = _NEXT if self.kind in self._begun else ""
        self._begun.add(self.kind)
        return told


HARMONY = ToolFormat((), _harmony, MARKS, channels=True)

"""gpt-oss's harmony: messages in channels, each with a header in front of its text.

    <|channel|>analysis<|message|>It asks for rain.<|end|><|start|>assistant to=functions.rain
    <|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>

What the channel `final` says is content. A message to `functions.NAME`, which the header names
behind its role or its channel, is a call, and content if its text is not a JSON object. All else,
the analysis first of all, is reasoning. Left out: the model's own tools (browser, python), which
this server does not have: messages to them are reasoning too.

Source: OpenAI, "OpenAI harmony response format" (2025).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from isobit.data.turns import Call
from isobit.model.text.tool_formats.base import (
    Frame,
    NoCall,
    Pieces,
    Reply,
    ToolFormat,
    Tools,
    json_value,
    named_call,
    numbered,
)

START, _CHANNEL, MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (START, _CHANNEL, MESSAGE, _CONSTRAIN, *ENDS)
_TO = re.compile(r"\bto=functions\.([^\s<]+)")
NEXT = "\n"
"""Between two messages of the same kind, as vLLM joins them."""


@dataclass
class Header:
    """The header in front of a message's text: its whole text, and the `channel`."""

    said: str = ""
    channel: str = ""

    def add(self, mark: str, text: str) -> None:
        """Append a piece to the header; one behind the channel mark names the channel."""
        if mark == _CHANNEL:
            self.channel = (text.split() or [""])[0]
        self.said += f" {text}"

    @property
    def tool(self) -> str | None:
        """The name of the tool that the message calls; None for a message that calls none."""
        match = _TO.search(self.said)
        return None if match is None else match[1]


def _messages(pieces: Pieces) -> Iterator[tuple[Header, str]]:
    """Yield each message of an answer: its header and its text. What an answer that goes on inside
    a message begins with is of the channel final."""
    header, inside = Header(), bool(pieces[0][1]) and not pieces[0][1].startswith(" to=")
    body = pieces[0][1] if inside else ""
    if inside:
        header.channel = "final"
    else:
        header.add("", pieces[0][1])
    for mark, text in pieces[1:]:
        if mark == MESSAGE and not inside:
            inside, body = True, text
        elif mark in (START, *ENDS):
            if inside:
                yield header, body
            header, inside = Header(text), False
        elif inside:  # no message has such a mark in it
            body += text
        else:
            header.add(mark, text)
    if inside:
        yield header, body


def _harmony(pieces: Pieces, tools: Tools) -> Reply | None:
    content, reasoning = list[str](), list[str]()
    calls, problems = list[Call](), list[str]()
    for header, body in _messages(pieces):
        if header.tool is not None:
            try:
                calls.append(named_call(header.tool, json_value(body)))
            except NoCall as error:
                content.append(body)
                problems.append(numbered(len(calls) + len(problems) + 1, error))
        else:
            (content if header.channel == "final" else reasoning).append(body)
    joined = NEXT.join(content), tuple(calls), NEXT.join(reasoning)
    return Reply(*joined, tuple(problems))


_FRAME = Frame(
    f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{MESSAGE}",
    "",
    several=False,  # the mark behind a call ends the answer
    thought=(f"{_CHANNEL}analysis{MESSAGE}", f"{ENDS[0]}{START}assistant"),
    content=f"{_CHANNEL}final{MESSAGE}",
)
HARMONY = ToolFormat((), _harmony, MARKS, channels=True, frames=(_FRAME,))

"""Answers that are written in channels (`model/text/tool_formats/harmony.py`), as their tokens are
sampled: what of each message is certain.
"""

from collections.abc import Sequence

from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import special_tokens
from isobit.model.text.tool_formats.harmony import ENDS, MARKS, MESSAGE, NEXT, START, Header
from isobit.serve.streams import TextStream
from isobit.serve.thinking import CONTENT, REASONING, Certain


class ChannelStream:
    """The text of an answer in channels that is certain with each token. Joined, the texts of a
    kind are a beginning of what `_harmony` reads. A call, and what follows it, is held back until
    the end; so is all of an answer with `stop` strings, which reach from one message into the next,
    and of a model whose marks are not special tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._marks = special_tokens(MARKS, tokenizer)
        self._closed = bool(stop) or len(self._marks) < len(MARKS)
        self._header, self._mark, self._run = Header(), "", list[int]()
        self._text: TextStream | None = None  # of the message that is written
        self._begun = set[str]()

    @property
    def _kind(self) -> str:
        """The kind of the text that is emitted."""
        return CONTENT if self._header.channel == "final" else REASONING

    def feed(self, token: int) -> Certain:
        """Return the text that is certain with one more token."""
        text = self._feed(token)
        return [(self._kind, text)] if text else []

    def _feed(self, token: int) -> str:
        mark = self._marks.get(token)
        if self._closed:
            return ""
        if mark is None:
            self._run.append(token)
            return "" if self._text is None else self._text.feed(token)
        text, last_mark = self._tokenizer.decode(self._run), self._mark
        self._mark, self._run = mark, []
        if self._text is not None:
            rest, self._text = self._text.rest(text), None
            self._closed = mark not in (START, *ENDS)
            return rest
        if last_mark in ENDS:
            self._header = Header()
        if last_mark == START:
            self._header = Header(text)
        elif last_mark or not text or text.startswith(" to="):
            self._header.add(last_mark, text)
        else:
            self._closed = True  # it goes on inside a message
        return self._begin(token) if mark == MESSAGE else ""

    def _begin(self, token: int) -> str:
        if self._closed or self._header.tool is not None:
            self._closed = True
            return ""
        self._text = TextStream(self._tokenizer, [token])
        prefix = NEXT if self._kind in self._begun else ""
        self._begun.add(self._kind)
        return prefix

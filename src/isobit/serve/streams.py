"""The text of a request as its tokens are sampled.

What is told is never taken back: all pieces of a sample, joined, are the completion's text
(tests/serve/test_streams.py). So text is held back while the next token may change it: bytes of a
character that is not whole, and the beginning of a stop string.
Only the last few tokens are decoded for each new one, beside those before them.
"""

from collections.abc import Collection, Sequence

from isobit.errors import IsobitError
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve.words import LOST

_BEFORE = 4
"""Tokens in front of a piece that are decoded with it, at least: decoders treat the first token of
a text differently."""


class TextStream:
    """Pieces of the text of one sample, which ends with `stop` strings. `ends`: tokens that end it,
    and are no text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        special = [text for text in stop if tokenizer.spells_special(text)]
        visible = [self._visible(text) for text in special]
        tail = list(prompt[-1:])
        whole = not tail or not (
            tokenizer.is_byte(tail[0]) or tokenizer.decode(tail).endswith(LOST)
        )
        self._silent = any(text is None for text in visible) or not whole
        plain = [text for text in stop if text not in special]
        self._strings = [text for text in (*plain, *visible) if text]
        self._whole = plain
        self._ids = self._window(prompt)
        self._told = len(self._ids)  # tokens whose text is told or in `_pending`
        self._start = 0
        self._pending = ""
        self._length = 0
        self._closed = False

    def feed(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._ids.append(token)
        if self._closed or self._silent or token in self._ends or self._tokenizer.is_byte(token):
            return ""
        before = self._tokenizer.decode(self._ids[self._start : self._told])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith(LOST):
            return ""
        self._pending += text[len(before) :]
        if self._told - self._start >= _BEFORE:
            self._start = self._told
        self._told = len(self._ids)
        return self._tell()

    def rest(self, text: str) -> str:
        """What of the completion's whole `text` was not told yet."""
        return text[self._length :]

    def _tell(self) -> str:
        places = [place for place in map(self._pending.find, self._whole) if place >= 0]
        if places:
            self._closed = True
            certain = min(places)
        else:
            certain = len(self._pending) - max(
                (overlap(self._pending, s) for s in self._strings), default=0
            )
        told, self._pending = self._pending[:certain], self._pending[certain:]
        self._length += len(told)
        return told

    def _window(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt, as long as it takes to have some text."""
        count = _BEFORE
        while count < len(prompt) and not self._tokenizer.decode(prompt[-count:]).strip(f" {LOST}"):
            count *= 2
        return list(prompt[-count:])

    def _visible(self, stop: str) -> str | None:
        """What a stop string that spells a special token shows in front of it; None: it shows
        something behind it too, so that nothing is certain before the end."""
        try:
            ids = self._tokenizer.encode(stop, add_special=False)
        except IsobitError:  # the vocabulary cannot write it
            return None
        special = [self._tokenizer.is_special(token) for token in ids]
        first = special.index(True) if True in special else 0
        return stop[: _place(stop, self._tokenizer, ids[first])] if all(special[first:]) else None


def _place(text: str, tokenizer: Tokenizer, token: int) -> int:
    """Where a token's name stands in a text."""
    name = tokenizer.fast.id_to_token(token) or ""
    return max(text.find(name), 0)


def overlap(text: str, string: str) -> int:
    """The most characters at the end of a text that a string begins with."""
    for count in range(min(len(text), len(string)), 0, -1):
        if text.endswith(string[:count]):
            return count
    return 0

"""The text of a request as its tokens are sampled.

Text that was emitted is never taken back: all pieces of a sample, joined, are the completion's text
(tests/serve/test_streams.py). So text is held back while the next token may change it: bytes of a
character that is not whole, and the beginning of a stop string.
Only the last few tokens, and those before them, are decoded for each new one.
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
    without text."""

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
        """Return the text that is certain with one more token."""
        self._ids.append(token)
        if self._closed or self._silent or token in self._ends or self._tokenizer.is_byte(token):
            return ""
        emitted = self._tokenizer.decode(self._ids[self._start : self._told])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(emitted) or text.endswith(LOST):
            return ""
        self._pending += text[len(emitted) :]
        if self._told - self._start >= _BEFORE:
            self._start = self._told
        self._told = len(self._ids)
        return self._tell()

    def rest(self, text: str) -> str:
        """Return the part of the completion's whole `text` that was not emitted yet."""
        return text[self._length :]

    def _tell(self) -> str:
        starts = [start for start in map(self._pending.find, self._whole) if start >= 0]
        if starts:
            self._closed = True
            certain = min(starts)
        else:
            certain = len(self._pending) - max(
                (overlap(self._pending, s) for s in self._strings), default=0
            )
        emitted, self._pending = self._pending[:certain], self._pending[certain:]
        self._length += len(emitted)
        return emitted

    def _window(self, prompt: Sequence[int]) -> list[int]:
        """Return the end of the prompt, as long as it takes to have some text."""
        count = _BEFORE
        while count < len(prompt) and not self._tokenizer.decode(prompt[-count:]).strip(f" {LOST}"):
            count *= 2
        return list(prompt[-count:])

    def _visible(self, stop: str) -> str | None:
        """Return the text that a stop string which spells a special token shows in front of it;
        None: it shows something behind it too, so that nothing is certain before the end."""
        try:
            ids = self._tokenizer.encode(stop, add_special=False)
        except IsobitError:  # the vocabulary cannot write it
            return None
        special = [self._tokenizer.is_special(token) for token in ids]
        first = special.index(True) if True in special else 0
        return stop[: _place(stop, self._tokenizer, ids[first])] if all(special[first:]) else None


def _place(text: str, tokenizer: Tokenizer, token: int) -> int:
    """Return the position of a token's name in a text."""
    name = tokenizer.fast.id_to_token(token) or ""
    return max(text.find(name), 0)


def overlap(text: str, string: str) -> int:
    """Count the most characters at the end of a text that a string begins with."""
    for count in range(min(len(text), len(string)), 0, -1):
        if text.endswith(string[:count]):
            return count
    return 0

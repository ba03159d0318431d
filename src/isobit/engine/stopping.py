"""When a sequence ends: end-of-sequence tokens, stop strings, length.

A stop string ends a sequence at the first token after which the decoded text contains it. Decoding all of a sequence at
every token would cost quadratic time, so only a token whose own text could be the end of a stop string is looked at,
and of what comes before it only as much as a stop string could reach; the whole text is decoded where that says yes.
tests/engine/test_stopping.py compares with the quadratic definition.
"""

from collections.abc import Iterable

import numpy as np

from isobit.model.tokenizer import Tokenizer

_UNKNOWN, _NO, _MAYBE = -1, 0, 1
_UNSETTLED = 8
"""Tokens at the end of a text that a new one may change (bytes of a character), and characters at the beginning of a
part that may differ from those of the whole (the rest of a character, a space)."""
_LOST = "\ufffd"
"""What a decoder writes for bytes that are no character. Of tokens that are a byte each, such as <0xE2>, it does so for
all that are next to one another, however many, where one of them is wrong."""


class StopStrings:
    """Finds the first of some strings in the decoded text of token ids."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int) -> None:
        self.stop = stop
        self._tokenizer = tokenizer
        self._longest = max(map(len, stop))
        self._may_end = np.full(vocab_size, _UNKNOWN, np.int8)
        self._last = {text[-1] for text in stop}
        # decoders drop spaces at the start of a text, so a lone token's text does not show whether it brings one
        self._always = any(text[-1].isspace() for text in stop)
        self._lost = any(_LOST in text for text in stop)

    def may_end(self, token: int) -> bool:
        """Whether a token may complete a stop string."""
        if self._may_end[token] == _UNKNOWN:
            self._may_end[token] = self._state(token)
        return bool(self._may_end[token] == _MAYBE)

    def _state(self, token: int) -> int:
        text = self._tokenizer.decode([token])
        # part of a character, or a token without a text of its own: only its neighbours tell what it means
        incomplete = not text or _LOST in text or (self._lost and self._tokenizer.is_byte(token))
        return _MAYBE if self._always or incomplete or not self._last.isdisjoint(text) else _NO

    def found(self, prompt: list[int], completion: list[int]) -> bool:
        return not self._settled(completion) and self._holds(self._tokenizer.decode_completion(prompt, completion))

    def _settled(self, completion: list[int]) -> bool:
        """Whether the last tokens alone say that there is no stop string. They may begin inside a character, and so
        lose all bytes up to the next token that is none; then a few more are looked at."""
        least = 4 * (self._longest + _UNSETTLED)  # four tokens may be one character
        for count in range(least, least + 4):
            last = completion[-count:]
            if self._lost or len(last) == len(completion) or not self._reaches(last):
                return False
            text = self._tokenizer.decode(last)
            if not text.startswith(_LOST * (_UNSETTLED + 1)):
                return not self._holds(text)
        return False

    def _reaches(self, last: list[int]) -> bool:
        """Whether these tokens have all of a stop string that the very last of them completes."""
        return len(self._tokenizer.decode(last[:-_UNSETTLED])) >= self._longest + _UNSETTLED

    def _holds(self, text: str) -> bool:
        return any(stop in text for stop in self.stop)


def cut(text: str, stop: Iterable[str]) -> str:
    """The text up to the first occurrence of any of the stop strings."""
    found = [position for position in (text.find(string) for string in stop) if position >= 0]
    return text[: min(found)] if found else text

"""When a sequence ends: end-of-sequence tokens, stop strings, length.

A stop string ends a sequence at the first token after which the decoded text contains it. Decoding
all of a sequence at every token would cost quadratic time, so only a token whose own text could be
the end of a stop string is looked at, with only as much in front of it as a stop string could reach;
the whole text is decoded where that says yes. tests/engine/test_stopping.py compares
with the quadratic definition.

A completion's text has no special tokens. A stop string that spells one (`<|im_end|>`,
`Yes<|im_end|>`) is therefore looked for in the text with special tokens, and every other one in the
text without.
"""

import numpy as np

from isobit.model.text.tokenizer import Tokenizer

_UNKNOWN, _NO, _MAYBE = -1, 0, 1
_UNSETTLED = 8
"""Tokens at the end of a text that a new one may change (bytes of a character), and characters at
the beginning of a part that may differ from those of the whole (the rest of a character, a
space)."""
_LOST = "\ufffd"
"""What a decoder writes for bytes that are no character. Of tokens that are a byte each, such as
<0xE2>, it does so for all that are next to one another, however many, where one of them is
wrong."""


class StopStrings:
    """A finder of the first of several strings in the decoded text of token ids."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        spelling = tuple(text for text in stop if tokenizer.spells_special(text))
        plain = tuple(text for text in stop if text not in spelling)
        kinds = ((plain, False), (spelling, True))
        self._finders = [
            _Finder(texts, tokenizer, vocab_size, special) for texts, special in kinds if texts
        ]

    def may_end(self, token: int) -> bool:
        """Return whether a token may complete a stop string."""
        return any(finder.may_end(token) for finder in self._finders)

    def found(self, prompt: list[int], completion: list[int]) -> bool:
        """Return whether the text of a completion contains a stop string that its last token may
        have completed."""
        last = completion[-1]
        return any(
            finder.may_end(last) and finder.found(prompt, completion) for finder in self._finders
        )

    def cut(self, prompt: list[int], completion: list[int], text: str) -> str:
        """Return the `text` of a completion, which has no special tokens, up to the first
        occurrence of a stop string."""
        return min((finder.cut(prompt, completion, text) for finder in self._finders), key=len)


class _Finder:
    """Finds strings in the text without special tokens, or, where `special`, in the text with
    them."""

    def __init__(
        self, stop: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int, special: bool
    ) -> None:
        self.stop = stop
        self._tokenizer, self._special = tokenizer, special
        self._longest = max(map(len, stop))
        self._may_end = np.full(vocab_size, _UNKNOWN, np.int8)
        self._last = {text[-1] for text in stop}
        # decoders drop spaces at the start of a text, so a lone token's text does not show whether
        # it brings one
        self._always = any(text[-1].isspace() for text in stop)
        self._lost = any(_LOST in text for text in stop)

    def may_end(self, token: int) -> bool:
        """Return whether a token may complete a stop string."""
        if self._may_end[token] == _UNKNOWN:
            self._may_end[token] = self._state(token)
        return bool(self._may_end[token] == _MAYBE)

    def _state(self, token: int) -> int:
        text = self._decode([token])
        # part of a character, or a token without a text of its own: only its neighbours tell what
        # it means
        incomplete = not text or _LOST in text or (self._lost and self._tokenizer.is_byte(token))
        return _MAYBE if self._always or incomplete or not self._last.isdisjoint(text) else _NO

    def found(self, prompt: list[int], completion: list[int]) -> bool:
        return not self._settled(completion) and self._holds(self._whole(prompt, completion))

    def cut(self, prompt: list[int], completion: list[int], text: str) -> str:
        """Return the text up to the first stop string; where that is in the text with special
        tokens, the same tokens decoded without them."""
        if not self._special:
            return cut(text, self.stop)
        whole = self._whole(prompt, completion)
        length = len(cut(whole, self.stop))
        if length == len(whole):
            return text
        count, prefix = len(completion), whole
        while count and len(prefix) > length:
            count -= 1
            prefix = self._whole(prompt, completion[:count])
        begun = whole[len(prefix) : length]  # of a token in whose text the string begins
        if self._tokenizer.is_special(completion[count]):
            begun = ""
        return self._tokenizer.decode_completion(prompt, completion[:count]) + begun

    def _whole(self, prompt: list[int], completion: list[int]) -> str:
        return self._tokenizer.decode_completion(prompt, completion, special=self._special)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, special=self._special)

    def _settled(self, completion: list[int]) -> bool:
        """Return whether the last tokens alone show that the text has no stop string. They may
        begin inside a character, and so lose all bytes up to the next whole one; then a few more
        tokens are decoded."""
        least = 4 * (self._longest + _UNSETTLED)  # four tokens may be one character
        for count in range(least, least + 4):
            last = completion[-count:]
            if self._lost or len(last) == len(completion) or not self._reaches(last):
                return False
            text = self._decode(last)
            if not text.startswith(_LOST * (_UNSETTLED + 1)):
                return not self._holds(text)
        return False

    def _reaches(self, last: list[int]) -> bool:
        """Return whether these tokens reach far enough back to contain any stop string that the
        last one may complete."""
        return len(self._decode(last[:-_UNSETTLED])) >= self._longest + _UNSETTLED

    def _holds(self, text: str) -> bool:
        return any(stop in text for stop in self.stop)


def cut(text: str, stop: tuple[str, ...]) -> str:
    """Return the text up to the first occurrence of any of the stop strings."""
    positions = [position for position in (text.find(string) for string in stop) if position >= 0]
    return text[: min(positions)] if positions else text

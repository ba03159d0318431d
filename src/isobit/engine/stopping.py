"""When a sequence ends: end-of-sequence tokens, stop strings, length.

A stop string ends a sequence at the first token after which the decoded text contains it. Decoding all of a sequence at
every token would cost quadratic time, so that is done only after a token whose own text could be the end of a stop
string; tests/engine/test_stopping.py compares with the quadratic definition.
"""

from collections.abc import Iterable

import numpy as np

from isobit.model.tokenizer import Tokenizer

_UNKNOWN, _NO, _MAYBE = -1, 0, 1


class StopStrings:
    """Finds the first of some strings in the decoded text of token ids."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int) -> None:
        self.stop = stop
        self._tokenizer = tokenizer
        self._may_end = np.full(vocab_size, _UNKNOWN, np.int8)
        self._last = {text[-1] for text in stop}
        # decoders drop spaces at the start of a text, so a lone token's text does not show whether it brings one
        self._always = any(text[-1].isspace() for text in stop)

    def may_end(self, token: int) -> bool:
        """Whether a token may complete a stop string."""
        if self._may_end[token] == _UNKNOWN:
            self._may_end[token] = self._state(token)
        return bool(self._may_end[token] == _MAYBE)

    def _state(self, token: int) -> int:
        text = self._tokenizer.decode([token])
        # part of a character, or a token without a text of its own: only its neighbours tell what it means
        incomplete = not text or "\ufffd" in text
        return _MAYBE if self._always or incomplete or not self._last.isdisjoint(text) else _NO

    def found(self, prompt: list[int], completion: list[int]) -> bool:
        text = self._tokenizer.decode_completion(prompt, completion)
        return any(stop in text for stop in self.stop)


def cut(text: str, stop: Iterable[str]) -> str:
    """The text up to the first occurrence of any of the stop strings."""
    found = [position for position in (text.find(string) for string in stop) if position >= 0]
    return text[: min(found)] if found else text

"""What followed a few tokens before: an index over the texts of one prompt, and the token that it
would guess next.

A text is what was said of the prompt so far: the prompt itself, completions of its samples, those of
earlier epochs, and what tools answered. The longest of `ORDERS` last tokens that stood in one of
them before says what may follow, and how often it did (n-gram drafts: Saxena 2023, prompt lookup;
Oliaro et al. 2024, arXiv 2411.04975, suffix decoding).

Where several tokens followed, the guess is drawn from their counts with the random numbers that the
sampler will use: argmax_v n_v / E_v instead of p_v / E_v. Of two distributions that are close, an
exponential race with common numbers has the same winner nearly always (Daliri et al. 2024, arXiv
2408.07978, section 4), which the likeliest token would not be. It is a guess, whatever it is; what
is sampled, the model says (`speculation.py`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from isobit.kernels.sampling.definition import MASK, philox

ORDERS = (8, 4, 2)
"""Tokens that are looked up, the longest first."""
MOST_RACING = 4
"""Of the tokens that followed, the most frequent are drawn from."""
Key = tuple[int, int, int]
"""Of a sequence's random numbers: seed, prompt id, sample index."""


@dataclass(frozen=True)
class Guess:
    """A token, and the `kind` of what speaks for it: which order, how often, and whether
    unanimously. Guesses of one kind are right about equally often."""

    token: int
    kind: int


NUM_KINDS = len(ORDERS) * 4 * 2


class Continuations:
    """Counts of the tokens that followed each of `ORDERS` tokens in some texts."""

    def __init__(self) -> None:
        self._next: dict[bytes, int | dict[int, int]] = {}
        """By the bytes of the last tokens (int32): the token that followed once, or counts."""
        self.size = 0  # tokens that are counted

    def add(self, text: NDArray[np.int32], start: int) -> None:
        """Count the tokens of a text from `start` on."""
        data, tokens, table = text.tobytes(), text.tolist(), self._next
        for index in range(max(start, 1), len(tokens)):
            token, end = tokens[index], 4 * index
            for order in ORDERS:
                if order > index:
                    continue
                key = data[end - 4 * order : end]
                seen = table.get(key)
                if seen is None:
                    table[key] = token
                elif isinstance(seen, int):
                    table[key] = {seen: 2} if seen == token else {seen: 1, token: 1}
                else:
                    seen[token] = seen.get(token, 0) + 1
        self.size += max(0, len(tokens) - start)

    def guesses(
        self,
        text: NDArray[np.int32],
        key: Key,
        greedy: bool,
        position: int,
        worth: Callable[[int], bool],
    ) -> Iterator[Guess]:
        """Yield the tokens that would follow a text whose next token is at `position`, each guessed
        behind the tokens before it, as long as a guess of its kind is `worth` it."""
        tail = text[-max(ORDERS) :].tobytes()
        while True:
            entry = self._find(tail)
            if entry is None or not worth(entry[0]):
                return
            token = _chosen(entry[1], key, greedy, position)
            yield Guess(token, entry[0])
            tail = tail[-4 * (max(ORDERS) - 1) :] + token.to_bytes(4, "little")
            position += 1

    def _find(self, tail: bytes) -> tuple[int, int | dict[int, int]] | None:
        """Return (kind, the token or the counts of tokens that followed) for the longest known
        suffix of a text; None without a known one."""
        for number, order in enumerate(ORDERS):
            seen = self._next.get(tail[-4 * order :]) if len(tail) >= 4 * order else None
            if seen is None:
                continue
            if isinstance(seen, int):
                return 8 * number, seen
            often = min(sum(seen.values()), 4) - 1
            return 8 * number + 2 * often + (len(seen) > 1), seen
        return None


def _chosen(seen: int | dict[int, int], key: Key, greedy: bool, position: int) -> int:
    if isinstance(seen, int):
        return seen
    if len(seen) == 1:
        return next(iter(seen))
    if greedy:
        return max(seen, key=lambda token: seen[token])
    few = seen if len(seen) <= MOST_RACING else nlargest(MOST_RACING, seen, key=seen.__getitem__)
    return max(few, key=lambda token: seen[token] / exponential(key, position, token))


def exponential(key: Key, position: int, token: int) -> float:
    """Return the exponential variate of one token, as `kernels.sampling.definition.exponentials`
    draws it for all tokens."""
    seed, prompt, sample = key
    counter = token >> 2, position & MASK, sample & MASK, prompt & MASK
    words = philox(counter, (seed & MASK, (seed >> 32) & MASK))
    return -math.log((words[token & 3] + 0.5) * 2.0**-32)

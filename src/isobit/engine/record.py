"""What every open sequence has sampled: arrays that grow, with a slot for each sequence that is
reused when it ends."""

import numpy as np
from numpy.typing import NDArray

from isobit.engine.types import Top

Ints = NDArray[np.int64]


class Record:
    """Per slot: tokens [S, C] and log-probabilities [S, C], of which the first `generated` [S]
    count, and at most `limit` [S] will; whether an end-of-sequence token ends it, `ends` [S], and
    whether a stop string or another token may, `watched` [S]. `top`: by slot the likeliest tokens
    at each place, where they are asked for."""

    def __init__(self) -> None:
        self.tokens = np.empty((8, 64), np.int32)
        self.logprobs = np.empty((8, 64), np.float32)
        self.generated = np.zeros(8, np.int64)
        self.limit = np.zeros(8, np.int64)
        self.ends = np.zeros(8, np.bool_)
        self.watched = np.zeros(8, np.bool_)
        self.top: dict[int, list[Top]] = {}
        self._free = list(range(7, -1, -1))

    @property
    def num_slots(self) -> int:
        return self.generated.size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, limit: int, ends: bool, watched: bool) -> int:
        """Reserve and return a slot for a sequence that samples up to `limit` tokens."""
        if not self._free:
            size = self.num_slots
            for name in ("tokens", "logprobs", "generated", "limit", "ends", "watched"):
                setattr(self, name, _doubled(getattr(self, name), 0))
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self.generated[slot], self.limit[slot], self.ends[slot], self.watched[slot] = (
            0,
            limit,
            ends,
            watched,
        )
        return slot

    def give_back(self, slot: int) -> None:
        """Free the slot of a sequence that has ended."""
        self.top.pop(slot, None)
        self._free.append(slot)

    def write(self, slots: Ints, tokens: Ints, logprobs: NDArray[np.float32]) -> None:
        """Write the next token and log-probability of each of these sequences, which are distinct;
        `generated` counts them later."""
        column = self.generated[slots]
        if column.size and column.max() >= self.tokens.shape[1]:
            self.tokens, self.logprobs = _doubled(self.tokens, 1), _doubled(self.logprobs, 1)
        self.tokens[slots, column] = tokens
        self.logprobs[slots, column] = logprobs

    def write_top(self, slot: int, top: Top) -> None:
        """Write the likeliest tokens for the position at which a sequence's next token is drawn."""
        likeliest = self.top.setdefault(slot, [])
        likeliest[int(self.generated[slot]) :] = [top]


def _doubled(array: NDArray, axis: int) -> NDArray:
    return np.concatenate([array, np.empty_like(array)], axis)

"""What each sequence of a `generate` call has sampled, in arrays that grow with the longest sequence."""

import numpy as np
from numpy.typing import NDArray

RUNNING, STOP, LENGTH = 0, 1, 2
REASONS = {STOP: "stop", LENGTH: "length"}


class Record:
    """Tokens [N, C] and log-probabilities [N, C] of N sequences, and why each one ended [N]."""

    def __init__(self, num_sequences: int) -> None:
        self.tokens = np.empty((num_sequences, 64), np.int32)
        self.logprobs = np.empty((num_sequences, 64), np.float32)
        self.reason = np.zeros(num_sequences, np.int8)

    def write(
        self,
        sequences: NDArray[np.int64],
        column: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Each of `sequences`, which are distinct, has drawn a token as its `column`-th, counted from 0."""
        if column.size and column.max() >= self.tokens.shape[1]:
            self.tokens = _doubled(self.tokens)
            self.logprobs = _doubled(self.logprobs)
        self.tokens[sequences, column] = tokens
        self.logprobs[sequences, column] = logprobs


def _doubled(array: NDArray) -> NDArray:
    grown = np.empty((array.shape[0], 2 * array.shape[1]), array.dtype)
    grown[:, : array.shape[1]] = array
    return grown

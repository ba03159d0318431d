"""Sets of tokens, a bit each. NumPy is imported here, and not where the settings of a request are
declared, which the completion of a command line reads."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint8]
"""A set of tokens, a bit each, the lowest first: [B], a multiple of 4 bytes."""


def full(rows: int, vocabulary: int) -> Bits:
    """Return the bits [rows, B] of a vocabulary of which every token is allowed."""
    unpacked = np.zeros((rows, -(-vocabulary // 32) * 32), np.uint8)
    unpacked[:, :vocabulary] = 1
    return np.packbits(unpacked, axis=1, bitorder="little")


def bits_of(tokens: Sequence[int]) -> Bits:
    """Return the bits of these tokens, up to the byte of the largest."""
    ids = np.array(tokens, np.int64)
    bits = np.zeros(int(ids.max(initial=-1)) // 8 + 1, np.uint8)
    np.bitwise_or.at(bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
    return bits

"""Which experts served the tokens in the cache, for router replay.

Routes are stored like keys and values, one record a slot: shared, copied and recomputed with them.
"""

import numpy as np
from numpy.typing import NDArray


class RouteStore:
    """Routes [pages, page size, layers, k] of every slot of an engine's pages."""

    def __init__(self, num_pages: int, page_size: int, layers: int, per_token: int) -> None:
        self.pages = np.zeros((num_pages, page_size, layers, per_token), np.uint16)

    def write(self, slots: NDArray[np.int64], routes: NDArray[np.int64]) -> None:
        """Store the experts of a step's rows: row r is in `slots[r]` and took `routes[r]`."""
        size = self.pages.shape[1]
        self.pages[slots // size, slots % size] = routes

    def copy(self, source: list[int], target: list[int]) -> None:
        self.pages[target] = self.pages[source]

    def of(self, pages: list[int], count: int) -> NDArray[np.int32]:
        """Return the experts [count, layers, k] of the first `count` tokens of a sequence with
        these pages."""
        return self.pages[pages].reshape(-1, *self.pages.shape[2:])[:count].astype(np.int32)

"""The table of decoding sequences: one row each, in arrays that live as long as the engine.

A decode step over an unchanged batch costs a handful of vectorized operations here and no Python
object per sequence: positions and sampling keys grow by one in place, and the layout's tensors are
views of these arrays. A row that leaves is replaced by the last one; the order of the rows means
nothing, since no result depends on it.

Shapes: capacity rows, of which the first `count` are in use; width pages.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from isobit.engine.sampler import NEUTRAL, Kinds, kinds_of


class DecodeRows:
    """The table of decoding rows: each row's sequence by its slot, its next input token, its
    position and the `turn` of it, which images before it make smaller, its page table, and the key
    and the settings of its next sample."""

    def __init__(self, capacity: int, page_size: int) -> None:
        self.capacity = capacity
        self.page_size = page_size
        self.count = 0
        self.slot = np.zeros(capacity, np.int64)
        self.token = np.zeros(capacity, np.int64)
        self.position = np.zeros(capacity, np.int64)
        self.turn = np.zeros(capacity, np.int64)
        self.num_slots = np.zeros(capacity, np.int64)  # that the row's pages hold
        self.table = np.zeros((capacity, 1), np.int32)
        self.key = np.zeros(
            (capacity, 4), np.int64
        )  # seed, prompt id, sample index, position of the sampled token
        self.settings = np.tile(np.array(NEUTRAL), (capacity, 1))
        self._kinds: Kinds | None = None
        self.row_start = np.arange(capacity + 1, dtype=np.int64)

    @property
    def kinds(self) -> Kinds:
        """The kinds of draws that occur among the rows in use."""
        if self._kinds is None:
            self._kinds = kinds_of(self.settings[: self.count])
        return self._kinds

    def widen(self, width: int) -> None:
        """Make room for page tables of `width` pages."""
        missing = width - self.table.shape[1]
        if missing > 0:
            self.table = np.concatenate(
                [self.table, np.zeros((self.capacity, missing), np.int32)], 1
            )

    def add(
        self,
        slot: int,
        token: int,
        position: int,
        pages: list[int],
        key: tuple[int, int, int],
        settings: tuple[float, float, float, float],
        turn: int,
    ) -> None:
        """Append a row whose next input is `token` at `position`; `key` is (seed, prompt id, sample
        index)."""
        row = self.count
        assert row < self.capacity
        self.count += 1
        self.slot[row] = slot
        self.token[row] = token
        self.position[row] = position
        self.turn[row] = turn
        self.num_slots[row] = len(pages) * self.page_size
        self.table[row, : len(pages)] = pages
        self.key[row] = (*key, position + 1)
        self.settings[row] = settings
        self._kinds = None

    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = self.count - 1
        assert 0 <= row <= last
        if row != last:
            for array in self._arrays():
                array[row] = array[last]
        self.count = last
        self._kinds = None

    def put_first(self, chosen: NDArray[np.bool_]) -> None:
        """Change the rows' order so that those `chosen` [count] stand in front of the others."""
        if chosen[: chosen.sum()].all():
            return
        order = np.argsort(~chosen, kind="stable")
        for array in self._arrays():
            array[: self.count] = array[order]

    def with_drafts(self, count: int, drafts: Mapping[int, list[int]]) -> "DecodeRows":
        """Return a table of the first `count` rows, followed by one row for each token that is
        drafted for some of them: the row as it would be after that token was sampled."""
        of = np.repeat(
            np.array(list(drafts), np.int64),
            [len(tokens_of_row) for tokens_of_row in drafts.values()],
        )
        further = [np.arange(1, len(tokens) + 1) for tokens in drafts.values()]
        which = np.concatenate([np.arange(count), of])
        table = DecodeRows(which.size, self.page_size)
        table.count = which.size
        for name in ("slot", "position", "turn", "num_slots", "table", "key", "settings", "token"):
            setattr(table, name, getattr(self, name)[which])
        table.token[count:] = np.concatenate([*drafts.values()])
        table.position[count:] += np.concatenate(further)
        table.turn[count:] += np.concatenate(further)
        table.key[count:, 3] += np.concatenate(further)
        return table

    def _arrays(self) -> tuple[NDArray, ...]:
        return (
            self.slot,
            self.token,
            self.position,
            self.turn,
            self.num_slots,
            self.table,
            self.key,
            self.settings,
        )

    def add_page(self, row: int, page: int) -> None:
        self.table[row, self.num_slots[row] // self.page_size] = page
        self.num_slots[row] += self.page_size

    def row_of(self, slot: int) -> int:
        return int(np.flatnonzero(self.slot[: self.count] == slot)[0])

    def next_full(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of `rows` whose position after the next one has no slot yet."""
        return rows[self.position[rows] + 1 >= self.num_slots[rows]]

    def full(self) -> NDArray[np.int64]:
        """Return the rows whose next position has no slot yet."""
        return (self.position[: self.count] >= self.num_slots[: self.count]).nonzero()[0]

    def slots(self, count: int) -> NDArray[np.int64]:
        """Return the slots of the next keys and values of the first `count` rows."""
        return self.slots_at(self.row_start[:count], self.position[:count])

    def slots_at(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of `positions` of `rows`, one each."""
        page = self.table[rows, positions // self.page_size]
        return page * np.int64(self.page_size) + positions % self.page_size

    def advance(self, tokens: NDArray[np.int64]) -> None:
        """Set the next inputs of the first rows to `tokens` [R], one position further."""
        self.token[: tokens.size] = tokens
        self.position[: tokens.size] += 1
        self.turn[: tokens.size] += 1
        self.key[: tokens.size, 3] += 1

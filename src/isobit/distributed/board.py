"""What ranks tell each other beside their meetings: how far each is, which work is claimed, why one
ends.

On one machine it is `isobit.run.private.PrivateFolder`. Under torchrun it is torchrun's store,
where others can write too if they reach it: what is read there may be anything.
"""

from typing import Protocol

import torch.distributed as dist


class Board(Protocol):
    """Texts by key."""

    def set(self, key: str, text: str) -> None:
        """Whoever reads the key from now on finds this text."""

    def get(self, key: str) -> str | None:
        """None where nobody has set it."""

    def add(self, name: str) -> int:
        """How often this was called with a name before."""


class StoreBoard:
    """On a store of torch's."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, text: str) -> None:
        """As Board."""
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """As Board."""
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else None

    def add(self, name: str) -> int:
        """As Board."""
        return int(self._store.add(name, 1)) - 1

"""What ranks tell each other next to their meetings: how far each is, which work is claimed, why one
ends.

On one machine it is `isobit.run.private.PrivateFolder`. Under torchrun it is torchrun's store,
where others can write too if they reach it: what is read there may be anything.
"""

from typing import Protocol

import torch.distributed as dist


class Board(Protocol):
    """A table of texts by key, which all ranks of a run share."""

    def set(self, key: str, text: str) -> None:
        """Set the text that is found under a key from now on."""

    def get(self, key: str) -> str | None:
        """Return the text under a key, None where none was set."""

    def add(self, name: str) -> int:
        """Count a call with this name, and return how many came before."""


class StoreBoard:
    """A board on a store of torch's."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, text: str) -> None:
        """Set the text that is found under a key from now on."""
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """Return the text under a key, None where none was set."""
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else None

    def add(self, name: str) -> int:
        """Count a call with this name, and return how many came before."""
        return int(self._store.add(name, 1)) - 1

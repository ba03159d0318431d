"""A folder that no other user may enter, in which the ranks of one machine meet and leave the error
that ended them.

The process that starts them makes it (mode 0700) and names it in their environment. Keys are files,
written whole; counts are added up under a lock. Left out: the meaning of keys (`isobit.distributed`).
"""

import fcntl
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from isobit.errors import IsobitError

_VARIABLE = "ISOBIT_RANKS_FOLDER"
_COUNTED = 64
"""Names whose counts are kept: ranks are at one or two at a time."""


@dataclass(frozen=True)
class PrivateFolder:
    """A folder of texts by key, for processes of one user."""

    path: Path

    @staticmethod
    def given() -> "PrivateFolder | None":
        """Return this rank's folder; None where another launcher started the rank, or none."""
        path = os.environ.get(_VARIABLE)
        return PrivateFolder(Path(path)) if path else None

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variable that names this folder to a started process."""
        return {_VARIABLE: str(self.path)}

    def set(self, key: str, text: str) -> None:
        """Set a key's text, whole: a reader finds this text or the one before."""
        partial = self.path / f"{secrets.token_hex(8)}.partial"
        partial.write_text(text)
        os.replace(partial, self.path / key)

    def get(self, key: str) -> str | None:
        """Return the text of a key, or None for a key that is not set."""
        try:
            return (self.path / key).read_text()
        except FileNotFoundError:
            return None

    def add(self, name: str) -> int:
        """Count a call under a name and return how many came before it; only the last `_COUNTED`
        names are remembered."""
        with (self.path / "counts").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            counts: dict[str, int] = json.loads(file.read() or "{}")
            earlier = counts.pop(name, 0)
            counts[name] = earlier + 1
            file.truncate(0)
            file.write(json.dumps(dict(list(counts.items())[-_COUNTED:])))
        return earlier


@dataclass(frozen=True)
class LastWords:
    """The error that ended a rank: its text, its exit code, and whether another rank was the
    reason."""

    rank: int
    text: str
    code: int
    shared: bool
    of_another: bool
    at: float

    @property
    def told(self) -> bool:
        """Whether the error only repeats that of another rank."""
        return self.of_another and re.match(r"rank \d+: ", self.text) is not None


def say(folder: PrivateFolder, rank: int, error: IsobitError, of_another: bool) -> None:
    """Leave the error that ends a rank in the folder, for the launcher, which prints one line for
    all."""
    words = [str(error), error.exit_code, error.shared, of_another, time.monotonic()]
    folder.set(f"said-{rank}", json.dumps(words))


def said(folder: PrivateFolder, ranks: int) -> list[LastWords]:
    """Return the errors that the ranks have left, by rank."""
    texts = [(rank, folder.get(f"said-{rank}")) for rank in range(ranks)]
    return [LastWords(rank, *json.loads(text)) for rank, text in texts if text is not None]

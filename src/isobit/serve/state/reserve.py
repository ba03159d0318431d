"""Room on the disk that is held back, so that deleting rows works on a full disk too.

SQLite appends to its log before it deletes a row, which fails on a full disk. Then a file of zeros
is removed, and made again once there is room.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from isobit.errors import RunFailed

FILE, _MOST_BYTES, _PART = "reserve", 4 << 20, 32
"""The file's name; its bytes, at most, and one part of the disk in how many, at most."""
_Method = TypeVar("_Method", bound=Callable[..., None])


class Reserve:
    """A file in the folder of a state, whose only use is the room that it takes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.hold()

    def hold(self) -> None:
        """Make the file, unless it exists or the disk has no room for it."""
        with suppress(OSError):
            if self._path.exists():
                return
            size = min(shutil.disk_usage(self._path.parent).total // _PART, _MOST_BYTES)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            try:
                with open(os.open(self._path, flags, 0o600), "wb") as file:
                    file.write(bytes(size))
            except OSError:
                self._path.unlink(missing_ok=True)

    def release(self) -> bool:
        """Remove the file, whose room is then free; return False if the file does not exist."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


def making_room(method: _Method) -> _Method:
    """Wrap a method of a store that makes room on the disk: where it fails on a full disk outside a
    transaction, the room that is held back is released, and the method is called once more. Raises
    RunFailed where no room was held back."""

    @wraps(method)
    def surely(self: Any, *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except RunFailed:
            if self._connection.in_transaction or not self._reserve.release():
                raise
            method(self, *arguments)

    return cast(_Method, surely)

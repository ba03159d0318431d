"""Room on the disk that is held back, so that what makes room works on a full disk too.

SQLite appends to its log before it forgets a row, which a full disk refuses. A file of zeros is
removed then, and made again once there is room.
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
"""The file; its bytes, or so small a part of the disk."""
_Method = TypeVar("_Method", bound=Callable[..., None])


class Reserve:
    """A file in the folder of a state."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.hold()

    def hold(self) -> None:
        """Hold room back, unless it is, or there is none."""
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
        """Give the room up; False: there is none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


def making_room(method: _Method) -> _Method:
    """Of a method of a store that makes room: on a full disk it is done once more, in the room that
    was held back."""

    @wraps(method)
    def surely(self: Any, *given: Any) -> None:
        try:
            method(self, *given)
        except RunFailed:
            if self._connection.in_transaction or not self._reserve.release():
                raise
            method(self, *given)

    return cast(_Method, surely)

"""Where kernels keep on this machine what they have built and tested: folders that nobody else can
write to."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from isobit.errors import IsobitError
from isobit.run.surroundings import folder_of_user

_Faults = TypeVar("_Faults")


class CacheUnusable(Exception):
    """There is no such folder; the message says why, in one line."""


def cache_root() -> Path:
    """$ISOBIT_CACHE, or ~/.cache/isobit. Raises IsobitError where there is no home either."""
    return folder_of_user("ISOBIT_CACHE", ".cache", "isobit")


def cache_directory(name: str) -> Path:
    """The folder `name` in $ISOBIT_CACHE, or in ~/.cache/isobit; created for the user alone. Raises
    CacheUnusable."""
    try:
        path = cache_root() / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except IsobitError as error:
        raise CacheUnusable(str(error)) from error
    except OSError as error:
        raise CacheUnusable(f"cannot create the cache folder {path}: {error.strerror}") from error
    owner = getattr(os, "getuid", lambda: path.stat().st_uid)()
    if path.stat().st_uid != owner or path.stat().st_mode & 0o022:
        raise CacheUnusable(
            f"the cache folder {path} can be written by others; set ISOBIT_CACHE to a folder of "
            "your own"
        )
    return path


@contextmanager
def alone(lock: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, no other process is inside with the same file; `waits` is called where one is. Raises
    OSError where the file cannot be written."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unless_passed(mark: Path, test: Callable[[], _Faults], none: _Faults) -> _Faults:
    """What a test finds, falsy where it passes; `none` at once where the file `mark` says that it
    has passed."""
    if mark.exists():
        return none
    found = test()
    if not found:
        with suppress(OSError):  # tested again at the next start
            mark.touch()
    return found

"""The folders on this machine where kernels keep what they have built and tested, which other users
cannot write to."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from isobit.data.foreign import reason_of
from isobit.errors import IsobitError
from isobit.run.durable import make_directory
from isobit.run.own_folder import replaceable
from isobit.run.surroundings import folder_of_user, in_home, writable

_PLACE = ("ISOBIT_CACHE", ".cache", "isobit")
_Faults = TypeVar("_Faults")


class CacheUnusable(IsobitError):
    """A folder for what kernels keep cannot be used; the message says why, in one line."""


def cache_directory(name: str, file: str = "") -> Path:
    """Return the folder `name` in $ISOBIT_CACHE or ~/.cache/isobit, where it can be written or has
    `file` already, else in a folder of this user's under the temporary directory; made for the user
    alone. Raises CacheUnusable, also where others may replace the folder or what is in it."""
    variable, *inside = _PLACE
    home = in_home(*inside, name)
    try:
        path = folder_of_user(variable, *inside) / name
        if file and home and not os.environ.get(variable) and os.path.exists(home / file):
            path = home
        else:
            make_directory(path, 0o700)
        at, status = replaceable(path), path.stat()
    except IsobitError as error:
        raise CacheUnusable(str(error)) from error
    except OSError as error:
        raise CacheUnusable(
            f"cannot make the cache folder {path}: {reason_of(error)}; set {variable} to a folder "
            "of your own"
        ) from error
    if at is None and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return path
    how = "can be written by others" if at is None else f"can be replaced by others, at {at}"
    raise CacheUnusable(
        f"the cache folder {path} {how}; set {variable} to a folder of your own, in one that only "
        "you may write"
    )


def keep_kernels_of_triton() -> None:
    """Set a folder for the kernels that Triton compiles, where it would keep them in a home
    directory that cannot be written."""
    home = in_home(".triton")
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys() and not (
        home and writable(home)
    ):
        with suppress(CacheUnusable):
            os.environ["TRITON_CACHE_DIR"] = str(cache_directory("triton"))


@contextmanager
def alone(lock: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other processes out of the block that lock the same file; `waits` is called where
    another one is inside. Raises OSError where the file cannot be written."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unless_passed(mark: Path, test: Callable[[], _Faults], none: _Faults) -> _Faults:
    """Return what a test finds, falsy where it passes; `none` at once, without the test, where the
    file `mark` says that it has passed."""
    if mark.exists():
        return none
    failed = test()
    if not failed:
        with suppress(OSError):  # tested again at the next start
            mark.touch()
    return failed

"""What the environment of a process says: folders of the user's, in which isobit keeps what is no
run, and numbers. Left out: what is kept there, and who may write to it (`own_folder.py`)."""

import os
import tempfile
from pathlib import Path

from isobit.errors import IsobitError, brief


def folder_of_user(variable: str, *inside: str) -> Path:
    """Return $`variable`, or the folder `inside` the home directory, or where that can be neither
    found nor made, as in a container for a user that its system does not know, the same in a
    folder of this user's under the temporary directory. Raises IsobitError where nothing at all can
    be written."""
    if given := os.environ.get(variable):
        return Path(given)
    folder = in_home(*inside)
    return folder if folder is not None and writable(folder) else in_temporary(variable, *inside)


def in_home(*inside: str) -> Path | None:
    """Return a folder in the home directory; None where that is not known."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home.joinpath(*inside) if home.is_absolute() else None


def in_temporary(variable: str, *inside: str) -> Path:
    """Return a folder in that of this user's under the temporary directory. Raises IsobitError
    where there is none."""
    try:
        return Path(tempfile.gettempdir(), f"isobit-{os.getuid()}", *inside)
    except OSError:
        raise IsobitError(
            "neither the home directory nor a temporary one can be written: set HOME, TMPDIR, or "
            f"{variable} to a folder of your own"
        ) from None


def writable(folder: Path) -> bool:
    """Return whether this user may write to a folder, or make it where it is not there."""
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def number_in(variable: str) -> int:
    """The whole number in an environment variable; 0 where it is not set. Raises IsobitError for
    what is none."""
    given = os.environ.get(variable) or "0"
    if not given.isascii() or not given.isdecimal():
        raise IsobitError(
            f"{variable}={brief(given)!r} in the environment: expected a whole number"
        )
    return int(given)

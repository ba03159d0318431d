"""Settings from a process's environment: numbers, and the user's folders for files of isobit that
do not belong to a run. Left out: the contents of these folders, and which users may write to them
(`own_folder.py`)."""

import os
import tempfile
from pathlib import Path

from isobit.errors import IsobitError, brief


def folder_of_user(variable: str, *inside: str) -> Path:
    """Return the folder that the environment variable `variable` names; without it, the folder
    `inside` the home directory. If that can be neither written nor made, as in a container whose
    system does not know the user, return the folder `inside` this user's folder under the temporary
    directory. Raises IsobitError without a temporary directory either."""
    if path := os.environ.get(variable):
        return Path(path)
    folder = in_home(*inside)
    return folder if folder is not None and writable(folder) else in_temporary(variable, *inside)


def in_home(*inside: str) -> Path | None:
    """Return the folder `inside` the home directory; None if the home directory is not known."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home.joinpath(*inside) if home.is_absolute() else None


def in_temporary(variable: str, *inside: str) -> Path:
    """Return the folder `inside` this user's folder under the temporary directory. Raises
    IsobitError, which names `variable`, without a temporary directory."""
    try:
        return Path(tempfile.gettempdir(), f"isobit-{os.getuid()}", *inside)
    except OSError:
        raise IsobitError(
            "neither the home directory nor a temporary one can be written: set HOME, TMPDIR, or "
            f"{variable} to a folder of your own"
        ) from None


def writable(folder: Path) -> bool:
    """Return whether this user may write to a folder, or make it if it does not exist."""
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def number_in(variable: str) -> int:
    """Return the whole number in an environment variable; 0 if the variable is not set. Raises
    IsobitError for a value that is not a whole number."""
    digits = os.environ.get(variable) or "0"
    if not digits.isascii() or not digits.isdecimal():
        raise IsobitError(
            f"{variable}={brief(digits)!r} in the environment: expected a whole number"
        )
    return int(digits)

"""What the environment of a process says: folders of the user's, in which isobit keeps what is no
run, and numbers. Left out: what is kept there, and who may read it."""

import os
from pathlib import Path

from isobit.errors import IsobitError, brief


def folder_of_user(variable: str, *inside: str) -> Path:
    """$`variable`, or the folder `inside` the home directory. Raises IsobitError where neither is
    known, as in a container for a user that its system does not know."""
    if given := os.environ.get(variable):
        return Path(given)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():
        raise IsobitError(
            f"the home directory of user {os.getuid()} is not known: set HOME, or {variable} to a "
            "folder of your own"
        )
    return home.joinpath(*inside)


def number_in(variable: str) -> int:
    """The whole number in an environment variable; 0 where it is not set. Raises IsobitError for
    what is none."""
    given = os.environ.get(variable) or "0"
    if not given.isascii() or not given.isdecimal():
        raise IsobitError(
            f"{variable}={brief(given)!r} in the environment: expected a whole number"
        )
    return int(given)

"""The layout of a run's files: its number is kept in the run, and another one is refused.

Left out: translating a run of another layout, which the version that began it can read.
"""

from pathlib import Path

from isobit.data.foreign import exists, read_bytes, reason_of
from isobit.errors import IsobitError, brief

FORMAT, FORMAT_NOW = "format.txt", 2
"""The file, and the layout that this version writes and reads. 1 is that of 0.1, without a file."""


def check_format(run: Path) -> None:
    """Raise IsobitError unless the run has the layout that this version reads."""
    path = run / FORMAT
    if not exists(path):
        raise IsobitError(
            f"run {run} was begun by an isobit before 0.2 (it has no {FORMAT}), and this version "
            "cannot read it: use the isobit that began it, or begin a new run with its config.yaml"
        )
    try:
        version = read_bytes(path, 64).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None
    if version != str(FORMAT_NOW):
        raise IsobitError(
            f"run {run} has format {brief(version)}, and this isobit reads format {FORMAT_NOW}: "
            "use the version that began it"
        )

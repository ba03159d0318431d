"""Writes that are either done or undone after a power cut: they are flushed to the disk before
anything relies on them.

A file's bytes are on the disk after an fsync of the file, its name after an fsync of its directory.
Left out: the order of writes that keeps a run whole (`checkpoints.py`, `directory.py`).
"""

import errno
import os
import stat
from pathlib import Path

from isobit.errors import IsobitError, brief


def check_new_file(path: Path, option: str) -> None:
    """Raise IsobitError if no file can be written at a path, which an `option` names; called before
    the contents of the file are computed."""
    label = f"{option} {brief(path, 300)}"
    if path.is_dir():
        raise IsobitError(f"{label}: a directory; give the name of a file in it")
    if path.is_symlink() or _is_special(path):
        kind = "a link" if path.is_symlink() else "a device or a pipe"
        raise IsobitError(f"{label}: {kind}, which the file would replace; give another name")
    if not path.parent.is_dir():
        raise IsobitError(f"{label}: there is no directory {brief(path.parent, 300)}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise IsobitError(f"{label}: the directory {brief(path.parent, 300)} cannot be written to")


def _is_special(path: Path) -> bool:
    """Return whether the path is something else than a file, a directory or a link, such as a
    device, which a rename over it would remove."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def check_new_folder(path: Path, option: str) -> None:
    """Raise IsobitError unless a path, which an `option` names, is free: it does not exist, or is
    an empty directory, which is replaced."""
    label = f"{option} {brief(path, 300)}"
    if path.is_symlink():
        raise IsobitError(f"{label}: a link; give the directory itself")
    if path.exists() and not path.is_dir():
        kind = "a device" if _is_special(path) else "a file"
        raise IsobitError(f"{brief(path, 300)} is {kind}; choose another directory ({option})")
    if path.exists() and any(path.iterdir()):
        raise IsobitError(
            f"{brief(path, 300)} exists and is not empty; choose another directory ({option})"
        )
    if path.name in ("", ".."):
        raise IsobitError(f"{label}: give the directory by a name of its own")


def flush(path: Path) -> None:
    """Flush a file's bytes, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush all files in a folder, its subfolders and the folder to the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush(Path(parent, name))
        flush(Path(parent))


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents, unless they exist. Raises OSError, which names a file or
    link in their place."""
    if not path.is_dir():
        lost = path.is_symlink() and not path.exists()
        # asked again: another process may have made it meanwhile
        if lost or (path.exists() and not path.is_dir()):
            obstacle = f"a link to {os.readlink(path)}, which is not there" if lost else "a file"
            raise NotADirectoryError(errno.ENOTDIR, f"{brief(path, 300)} is {obstacle}")
        make_directory(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
        flush(path.parent)


def put_in_place(folder: Path, to: Path) -> None:
    """Rename a folder to `to`, which is empty or does not exist, after flushing the folder's
    contents to the disk."""
    flush_tree(folder)
    folder.rename(to)
    flush(to.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file so that at any moment the path has either the old file or the new one, whole; if
    the new file cannot be written, the old one stays. Raises OSError."""
    if _is_special(path):
        raise OSError(0, "not a regular file; expected no pipe, socket or device")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(
            missing_ok=True
        )  # of a write that was cut off; or a link to what is elsewhere
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    flush(path.parent)

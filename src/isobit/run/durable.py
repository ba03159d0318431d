"""Writes that a power cut leaves undone or done: flushed to the disk before anything counts on
them.

A file's bytes are on the disk after an fsync of the file, its name after one of the directory. Left
out: what order of writes makes a run whole (`checkpoints.py`, `directory.py`).
"""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have the disk take a file's bytes, or a directory's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Have the disk take everything in a folder, and the folder."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush(Path(parent, name))
        flush(Path(parent))


def make_directory(path: Path) -> None:
    """A directory and its parents, unless they are there."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)


def put_in_place(folder: Path, to: Path) -> None:
    """Rename a folder to `to`, which is empty or not there, when the disk has all that is in it."""
    flush_tree(folder)
    folder.rename(to)
    flush(to.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file so that there is the old one or the new one, whole, at any moment; where it
    cannot be written, the old one alone. Raises OSError."""
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

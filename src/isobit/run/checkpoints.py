"""Checkpoints that are either complete or absent: written under a temporary name, hashed, renamed into place.

A checkpoint is a directory with a manifest of its files' SHA-256. Loading takes the newest one whose files match; a
damaged one is reported and skipped. Left out: what is in a checkpoint (the caller writes it).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from isobit.errors import IsobitError, RunFailed

_MANIFEST = "manifest.json"
_PREFIX, _TEMPORARY = "step-", ".writing-"


def save(directory: Path, step: int, write: Callable[[Path], None], keep_last: int) -> Path:
    """Write the checkpoint of a step through `write(folder)`, atomically, and drop all but the newest `keep_last`.

    Raises RunFailed if the disk is full or the files cannot be written; earlier checkpoints stay as they are.
    """
    final = path_of(directory, step)
    replace(final, write)
    for old in all_checkpoints(directory)[:-keep_last]:
        shutil.rmtree(old)
    return final


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return directory / f"{_PREFIX}{step:06d}"


def replace(final: Path, write: Callable[[Path], None], keep: Path | None = None) -> None:
    """Write a directory through `write(folder)`, with a manifest, and put it in the place of `final`, whole or not at
    all; what was there is removed, or renamed to `keep`. Raises RunFailed as `save`."""
    temporary = final.parent / f"{_TEMPORARY}{final.name.removeprefix(_PREFIX)}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(temporary)): _digest(p) for p in files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in [*files, temporary / _MANIFEST, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            _flush(path)
        if final.exists() and keep is not None:
            final.rename(keep)
        elif final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(final.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):  # safetensors wraps the system's error
            reason = getattr(error, "strerror", None) or str(error)
            raise RunFailed(f"cannot save checkpoint {final}: {reason}; earlier checkpoints are intact") from None
        raise


def all_checkpoints(directory: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(p for p in directory.glob(f"{_PREFIX}*") if p.is_dir())


def newest(directory: Path, *, clean: bool = True) -> tuple[Path, list[str]]:
    """The newest checkpoint that is whole, and a line for every newer one that is damaged.

    Removes what an interrupted write left behind if it is to `clean`. Raises IsobitError if no checkpoint is whole.
    """
    if clean:
        remove_leftovers(directory)
    warnings: list[str] = []
    for path in reversed(all_checkpoints(directory)):
        problem = damage(path)
        if problem is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged ({problem}); taking the one before it")
    found = f"all {len(warnings)} are damaged: {warnings[0]}" if warnings else "there is none"
    raise IsobitError(f"{directory}: no checkpoint to take: {found}")


def remove_leftovers(directory: Path) -> None:
    """Remove what interrupted writes into a directory left behind."""
    for leftover in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        for name, digest in manifest.items():
            if _digest(path / name) != digest:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{_MANIFEST} cannot be read: {error}"
    return None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

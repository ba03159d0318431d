"""Checkpoints that are either complete or absent: written under a temporary name, hashed, renamed into place.

A checkpoint is a directory with a manifest of its files' SHA-256. Loading takes the newest one whose files match; a
damaged one is reported and skipped, and set aside by a run that goes on. A power cut between any two writes leaves the
checkpoint or its predecessor (tests/faults/test_faults.py). Left out: what is in a checkpoint (the caller writes it).
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from isobit.errors import IsobitError, RunFailed
from isobit.run import durable

_MANIFEST = "manifest.json"
_PREFIX, _WRITING, _REPLACED, _DAMAGED = "step-", ".writing-", ".replaced-", ".damaged-"
Problem = Callable[[Path], str | None]
"""What is wrong with a checkpoint, or None."""


def save(directory: Path, step: int, write: Callable[[Path], None], keep_last: int) -> Path:
    """Write the checkpoint of a step through `write(folder)`, atomically, and drop all but it and the newest
    `keep_last` - 1 others.

    Raises RunFailed if the disk is full or the files cannot be written; earlier checkpoints stay as they are.
    """
    final = path_of(directory, step)
    replace(final, write)
    others = [path for path in all_checkpoints(directory) if path != final]
    for old in others[: len(others) - keep_last + 1]:
        with suppress(OSError):  # that it stays harms nobody, and the next one tries again
            shutil.rmtree(old.rename(directory / f"{_WRITING}{old.name}"))
    return final


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return directory / f"{_PREFIX}{step:06d}"


def replace(final: Path, write: Callable[[Path], None], keep: Path | None = None) -> None:
    """Write a directory through `write(folder)`, with a manifest, and put it in the place of `final`, whole or not at
    all; what was there is removed, or renamed to `keep`. Raises RunFailed as `save`."""
    temporary = final.parent / f"{_WRITING}{final.name}"
    replaced = keep or final.parent / f"{_REPLACED}{final.name}"
    try:
        durable.make_directory(final.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(temporary)): _digest(p) for p in files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        durable.flush_tree(temporary)
        if final.exists():
            final.rename(replaced)  # `remove_leftovers` brings it back if this is all that is done
        temporary.rename(final)
        durable.flush(final.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        if isinstance(error, (OSError, SafetensorError)):  # safetensors wraps the system's error
            reason = getattr(error, "strerror", None) or str(error)
            raise RunFailed(f"cannot save checkpoint {final}: {reason}; earlier checkpoints are intact") from None
        raise
    if keep is None:
        shutil.rmtree(replaced, ignore_errors=True)


def all_checkpoints(directory: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = [p for p in directory.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdecimal() and p.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def newest(directory: Path, problem: Problem | None = None) -> tuple[Path, list[str]]:
    """The newest checkpoint that is whole, and of which `problem` has none to tell, and a line for every newer one.

    Changes nothing: the directory may be that of a run at work. Raises IsobitError if there is no such checkpoint.
    """
    warnings: list[str] = []
    for path in reversed(all_checkpoints(directory)):
        found = damage(path) or (problem(path) if problem is not None else None)
        if found is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged ({found}); taking the one before it")
    found = f"all {len(warnings)} are damaged: {warnings[0]}" if warnings else "there is none"
    raise IsobitError(f"{directory}: no checkpoint to take: {found}")


def go_on_from(path: Path) -> None:
    """For the run that goes on from a checkpoint: what interrupted writes left behind is removed, and newer
    checkpoints, being damaged, are set aside, where no count of the newest ones finds them."""
    remove_leftovers(path.parent)
    checkpoints = all_checkpoints(path.parent)
    for newer in checkpoints[checkpoints.index(path) + 1 :]:
        aside = path.parent / f"{_DAMAGED}{newer.name}"
        shutil.rmtree(aside, ignore_errors=True)
        newer.rename(aside)


def remove_leftovers(directory: Path) -> None:
    """Remove what interrupted writes into a directory left behind, and bring back what they would have replaced."""
    for leftover in directory.glob(f"{_WRITING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in directory.glob(f"{_REPLACED}*"):
        final = directory / leftover.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.rename(final)


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
    return None if manifest else f"{_MANIFEST} names no files"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

"""Checkpoints that are either complete or absent: written under a temporary name, hashed, renamed
into place.

A checkpoint is a directory with a manifest of its files' SHA-256. Loading takes the newest one
whose files match; a damaged one is reported and skipped, and set aside by a run that goes on. A
power cut between any two writes leaves the checkpoint or its predecessor
(tests/faults/test_faults.py). Several processes write one checkpoint together: the first of them
makes and renames the directory, and all share the hashing; what fails in one fails in all. Left
out: what is in a checkpoint (the caller writes it).
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from isobit.data.foreign import BadJson, check_readable, parse_json, read_bytes, reason_of
from isobit.errors import IsobitError, RunFailed, brief
from isobit.run import durable

_MANIFEST, _MOST_BYTES = "manifest.json", 1 << 24
_PREFIX, _WRITING, _REPLACED, _DAMAGED = "step-", ".writing-", ".replaced-", ".damaged-"
Problem = Callable[[Path], str | None]
"""What is wrong with a checkpoint, or None."""
T = TypeVar("T")


class Ranks(Protocol):
    """The processes that write and read a checkpoint together: `isobit.distributed.Ranks`, of which
    this room, which imports no torch, knows no more."""

    rank: int
    size: int

    def run_on_all(self, compute: Callable[[], T]) -> T: ...
    def on_first(self, compute: Callable[[], T]) -> T | None: ...
    def broadcast_result(self, compute: Callable[[], T]) -> T: ...
    def all_gather_json(self, value: Any) -> list[Any]: ...


class _One:
    rank, size = 0, 1

    def run_on_all(self, compute: Callable[[], T]) -> T:
        return compute()

    def on_first(self, compute: Callable[[], T]) -> T | None:
        return compute()

    def broadcast_result(self, compute: Callable[[], T]) -> T:
        return compute()

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value]


ONE = _One()


def save(
    directory: Path, step: int, write: Callable[[Path], None], keep_last: int, ranks: Ranks = ONE
) -> Path:
    """Write the checkpoint of a step through `write(folder)`, atomically, and drop all but it and
    the newest `keep_last` - 1 others.

    Raises RunFailed if the disk is full or the files cannot be written; earlier checkpoints stay as
    they are.
    """
    final = path_of(directory, step)
    replace(final, write, ranks=ranks)
    if ranks.rank == 0:
        earlier = [path for path in all_checkpoints(directory) if path != final]
        for old in earlier[
            : max(len(earlier) - keep_last + 1, 0)
        ]:  # a negative end would count from the newest
            with suppress(OSError):  # that it stays harms nobody, and the next one tries again
                shutil.rmtree(old.rename(directory / f"{_WRITING}{old.name}"))
    return final


def path_of(directory: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, which need not exist yet."""
    return directory / f"{_PREFIX}{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Return the number of steps that had been learned at a checkpoint."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def replace(
    final: Path, write: Callable[[Path], None], keep: Path | None = None, ranks: Ranks = ONE
) -> None:
    """Write a directory through `write(folder)`, with a manifest, and put it in the place of
    `final`, whole or not at all; what was there is removed, or renamed to `keep`. All ranks call
    this and `write`, which raises on all what it raises on one. Raises RunFailed as `save`."""
    temporary = final.parent / f"{_WRITING}{final.name}"
    replaced = keep or final.parent / f"{_REPLACED}{final.name}"
    try:
        ranks.on_first(lambda: _make_empty(temporary))
        write(temporary)
        sizes = ranks.broadcast_result(lambda: _sizes(temporary))
        mine = ranks.run_on_all(
            lambda: {name: file_digest(temporary / name) for name in _share(sizes, ranks)}
        )
        digests = {
            name: digest
            for of_rank in ranks.all_gather_json(mine)
            for name, digest in of_rank.items()
        }
        ranks.on_first(
            lambda: _put(temporary, {name: digests[name] for name in sizes}, final, replaced)
        )
    except Exception as error:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            if replaced.exists() and not final.exists():
                replaced.rename(final)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise RunFailed(
                f"cannot save checkpoint {final}: {reason}; earlier checkpoints are intact"
            ) from None
        raise
    if keep is None and ranks.rank == 0:
        shutil.rmtree(replaced, ignore_errors=True)


def _make_empty(temporary: Path) -> None:
    durable.make_directory(temporary.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _put(temporary: Path, manifest: Mapping[str, str], final: Path, replaced: Path) -> None:
    (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    durable.flush_tree(temporary)
    if final.exists():
        final.rename(replaced)  # `remove_leftovers` brings it back if this is all that is done
    temporary.rename(final)
    durable.flush(final.parent)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder in bytes, by their paths in it."""
    return {
        str(p.relative_to(folder)): p.stat().st_size
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def _share(sizes: Mapping[str, int], ranks: Ranks) -> list[str]:
    """Return the files that this rank reads, so that all ranks read about as many bytes."""
    loads, mine = [0] * ranks.size, []
    for name, size in sorted(sizes.items(), key=lambda file: -file[1]):
        rank = loads.index(min(loads))
        loads[rank] += size + 1
        mine += [name] if rank == ranks.rank else []
    return mine


def all_checkpoints(directory: Path) -> list[Path]:
    """Return the finished checkpoints in a directory, oldest first."""
    folders = [
        p
        for p in directory.glob(f"{_PREFIX}*")
        if p.name.removeprefix(_PREFIX).isdecimal() and p.is_dir()
    ]
    return sorted(folders, key=step_of)


def newest(
    directory: Path, problem: Problem | None = None, ranks: Ranks = ONE
) -> tuple[Path, list[str]]:
    """Return (the newest whole checkpoint for which `problem` returns None, a line for every newer
    one).

    All ranks call this; what `problem` returns on one rank counts on all. Changes nothing: the
    directory may be that of a run at work. Raises IsobitError if no checkpoint qualifies.
    """
    warnings: list[str] = []
    names = ranks.broadcast_result(lambda: [path.name for path in all_checkpoints(directory)])
    for path in (directory / name for name in reversed(names)):
        fault = damage(path, ranks) or (problem(path) if problem is not None else None)
        if fault is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged ({fault}); taking the one before it")
    reason = f"all {len(warnings)} are damaged: {warnings[0]}" if warnings else "there is none"
    raise IsobitError(f"{directory}: no checkpoint to take: {reason}")


def go_on_from(path: Path) -> None:
    """Prepare the directory of a run that goes on from a checkpoint: remove what interrupted writes
    left behind, and set newer checkpoints, which are damaged, aside, where no count of the newest
    finds them."""
    remove_leftovers(path.parent)
    checkpoints = all_checkpoints(path.parent)
    for newer in checkpoints[checkpoints.index(path) + 1 :]:
        aside = path.parent / f"{_DAMAGED}{newer.name}"
        shutil.rmtree(aside, ignore_errors=True)
        newer.rename(aside)


def remove_leftovers(directory: Path) -> None:
    """Remove what interrupted writes into a directory left behind, and bring back what they would
    have replaced."""
    for leftover in directory.glob(f"{_WRITING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in directory.glob(f"{_REPLACED}*"):
        final = directory / leftover.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.rename(final)


def damage(path: Path, ranks: Ranks = ONE) -> str | None:
    """Return what is wrong with a checkpoint's files, or None; the ranks share the files."""
    manifest, sizes, fault = ranks.broadcast_result(lambda: _manifest(path))
    mine = {name: _mismatch(path / name, manifest[name]) for name in _share(sizes, ranks)}
    problems = {
        name: problem
        for of_rank in ranks.all_gather_json(mine)
        for name, problem in of_rank.items()
    }
    return fault or next((problems[name] for name in manifest if problems[name] is not None), None)


def _manifest(path: Path) -> tuple[dict[str, str], dict[str, int], str | None]:
    """Return (a checkpoint's manifest, the sizes of its files with 0 for missing ones, what is
    wrong with the manifest or None)."""
    try:
        manifest = parse_json(read_bytes(path / _MANIFEST, _MOST_BYTES).decode("utf-8"))
        if not isinstance(manifest, dict) or not all(
            isinstance(digest, str) for digest in manifest.values()
        ):
            return {}, {}, f"{_MANIFEST} cannot be read: it is no list of files and their SHA-256"
        if foreign := [name for name in manifest if not _inside(name)]:
            return (
                {},
                {},
                f"{_MANIFEST} names {brief(foreign[0])!r}, which is no file of a checkpoint",
            )
        sizes = {
            name: (path / name).stat().st_size if (path / name).is_file() else 0
            for name in manifest
        }
    except FileNotFoundError:
        return {}, {}, f"{_MANIFEST} is missing"
    except (OSError, UnicodeDecodeError, BadJson) as error:
        return {}, {}, f"{_MANIFEST} cannot be read: {reason_of(error)}"
    return manifest, sizes, None if manifest else f"{_MANIFEST} names no files"


def _inside(name: str) -> bool:
    """Return whether a name is the path of a file in a checkpoint, at most one folder deep."""
    return re.fullmatch(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]{0,200}", name) is not None


def _mismatch(path: Path, digest: str) -> str | None:
    try:
        check_readable(path)
        return None if file_digest(path) == digest else f"{path.name} does not match its checksum"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {reason_of(error)}"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

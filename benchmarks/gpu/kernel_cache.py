"""Compiled kernels, carried from one machine to the next: a machine that is lent begins with
nothing, and compiling takes a minute of it.

Triton keeps what it has compiled in a folder, under keys of its own: the kernel's source, its
version, options, the architecture. Here the files that a launch needs are packed, machine code and
what describes it, and unpacked where the folder has none of them. A mark in the folder says that
all kernels of some code are there (`compiling.py`). Left out: which kernels those are.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

ARCHIVE = "kernels.tar.xz"
_NEEDED = {".cubin", ".json", ".so"}
"""Of a kernel's files; the others are what it was compiled through."""
_MOST = 16 << 20
"""Bytes of an archive: what may come back of a lent machine as one file."""


def folder() -> Path:
    """Where Triton keeps its kernels in this process."""
    return Path(os.environ["TRITON_CACHE_DIR"])


def mark(code: str) -> Path:
    """The file that says: all kernels of this code are compiled."""
    return folder() / f"isobit-{code}.compiled"


def pack(into: Path) -> str:
    """Write the folder's kernels to an archive, whole or not at all; what was packed, in words."""
    files = list(_needed(folder()))
    if not files:
        return "no kernels to carry"
    into.parent.mkdir(parents=True, exist_ok=True)
    made = into.with_suffix(".part")
    with tarfile.open(made, "w:xz", preset=0) as archive:
        for path in files:
            archive.add(path, str(path.relative_to(folder())), recursive=False)
    size = made.stat().st_size
    if size > _MOST:
        made.unlink()
        return f"{len(files)} files of kernels are {size >> 20} MiB packed: not carried"
    made.replace(into)
    return f"{len(files)} files of kernels, {size / 2**20:.1f} MiB packed, in {into}"


def unpack(archive: Path) -> str:
    """Add an archive's kernels to the folder, those that are there left as they are."""
    if not archive.is_file():
        return "no kernels were carried here"
    place, added = folder(), 0
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            if member.isfile() and not (place / member.name).exists():
                packed.extract(member, place, filter="data")
                added += 1
    for group in place.glob("*/__grp__*.json"):
        _point_here(group)
    return f"{added} files of kernels from {archive}"


def _point_here(group: Path) -> None:
    """A group names its files by their paths, which were another folder's."""
    found = json.loads(group.read_text())
    paths = {name: str(group.parent / name) for name in found["child_paths"]}
    if paths != found["child_paths"]:
        group.write_text(json.dumps({"child_paths": paths}))


def _needed(place: Path) -> Iterator[Path]:
    for path in sorted(place.rglob("*")):
        if path.is_file() and (path.suffix in _NEEDED or path.suffix == ".compiled"):
            yield path

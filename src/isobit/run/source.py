"""A name for the source of isobit that a process runs with: two of the same name compute the same,
on the same machine.

Left out: the libraries beneath, whose versions are recorded by name (`isobit.kernels.versions`).
"""

import hashlib
from functools import cache
from pathlib import Path

import isobit

_SUFFIXES = {".py", ".cpp", ".h"}


@cache
def source_digest(root: Path = Path(isobit.__file__).parent) -> str:
    """SHA-256 over every file in Python and C++, by its path and its bytes."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file():
            data = path.read_bytes()
            found.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return found.hexdigest()

"""What a disk may hold after a power cut, of the changes that a process made (`shim.c` records
them).

A name is on the disk once its directory was flushed, bytes once their file was; of what came after,
any part may be (ALICE, Pillai et al., OSDI 2014, without order among unflushed changes). A rename
is one change: both names or none. Left out: a disk that lies about a flush, and sectors that are
torn.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

Keep = Callable[["Change"], bool]


@dataclass(frozen=True)
class Change:
    """One change: `kind` as in shim.c; `of` the file or directory whose flush makes it last; `node`
    what is named, `names` under which name, and before it; `place` and `data` of bytes, or the size
    of what is cut."""

    kind: str
    of: int
    node: int = 0
    names: tuple[tuple[int, str], ...] = ()
    place: int = 0
    data: bytes = b""


@dataclass
class Disk:
    """Files and directories by number; 0 is the root."""

    files: dict[int, bytearray] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})

    def apply(self, change: Change) -> None:
        """Make a change; what an earlier change that was lost would have made is left out."""
        if change.kind in "CM":
            if change.kind == "C":
                self.files.setdefault(change.node, bytearray())
            else:
                self.folders.setdefault(change.node, {})
            self._link(change.names[0], change.node)
        elif change.kind == "R":
            folder, name = change.names[1]
            self.folders.get(folder, {}).pop(name, None)
            self._link(change.names[0], change.node)
        elif change.kind in "UD":
            folder, name = change.names[0]
            self.folders.get(folder, {}).pop(name, None)
        elif change.kind == "W":
            data = self.files.setdefault(change.node, bytearray())
            data.extend(bytes(max(0, change.place - len(data))))
            data[change.place : change.place + len(change.data)] = change.data
        elif change.kind == "T":
            data = self.files.setdefault(change.node, bytearray())
            data[:] = data[: change.place].ljust(change.place, b"\0")

    def _link(self, name: tuple[int, str], node: int) -> None:
        if name[0] in self.folders:
            self.folders[name[0]][name[1]] = node

    def contents(self, number: int = 0, folder: str = "") -> Iterator[tuple[str, bytes]]:
        """(path, bytes) of every file, and (path with a slash at its end, nothing) of every
        directory."""
        for name, node in sorted(self.folders[number].items()):
            if node in self.folders:
                yield f"{folder}{name}/", b""
                yield from self.contents(node, f"{folder}{name}/")
            else:
                yield f"{folder}{name}", bytes(self.files.get(node, b""))

    def write(self, folder: Path, number: int = 0) -> None:
        """Put it into an empty folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, node in self.folders[number].items():
            if node in self.folders:
                self.write(folder / name, node)
            else:
                (folder / name).write_bytes(self.files.get(node, b""))


def read_log(log: Path, root: Path) -> list[Change]:
    """The changes in their order, by numbers in the place of paths."""
    found, disk, numbers = list[Change](), Disk(), iter(range(1, 1 << 30))
    for kind, words, data in _records(log.read_bytes()):
        paths = [os.path.relpath(word, root) for word in words[: 2 if kind == "R" else 1]]
        if kind in "MD" and paths == ["."]:
            continue
        folder, name = _place(disk, paths[-1])
        node = disk.folders[folder].get(name, 0) if name else 0
        if kind in "CM":
            change = Change(kind, folder, next(numbers), ((folder, name),))
        elif kind == "R":
            before = _place(disk, paths[0])
            change = Change(
                kind, folder, disk.folders[before[0]][before[1]], ((folder, name), before)
            )
        elif kind in "UD":
            change = Change(kind, folder, node, ((folder, name),))
        else:
            change = Change(
                kind, node, node, place=int(words[1]) if len(words) > 1 else 0, data=data
            )
        disk.apply(change)
        found.append(change)
    return found


def _records(text: bytes) -> Iterator[tuple[str, list[str], bytes]]:
    start = 0
    while start < len(text):
        end = text.index(b"\n", start)
        kind, *words = text[start:end].decode().split("\t")
        start = end + 1
        length = int(words[2]) if kind == "W" else 0
        yield kind, words, text[start : start + length]
        start += length


def _place(disk: Disk, path: str) -> tuple[int, str]:
    """(number of its directory, its name); the root is (0, "")."""
    folder, parts = 0, [] if path == "." else path.split("/")
    for part in parts[:-1]:
        folder = disk.folders[folder][part]
    return folder, parts[-1] if parts else ""


def lasting(changes: Sequence[Change]) -> list[bool]:
    """Which changes a flush has made last by the end."""
    flushed, found = set[int](), list[bool]()
    for change in reversed(changes):
        if change.kind == "S":
            flushed.add(change.of)
        found.append(change.of in flushed)
    return found[::-1]


def after_a_cut(changes: Sequence[Change], keep: Keep) -> Disk:
    """What is there if the power goes after these changes: what lasts, and what `keep` says of the
    rest. Of a file's bytes a lost change loses those after it too."""
    disk, cut = Disk(), set[int]()
    for change, safe in zip(changes, lasting(changes)):
        if change.kind in "WT" and change.of in cut and not safe:
            continue
        if safe or keep(change):
            disk.apply(change)
        elif change.kind in "WT":
            cut.add(change.of)
    return disk


def kinds_of_loss(seed: int) -> list[tuple[str, Keep]]:
    """Everything unflushed is lost; the names are there and the bytes are not, as ext4 has it; the
    other way round; and half of it by lot."""
    lot = Random(seed)
    return [
        ("all that was not flushed", lambda change: False),
        ("bytes", lambda change: change.kind not in "WT"),
        ("names", lambda change: change.kind in "WT"),
        ("half, by lot", lambda change: lot.random() < 0.5),
    ]

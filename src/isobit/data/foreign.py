"""Files from elsewhere, read within limits: a file that cannot be read gives an error of one line,
and nothing waits or grows without end.

A file must be a regular file (links are followed): a pipe or a device could block. For a link whose
target is gone, and for a pointer that Git LFS or git-annex leave in the place of a file, the error
says so. A key may come only once in an object of JSON, since otherwise the last value would be
taken silently. JSON has at most `MOST_DEPTH` levels and `MOST_DIGITS` digits in a whole number, so
that code that walks or prints the values later cannot fail on them; NaN and infinity are read, and
refused where a number is used, or at once where the caller asks for that. Left out: the longest
length of a file, which the caller gives.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError, brief

MOST_DEPTH = 100
MOST_DIGITS = 300  # the largest such number is still a float
MOST_RATIO = 400  # text is packed 3 to 20 times smaller, zeros 1,000 times
_LEAST_UNPACKED = 1 << 26
_POINTERS = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself; `git lfs pull` "
    "brings it",
    b"/annex/objects/": "a pointer of git-annex, not the file itself; `git annex get` brings it",
}
_LONGEST_POINTER = 1024  # bytes; by the specification of Git LFS
MOST_CONTAINERS = 1 << 17
"""The most lists and objects of a text that is read with `patient`."""
_PLAIN = 1 << 14  # values that the library reads at once
_LONG_NUMBER = re.compile(rf"(?<!\d)\d{{{MOST_DIGITS + 1}}}")  # looks once at each number
_RAISED = re.compile(r"\d[eE]\+?\d")  # shorter numbers without such a part are finite
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class BadJson(Exception):
    """An error for text that is not JSON within the limits: the reason, and the line and column if
    they are known."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line, self.column = reason, line, column


def exists(path: Path) -> bool:
    """Return whether a file or folder exists at the path. Raises IsobitError if that cannot be
    known, as in a folder that may not be searched, and for a link whose target is gone: the file
    that should exist does not."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        for ancestor in (path, *path.parents):
            if ancestor.is_symlink() and not ancestor.exists():
                target = brief(os.readlink(ancestor), 300)
                blob = "; copy a snapshot of the Hub's cache with its links followed (cp -rL)" * (
                    "blobs/" in target
                )
                raise IsobitError(
                    f"{brief(ancestor, 300)}: a link to {target}, which is not there{blob}"
                ) from None
        return False
    except (OSError, ValueError) as error:
        raise IsobitError(f"{brief(path, 300)}: cannot be read: {reason_of(error)}") from None
    return True


def check_readable(path: Path) -> int:
    """Return the size in bytes of a regular file that may be read. Raises OSError for another file;
    its `strerror` says why."""
    try:
        status = path.stat()
    except ValueError:  # a null character in the name
        raise OSError(0, "not a file name") from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(21, "Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "not a regular file; expected no pipe, socket or device")
    with path.open("rb") as file:
        if status.st_size <= _LONGEST_POINTER:
            begins = file.read(max(map(len, _POINTERS)))
            for mark, problem in _POINTERS.items():
                if begins.startswith(mark):
                    raise OSError(0, problem)
        return status.st_size


def read_bytes(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes. Raises OSError if it cannot be
    read; its `strerror` says why."""
    check_readable(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(0, f"longer than {most:,} bytes")
    return data


def most_unpacked(size: int) -> int:
    """Return the most bytes that a packed file of `size` bytes may unpack to."""
    return max(_LEAST_UNPACKED, size * MOST_RATIO)


def reason_of(error: Exception) -> str:
    """Return in words why a file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)


class _Patient(json.JSONDecoder):
    """A decoder that reads lists and objects in Python, so that other threads run meanwhile, and
    strings as the library does. Raises BadJson for more than MOST_CONTAINERS lists and objects."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._left = MOST_CONTAINERS
        self.parse_array: Any = self._counted(self.parse_array)
        self.parse_object: Any = self._counted(self.parse_object)
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise BadJson(f"more than {MOST_CONTAINERS:,} lists and objects")
            return parse(*arguments)

        return counted


def parse_json(text: str, patient: bool = False, finite: bool = False) -> Any:
    """Return the value of a JSON text. `patient`: other threads may run meanwhile if the text has
    many values; `finite`: NaN and infinite numbers, such as 1e999, are refused. Raises BadJson."""
    if text.startswith("\ufeff"):
        raise BadJson("it begins with a byte order mark; save it as UTF-8 without one")
    try:
        long = _whole if _LONG_NUMBER.search(text) else None
        checked = _finite if finite and (long or _RAISED.search(text)) else None
        many = patient and sum(map(text.count, "[{,")) > _PLAIN
        value = json.loads(
            text,
            cls=_Patient if many else None,
            parse_int=long,
            parse_float=checked,
            parse_constant=_finite if finite else None,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        raise BadJson(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise BadJson(f"nested too deeply, in more than {MOST_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MOST_DEPTH and _deeper(value):
        raise BadJson(f"nested too deeply, in more than {MOST_DEPTH} levels")
    if _SURROGATE.search(text) and not _is_unicode(value):
        raise BadJson("half of a surrogate pair, which is no character")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadJson(f"key {brief(twice)!r} comes twice in one object")
    return mapping


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise BadJson(f"a whole number of {len(digits):,} digits; at most {MOST_DIGITS} are read")
    return int(digits)


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise BadJson(f"{brief(number)} is no finite number")
    return value


def _deeper(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [
            inner
            for item in containers
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return any(isinstance(item, (dict, list)) for item in level)


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

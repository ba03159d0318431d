"""`completions.jsonl.gz`: the completions of a run, one member of gzip for each step.

Members that follow one another are one file to `zcat`, pandas and Python's gzip (RFC 1952, 2.2): JSONL, a row for each
completion. Each says its own length in an extra field of its header (2.3.1.1), so a step is found without unpacking
those before it, appended, and cut off again, exactly. Left out: what is in a row (`training/recording.py`).
"""

import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from isobit.errors import IsobitError

COMPLETIONS = "completions.jsonl.gz"
SAME = "same"
"""What stands for `policy_logprobs` that are `rollout_logprobs`, bit for bit."""
_LEVEL = 3
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_HEAD = struct.Struct("<4sIBBH2sHQ")  # magic with method and flags, time, level, system, extra: length, name, size
_MAGIC, _SYSTEM, _FIELD = b"\x1f\x8b\x08\x04", 255, b"IB"
_TAIL = struct.Struct("<II")  # CRC-32 and length of what is packed


class Member(NamedTuple):
    """Where a step begins in the file, and its length in bytes."""

    start: int
    length: int


def pack(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The member of a step, the same bytes for the same rows; nothing for no rows."""
    squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    parts, checksum, length = list[bytes](), 0, 0
    for row in rows:
        line = (_encode(row) + "\n").encode("utf-8", "backslashreplace")  # half a surrogate pair as JSON's escape
        checksum, length = zlib.crc32(line, checksum), length + len(line)
        parts.append(squeeze.compress(line))
    if not length:
        return b""
    body = b"".join([*parts, squeeze.flush()])
    size = _HEAD.size + len(body) + _TAIL.size
    head = _HEAD.pack(_MAGIC, 0, 0, _SYSTEM, 12, _FIELD, 8, size)
    return head + body + _TAIL.pack(checksum, length & 0xFFFFFFFF)


def members(path: Path, start: int = 0) -> Iterator[Member]:
    """The members from a place on; one that is not whole yet, or that a kill left half-written, ends them.

    Raises IsobitError for a file that is not a run's.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = file.seek(0, 2)
        while start + _HEAD.size <= size:
            file.seek(start)
            found = _HEAD.unpack(file.read(_HEAD.size))
            if found[0] != _MAGIC or found[5] != _FIELD or found[7] <= _HEAD.size:
                raise IsobitError(f"{path}: not completions as a run records them, at byte {start}")
            if start + found[7] > size:
                return
            yield Member(start, found[7])
            start += found[7]


def lines(path: Path, member: Member) -> list[bytes]:
    """The rows of a step, unparsed. Raises IsobitError if they are damaged."""
    with path.open("rb") as file:
        return _lines(file, path, member)


def _lines(file: IO[bytes], path: Path, member: Member) -> list[bytes]:
    file.seek(member.start)
    try:
        return zlib.decompress(file.read(member.length), wbits=zlib.MAX_WBITS | 16).splitlines()
    except zlib.error as error:
        raise IsobitError(f"{path}: damaged at byte {member.start}: {error}") from None


def parse(line: bytes) -> dict[str, Any]:
    """A row, its log-probabilities as they were: text of a float32 is short, and reads back as that float32."""
    row: dict[str, Any] = json.loads(line)
    if row.get("rollout_logprobs") is not None:
        row["rollout_logprobs"] = array("f", row["rollout_logprobs"]).tolist()
    policy = row.get("policy_logprobs")
    if policy is not None:
        row["policy_logprobs"] = row["rollout_logprobs"] if policy == SAME else array("f", policy).tolist()
    return row


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All rows, in order; of a step of which part is missing none."""
    for member in members(path):
        yield from map(parse, lines(path, member))


class CompletionTail(Iterator[dict[str, Any]]):
    """The rows of a file that grows; stops where there are no more, and goes on from there."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self._waiting: list[bytes] = []

    def __next__(self) -> dict[str, Any]:
        while not self._waiting:
            member = next(members(self._path, self._place), None)
            if member is None:
                raise StopIteration
            self._place = member.start + member.length
            self._waiting = lines(self._path, member)[::-1]
        return parse(self._waiting.pop())

"""`completions.jsonl.gz`: the completions of a run, one member of gzip for each step.

Members that follow one another are one file to `zcat`, pandas and Python's gzip (RFC 1952, 2.2):
JSONL, a row for each completion. Each member has its own length in an extra field of its header
(2.3.1.1), so a step is found without unpacking earlier steps, and is appended and cut off again
exactly. Left out: the contents of a row (`training/recording/rows.py`).
"""

import hashlib
import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from isobit.data.foreign import check_readable, exists, reason_of
from isobit.errors import IsobitError, brief
from isobit.run.rows import LARGEST

COMPLETIONS = "completions.jsonl.gz"
HELD_OUT = "held_out.jsonl.gz"
"""The completions of the evaluations of held-out prompts, in the same format: a member for each
evaluation."""
SAME = "same"
"""The value of `policy_logprobs` in a row if they equal `rollout_logprobs` bit for bit."""
_LEVEL = 3
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_HEAD = struct.Struct(
    "<4sIBBH2sHQ"
)  # magic with method and flags, time, level, system, extra: length, name, size
_MAGIC, _SYSTEM, _FIELD = b"\x1f\x8b\x08\x04", 255, b"IB"
_PREFIX = _HEAD.pack(_MAGIC, 0, 0, _SYSTEM, 12, _FIELD, 8, 0)[:-8]
"""The bytes with which every member begins."""
_MOST_RATIO = 400
_TAIL = struct.Struct("<II")  # CRC-32 and length of the unpacked bytes


class Member(NamedTuple):
    """The place of a step in the file: its first byte and its length in bytes."""

    start: int
    length: int


def pack(rows: Iterable[Mapping[str, Any]], digest: "hashlib._Hash | None" = None) -> bytes:
    """Return the member of a step, the same bytes for the same rows; no bytes for no rows. `digest`
    is updated with the lines."""
    squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    chunks, checksum, length = list[bytes](), 0, 0
    for row in rows:
        line = (_encode(row) + "\n").encode(
            "utf-8", "backslashreplace"
        )  # half a surrogate pair as JSON's escape
        checksum, length = zlib.crc32(line, checksum), length + len(line)
        chunks.append(squeeze.compress(line))
        if digest is not None:
            digest.update(line)
    if not length:
        return b""
    body = b"".join([*chunks, squeeze.flush()])
    size = _HEAD.size + len(body) + _TAIL.size
    head = _HEAD.pack(_MAGIC, 0, 0, _SYSTEM, 12, _FIELD, 8, size)
    return head + body + _TAIL.pack(checksum, length & 0xFFFFFFFF)


def members(path: Path, start: int = 0) -> Iterator[Member]:
    """Yield the members of a file from the byte `start` on, up to a member that is not whole yet or
    that a kill left half-written. Damaged bytes between two members are yielded as one member,
    which `lines` refuses.

    Raises IsobitError for a file that is not a run's, or that may not be read.
    """
    if not exists(path):
        return
    try:
        size = check_readable(path)
        with path.open("rb") as file:
            while start + _HEAD.size <= size:
                end = _end(file, start, size)
                if end is None and (start == 0 and not _begins(file, 0, size)):
                    raise IsobitError(f"{path}: not completions as a run records them, at byte 0")
                if end is None:
                    return
                yield Member(start, end - start)
                start = end
    except OSError as error:
        raise IsobitError(f"cannot read {path}: {reason_of(error)}") from None


def _end(file: IO[bytes], start: int, size: int) -> int | None:
    """Return the byte at which the member that begins at the byte `start` ends; None if the member
    is not whole. `size`: the bytes of the file."""
    file.seek(start)
    head = file.read(_HEAD.size)
    claimed = start + int(_HEAD.unpack(head)[7]) if head.startswith(_PREFIX) else 0
    if start + _HEAD.size < claimed <= size and (claimed == size or _begins(file, claimed, size)):
        return claimed
    offset, overlap = start + 1, b""
    file.seek(offset)
    while chunk := file.read(
        1 << 20
    ):  # what it says is wrong, or what comes after it: the next that begins, anywhere
        block = overlap + chunk
        if (at := block.find(_PREFIX)) >= 0:
            return claimed if start + _HEAD.size < claimed < offset + at else offset + at
        overlap = block[-len(_PREFIX) + 1 :]
        offset += len(block) - len(overlap)
    if claimed:
        return claimed if start + _HEAD.size < claimed < size else None
    return size if start else None


def _begins(file: IO[bytes], offset: int, size: int) -> bool:
    """Return whether a member begins at the byte `offset`, or, at the end of the file, the
    beginning of a member."""
    file.seek(offset)
    head = file.read(len(_PREFIX))
    return (
        bool(head)
        and _PREFIX.startswith(head)
        and (len(head) == len(_PREFIX) or offset + len(head) == size)
    )


def end(path: Path) -> int:
    """Return the byte at which the last whole member ends; 0 without a file."""
    return max((sum(member) for member in members(path)), default=0)


def cut_off(path: Path) -> str | None:
    """Return a line of text about a file that ends with less than a whole member; None if the file
    ends with a whole member or does not exist."""
    size = path.stat().st_size if exists(path) else 0
    if (whole := end(path)) >= size:
        return None
    return (
        f"{path}: cut off after byte {whole:,}: the last {size - whole:,} bytes are no whole step, "
        "and left out"
    )


def has_its_header(path: Path, member: Member) -> bool:
    """Return whether a member has the header of a member, with its own length; nothing is
    unpacked."""
    with path.open("rb") as file:
        file.seek(member.start)
        return _is_header(file.read(_HEAD.size), member.length)


def _is_header(head: bytes, length: int) -> bool:
    return head.startswith(_PREFIX) and int(_HEAD.unpack_from(head)[7]) == length


def lines(path: Path, member: Member) -> list[bytes]:
    """Return the rows of a step, as lines that are not parsed. Raises IsobitError if they are
    damaged, or longer than a run would write."""
    with path.open("rb") as file:
        file.seek(member.start)
        packed = file.read(member.length)
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        text = unpack.decompress(packed, max(_MOST_RATIO * len(packed), 1 << 26))
    except zlib.error as error:
        raise IsobitError(f"{path}: damaged at byte {member.start}: {error}") from None
    if not _is_header(packed, len(packed)) or unpack.unused_data:
        raise IsobitError(
            f"{path}: damaged at byte {member.start}: its header is not the one that was written"
        )
    if not unpack.eof:
        reason = (
            f"it unpacks to more than {_MOST_RATIO} times its size"
            if unpack.unconsumed_tail
            else "it is cut off"
        )
        raise IsobitError(f"{path}: damaged at byte {member.start}: {reason}")
    return text.split(b"\n")[:-1]


def parse(line: bytes) -> dict[str, Any]:
    """Parse a row, with exact log-probabilities: the short text of a float32 becomes that float32
    again. Raises IsobitError for a line that is not a row of completions."""
    try:
        row = json.loads(
            line
        )  # half a surrogate pair, which a tokenizer may give, is read as it was written
        if type(row["step"]) is not int:
            raise TypeError
        if row.get("rollout_logprobs") is not None:
            row["rollout_logprobs"] = array("f", row["rollout_logprobs"]).tolist()
        policy = row.get("policy_logprobs")
        if policy is not None:
            row["policy_logprobs"] = (
                row["rollout_logprobs"] if policy == SAME else array("f", policy).tolist()
            )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise IsobitError(
            f"not a row of completions: {brief(line[:200].decode('utf-8', 'replace'))}"
        ) from None
    assert isinstance(row, dict)
    return row


def conversation(messages: Iterable[Any]) -> str:
    """Return messages as text: for each a line that begins with its role; values that are not text,
    such as parts or calls of tools, as JSON."""
    turns = []
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        content, calls = message.get("content"), message.get("tool_calls")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        called = f" {json.dumps(calls, ensure_ascii=False)}" if calls else ""
        turns.append(f"{message.get('role')}: {text}{called}")
    return "\n".join(turns)


def is_reward(value: Any) -> bool:
    """Return whether a value can be the reward of a row: a finite number of at most `LARGEST` in
    absolute value, or None."""
    number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    )
    return value is None or number


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all rows of a file, in order; no rows of a step that is not whole."""
    for member in members(path):
        yield from map(parse, lines(path, member))


class CompletionTail(Iterator[dict[str, Any]]):
    """An iterator over the rows of a file that grows. It stops after the last row, and goes on from
    there when there are more. Damaged rows and steps are left out."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self._waiting: list[bytes] = []

    def __next__(self) -> dict[str, Any]:
        while True:
            while not self._waiting:
                member = next(members(self._path, self._place), None)
                if member is None:
                    raise StopIteration
                self._place = member.start + member.length
                with suppress(IsobitError):  # a step that is damaged has no rows
                    self._waiting = lines(self._path, member)[::-1]
            with suppress(IsobitError):
                return parse(self._waiting.pop())

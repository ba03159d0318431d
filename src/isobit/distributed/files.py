"""Safetensors files of tensors that ranks share: all write their rows into one file, and each reads
its own.

The rows of a tensor are contiguous bytes in a file, in their order, so each rank writes what it
keeps at its place. The bytes are those that safetensors' own writer leaves for the whole tensors,
at any number of ranks (tests/distributed/test_files.py). Left out: making a write atomic
(`isobit.run.checkpoints`).
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from isobit.distributed.ranks import ALONE, Ranks
from isobit.errors import RunFailed

_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order in which their tensors stand in a file."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PLACES = {dtype: place for place, dtype in enumerate(_NAMES)}
_TOGETHER = 1 << 20  # bytes of small tensors that are written by one call


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of a file, `dtype` and `shape` of the whole, and what this rank writes of it:
    `mine`, of any dtype and device, or what makes it when it is written, are its elements from
    number `start` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    mine: Tensor | Callable[[], Tensor] | None = None
    start: int = 0

    @staticmethod
    def whole(tensor: Tensor) -> "Part":
        """Return a tensor of which this rank writes all."""
        return Part(tensor.dtype, tuple(tensor.shape), tensor)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def data(self) -> Tensor:
        """Return the bytes that this rank writes, uint8 on the CPU."""
        assert self.mine is not None
        mine = self.mine if isinstance(self.mine, Tensor) else self.mine()
        return mine.detach().to("cpu", self.dtype).contiguous().view(-1).view(torch.uint8)


def write_file(path: Path, parts: Mapping[str, Part], ranks: Ranks = ALONE) -> None:
    """Write a safetensors file; all ranks call this with the same names, dtypes and shapes, and all
    have written when it returns. What others than the first rank wrote is on the disk then. Raises
    OSError, on every rank, if one cannot write, and RunFailed if not every byte was written."""
    header, offsets, end = _layout(parts)
    ranks.on_first(lambda: _create(path, header, end))
    written = ranks.run_on_all(lambda: _fill(path, parts, offsets, flush=not ranks.first))
    if (total := sum(ranks.all_gather_json(written))) != end - len(header):
        raise RunFailed(f"{path}: the ranks wrote {total} of {end - len(header)} bytes of tensors")


def _layout(parts: Mapping[str, Part]) -> tuple[bytes, dict[str, int], int]:
    """Return the header, the offset of each tensor in the file in ascending order, and the file's
    size; as safetensors 0.8 has them."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, {}
    for name, piece in sorted(parts.items(), key=lambda each: (_PLACES[each[1].dtype], each[0])):
        offsets[name] = offset
        span = [offset, offset + piece.nbytes]
        entries[name] = {
            "dtype": _NAMES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": span,
        }
        offset += piece.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + at for name, at in offsets.items()}, len(header) + offset


def _create(path: Path, header: bytes, end: int) -> None:
    path.unlink(missing_ok=True)  # tensors that are mapped from it stay what they are
    with path.open("xb") as file:
        file.write(header)
        file.truncate(end)


def _fill(path: Path, parts: Mapping[str, Part], offsets: Mapping[str, int], *, flush: bool) -> int:
    """Write this rank's bytes into a file; return how many there are."""
    written = 0
    file = os.open(path, os.O_WRONLY)
    try:
        for offset, data in _runs(parts, offsets):
            left = data.numpy().data
            while left:
                done = os.pwrite(file, left, offset)
                left, offset, written = left[done:], offset + done, written + done
        if flush:
            os.fsync(file)
    finally:
        os.close(file)
    return written


def _runs(parts: Mapping[str, Part], offsets: Mapping[str, int]) -> Iterator[tuple[int, Tensor]]:
    """Yield what is written at once: an offset, and bytes; neighbours up to `_TOGETHER`."""
    run: list[Tensor] = []
    begin = end = 0
    for name, offset in offsets.items():
        piece = parts[name]
        if piece.mine is None:
            continue
        at, data = offset + piece.start * piece.dtype.itemsize, piece.data()
        if run and (at != end or end - begin + len(data) > _TOGETHER):
            yield begin, _joined(run)
            run = []
        if not run:
            begin = end = at
        run.append(data)
        end += len(data)
    if run:
        yield begin, _joined(run)


def _joined(run: list[Tensor]) -> Tensor:
    return run[0] if len(run) == 1 else torch.cat(run)  # a large one is written from where it is


class FileTensor:
    """A tensor in an open file: `tensor[lo:hi]` reads these rows and no others, `tensor[...]`
    all."""

    def __init__(self, slices: Any) -> None:
        self._slices = slices  # safetensors' own
        self.shape: tuple[int, ...] = tuple(slices.get_shape())
        name = slices.get_dtype()
        self.dtype: torch.dtype | str = _DTYPES.get(
            name, name
        )  # a name where PyTorch has no such numbers

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        read: Tensor = self._slices[rows]
        return read


def file_tensors(file: Any) -> dict[str, FileTensor]:
    """Return the tensors of a file that `safetensors.safe_open` opened, by name."""
    return {name: FileTensor(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (a file handle, not a dict)

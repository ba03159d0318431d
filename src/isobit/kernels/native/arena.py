"""Memory for the tensors of functions that are recorded (`recording.py`).

A tensor's place is free as soon as nothing holds the tensor, and the next one may have it, as with
any allocator. But the memory itself stays, at the addresses that recorded calls have. Recordings
that never run at the same time share one arena. Left out: giving memory back, which the arena does
as a whole when nothing refers to it any more.
"""

import weakref
from bisect import insort
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
_SMALLEST = 1 << 20


class Arena:
    """Chunks of memory, each a power of two of bytes, from which places are taken first fit."""

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []  # (chunk, start, stop), sorted, never adjacent
        self._released: deque[tuple[int, int, int]] = deque()  # and not yet among the free

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def num_free(self) -> int:
        """Bytes that no tensor holds."""
        self._collect()
        return sum(stop - start for _, start, stop in self._free)

    def like(self, x: Tensor) -> Tensor:
        """Return a tensor of x's type, shape and strides in the arena, its values undefined; x
        itself, where it has none."""
        if not x.numel():
            return x
        memory = self._take(_extent(x))
        return torch.from_numpy(memory).view(x.dtype).as_strided(x.shape, x.stride())

    def holds(self, x: Tensor) -> bool:
        """Return whether x lies in the arena."""
        return self._chunk_of(x) is not None

    def alias(self, x: Tensor) -> Tensor:
        """Return the same memory for what holds no place: it must be read and written only where x
        would be there. What lies elsewhere is x itself."""
        chunk = self._chunk_of(x)
        if chunk is None:
            return x
        start = x.data_ptr() - chunk.ctypes.data
        view = torch.from_numpy(chunk)[start : start + _extent(x)]
        return view.view(x.dtype).as_strided(x.shape, x.stride())

    def _chunk_of(self, x: Tensor) -> NDArray[np.uint8] | None:
        if x.is_mkldnn or not x.numel():
            return None
        address = x.data_ptr()
        for chunk in self._chunks:
            if chunk.ctypes.data <= address < chunk.ctypes.data + chunk.nbytes:
                return chunk
        return None

    def _take(self, size: int) -> NDArray[np.uint8]:
        """Return a new array over `size` free bytes."""
        self._collect()
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        fits = (i for i, (_, start, stop) in enumerate(self._free) if stop - start >= size)
        index = next(fits, None)
        if index is None:
            index = self._grow(size)
        chunk, start, stop = self._free[index]
        self._free[index : index + 1] = [(chunk, start + size, stop)] if start + size < stop else []
        memory = self._chunks[chunk][start : start + size]
        # a tensor may be freed at any moment, by any thread: its place is only noted then
        noted = self._released.append
        weakref.finalize(memory, noted, (chunk, start, start + size)).atexit = False
        return memory

    def _grow(self, size: int) -> int:
        """Return a new chunk of at least `size` bytes: its index in the free list."""
        wanted = max(_SMALLEST, 1 << (size - 1).bit_length())
        memory = np.empty(wanted + _ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        self._chunks.append(memory[first : first + wanted])
        self._free.append((len(self._chunks) - 1, 0, wanted))  # chunks are in ascending order
        return len(self._free) - 1

    def _collect(self) -> None:
        """Free the memory that nothing holds any more."""
        if not self._released:
            return
        while self._released:
            insort(self._free, self._released.popleft())
        joined = list[tuple[int, int, int]]()
        for region in self._free:
            if joined and joined[-1][0] == region[0] and joined[-1][2] == region[1]:
                region = (region[0], joined.pop()[1], region[2])
            joined.append(region)
        self._free[:] = joined


def _extent(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return (last + 1) * x.element_size()

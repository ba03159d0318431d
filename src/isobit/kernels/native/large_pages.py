"""Memory for packed weights, which every step reads from end to end: in chunks that the system may
back with large pages.

Reading weights from memory took 18 GB/s in pages of 4 KiB and 30 in those of 2 MiB, on two cores of
a Xeon. NumPy asks for large pages where it allocates 4 MiB and more (its variable
NUMPY_MADVISE_HUGEPAGE; Linux decides); PyTorch does not. A chunk is freed when nothing that was
allocated in it is left. Left out: what is small, and is PyTorch's.
"""

import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PAGE = 2 << 20
_ALIGNMENT = 64


class LargePages:
    """An allocator of memory in large pages. The last chunk is filled as long as something in it is
    in use."""

    def __init__(self, chunk: int = 16 * _PAGE, smallest: int = 1 << 16) -> None:
        """Take `chunk`, the fewest bytes of a chunk; below `smallest`, memory is PyTorch's."""
        self._chunk, self._smallest, self._lock = chunk, smallest, threading.Lock()
        self._first = self._used = self._size = 0  # of the last chunk: its place in memory, bytes
        self._last: Callable[[], NDArray[np.uint8] | None] = lambda: None

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of `count` elements, its values undefined."""
        size = count * dtype.itemsize
        if size < self._smallest:
            return torch.empty(count, dtype=dtype)
        with self._lock:
            memory = self._last()
            if memory is None or self._used + size > self._size:
                memory = self._new(size)
            start = self._first + self._used
            self._used = -(-(self._used + size) // _ALIGNMENT) * _ALIGNMENT
        return torch.from_numpy(memory[start : start + size]).view(dtype)

    def _new(self, size: int) -> NDArray[np.uint8]:
        """Allocate memory for a new chunk, which begins in it with a large page. A slice of a slice
        holds this array, and not the slice between them: the array lives as long as a tensor on it
        does."""
        self._size, self._used = max(self._chunk, -(-size // _PAGE) * _PAGE), 0
        memory = np.empty(self._size + _PAGE, np.uint8)
        self._last, self._first = weakref.ref(memory), -memory.ctypes.data % _PAGE
        return memory

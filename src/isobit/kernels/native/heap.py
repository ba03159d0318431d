"""Keeps the C library from giving large tensors' memory back to the system after each use.

A step of learning frees and takes tensors of up to hundreds of MiB. By default glibc maps each of
them anew, and the system writes zeros into it: in a step of a model of Qwen3-0.6B's shape that took
as long as all products (docs/log.md). So allocations come from the heap, whose free parts are used
again; a process keeps the most that it ever had. Left out: other C libraries.
"""

import ctypes
import os
import sys

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of malloc.h
_NEVER = 2**31 - 1
_SAID = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed memory, and return whether that was possible: not where a variable of glibc's says
    how memory is kept, nor under another allocator."""
    replaced = "LD_PRELOAD" in os.environ
    if sys.platform != "linux" or replaced or any(name in os.environ for name in _SAID):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _NEVER) and mallopt(_TRIM_THRESHOLD, _NEVER))

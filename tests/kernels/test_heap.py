"""Freed memory is kept, unless a variable says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from isobit.kernels.native.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

os_gives, kept = faults(), keep_freed_memory()
faults()
print(int(kept), os_gives, faults())
"""


def ran(**variables: str) -> list[int]:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment |= {"THP_MEM_ALLOC_ENABLE": "0", **variables}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return [int(word) for word in found.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_large_tensors_get_the_same_memory_again() -> None:
    """Once told, eight tensors of 64 MiB in turn meet no fresh page; before, and where a variable
    of glibc's says how memory is kept, each meets 16,384."""
    kept, before, after = ran()
    assert kept == 1
    assert after < before / 10
    left, before, after = ran(MALLOC_TRIM_THRESHOLD_="131072")
    assert left == 0
    assert after > before / 2

"""Memory of packed weights: tensors lie side by side in chunks, which go with the last of them."""

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

from isobit.kernels.native import large_pages
from isobit.kernels.native.large_pages import LargePages

PAGE, KIB = 2 << 20, 1 << 10


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[object]"]:
    """All memory that is asked for."""
    found: list[weakref.ref[object]] = []
    empty = np.empty

    def asked(size: int, dtype: type) -> object:
        made = empty(size, dtype)
        found.append(weakref.ref(made))
        return made

    monkeypatch.setattr(large_pages.np, "empty", asked)
    return found


def alive(chunks: list["weakref.ref[object]"]) -> int:
    gc.collect()
    return sum(chunk() is not None for chunk in chunks)


def test_small_tensors_are_neighbours(chunks: list["weakref.ref[object]"]) -> None:
    """Each begins with a line of the cache, the first with a large page; the control is one that
    has no room in the chunk."""
    pages = LargePages(chunk=2 * PAGE, smallest=KIB)
    kept = [pages.empty(40 * KIB + 1, torch.uint8).fill_(number) for number in range(100)]
    starts = [tensor.data_ptr() for tensor in kept]
    assert starts[0] % PAGE == 0
    assert {after - before for before, after in pairwise(starts)} == {40 * KIB + 64}
    assert len(chunks) == 1
    far = pages.empty(KIB * KIB, torch.float32)
    assert len(chunks) == 2
    assert far.data_ptr() % PAGE == 0
    assert far.numel() == KIB * KIB
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(kept))


def test_memory_goes_back_with_the_last_tensor(chunks: list["weakref.ref[object]"]) -> None:
    """While one is left, its chunk is filled further."""
    pages = LargePages(chunk=PAGE, smallest=KIB)
    kept = [pages.empty(64 * KIB, torch.bfloat16) for _ in range(24)]
    assert alive(chunks) == len(chunks) == 2
    del kept[:-1]
    assert alive(chunks) == 1
    beside = pages.empty(64 * KIB, torch.bfloat16)
    assert beside.data_ptr() - kept[0].data_ptr() == 128 * KIB
    assert len(chunks) == 2
    kept.clear()
    del beside
    assert alive(chunks) == 0
    again = pages.empty(64 * KIB, torch.bfloat16)
    assert again.data_ptr() % PAGE == 0
    assert (alive(chunks), len(chunks)) == (1, 3)


def test_what_is_very_small_is_pytorchs(chunks: list["weakref.ref[object]"]) -> None:
    pages = LargePages(chunk=PAGE, smallest=KIB)
    assert pages.empty(KIB - 1, torch.uint8).numel() == KIB - 1
    assert not chunks
    assert pages.empty(KIB, torch.uint8).numel() == KIB
    assert len(chunks) == 1

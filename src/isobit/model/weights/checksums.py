"""Checksums of tensors that one owner alone changes: whether a bit of them has changed since the
owner wrote them.

The checksum of a tensor is the sum of each of its rows, read as int64 words modulo 2^64 (as smaller
integers, where 8 bytes do not divide a row). Integer addition is exact, so neither threads nor
their order change it, and it reads each byte once, at the memory's speed. Any change of a single
word is seen, so every flipped bit is; and, since every row has its sum, so is what one sum of the
whole tensor would miss: flips that cancel in different rows, and rows that are exchanged. Not seen:
changes within one row whose sum is 0, such as the same bit flipped up in one word and down in
another, the top bits of two words, or two words exchanged.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from isobit.errors import Corruption

_BLOCK = 4096  # elements: rows of a tensor that has none, such as a packed weight
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the checksums of each tensor, int64 [rows] on its device. Nothing waits for a GPU."""
    return {name: _sums(tensor.detach()) for name, tensor in tensors.items()}


def first_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose checksums differ, or None; all are compared at once."""
    assert left.keys() == right.keys()
    if not left or torch.equal(torch.cat(list(left.values())), torch.cat(list(right.values()))):
        return None
    return next(name for name in left if not torch.equal(left[name], right[name]))


class Checksums:
    """The checksums of an owner's `tensors()`, by names that a message can show. From `begin` on
    the owner takes them anew (`renew`) whenever it has written; before that nothing is summed."""

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._tensors = tensors
        self._taken: dict[str, Tensor] | None = None

    def begin(self) -> None:
        self._taken = checksums(self._tensors())

    def renew(self) -> None:
        if self._taken is not None:
            self.begin()

    def compare(self) -> None:
        """Raise Corruption, naming the first tensor that differs from what was written."""
        if self._taken is None:
            return
        if (name := first_difference(self._taken, checksums(self._tensors()))) is not None:
            raise Corruption(
                f"{name} changed in memory where nothing writes: a hardware fault, or code that "
                "writes where it must not; check the machine's memory"
            )


def _sums(tensor: Tensor) -> Tensor:
    if tensor.ndim < 2:
        whole = tensor.ndim == 1 and tensor.numel() % _BLOCK == 0
        tensor = tensor.view(-1, _BLOCK) if whole else tensor.view(1, -1)
    tensor = tensor.contiguous()
    if tensor.storage_offset() * tensor.element_size() % 8:
        tensor = tensor.clone()  # so that it can be viewed as words
    size = tensor.shape[-1] * tensor.element_size()
    word = next(dtype for dtype in _WORDS if size % dtype.itemsize == 0)
    return tensor.view(word).sum(-1, dtype=torch.int64).view(-1)

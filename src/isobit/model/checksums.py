"""Checksums of tensors that one owner alone changes: whether a bit of them has changed since the owner wrote them.

The checksum of a tensor are the sums of its blocks of 4 KiB, read as 512 int64 words, modulo 2^64; the bytes after its
last whole block are summed as bytes. Integer addition is exact, so neither threads nor their order change it, and it
reads each byte once, at the memory's speed. Any change of a single word is seen, so every flipped bit is; and, since
every block has a sum, so is what a sum of the whole tensor would miss: flips that cancel, rows and pages that are
exchanged. Not seen: changes within one block whose sum is 0, such as one bit flipped up in one word and down in
another, or two words exchanged.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from isobit.errors import Corruption

_BLOCK = 4096  # bytes


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of each tensor, int64 [blocks] on its device. Nothing waits for a GPU."""
    return {name: _sums(tensor.detach()) for name, tensor in tensors.items()}


def first_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """The first name whose checksums differ, or None; all are compared at once."""
    assert left.keys() == right.keys()
    if not left or torch.equal(torch.cat(list(left.values())), torch.cat(list(right.values()))):
        return None
    return next(name for name in left if not torch.equal(left[name], right[name]))


class Checksums:
    """Of an owner's `tensors()`, by names that a message can show. From `begin` on the owner takes them anew (`renew`)
    whenever it has written; before that nothing is summed."""

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
                f"{name} changed in memory where nothing writes: a hardware fault, or code that writes where it must "
                "not; check the machine's memory"
            )


def _sums(tensor: Tensor) -> Tensor:
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # so that it can be viewed as words
    whole = data.numel() // _BLOCK * _BLOCK
    rest = data[whole:].sum(dtype=torch.int64).view(1)
    return torch.cat((data[:whole].view(torch.int64).view(-1, _BLOCK // 8).sum(1), rest)) if whole else rest

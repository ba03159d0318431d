"""Rows that their owners have written into tensors that every rank has: sent to all others, a layer
at a time.

What travels are the bytes of the tensors: codes and scales where weights are quantized, so half of
BF16's. Left out: what the owners write (`isobit.model.weights.layout`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from isobit.distributed.shards import Rows, Shards


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor made of a master, one of whose rows is made of `height` rows: 128 where it has
    scales of blocks."""

    name: str
    tensor: Tensor
    height: int = 1

    def rows(self, rows: Rows) -> Tensor:
        """Return the rows that belong to the master's."""
        lo, hi = rows
        return self.tensor[lo // self.height : -(-hi // self.height)]


def part_of(name: str) -> str:
    """Return what a tensor travels with: `layers.3` for all of a layer; the embedding, the last
    norm and the head alone."""
    return ".".join(name.split(".")[:2])


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the storage of a contiguous tensor [bytes] uint8; a view."""
    return tensor.detach().view(-1).view(torch.uint8)


def share_rows(stored: Sequence[Stored], shards: Shards) -> None:
    """Fill each rank's tensors with the rows that the other ranks keep."""
    if shards.ranks.size == 1:
        return
    waiting: list[tuple[list[Stored], list[Tensor], Callable[[], None]]] = []
    for _, group in groupby(stored, lambda s: part_of(s.name)):
        batch = list(group)
        buffers = [_packed(batch, shards, rank) for rank in range(shards.ranks.size)]
        waiting.append((batch, buffers, shards.ranks.share(buffers)))
        if len(waiting) > 2:  # a few layers at a time are in memory twice
            _take(*waiting.pop(0), shards)
    for tensor in waiting:
        _take(*tensor, shards)


def _bytes(tensors: Sequence[Stored], shards: Shards, rank: int) -> list[Tensor]:
    """Return the bytes of a rank's rows, tensor by tensor, in their storage."""
    pieces = []
    for tensor in tensors:
        rows = shards.rows[tensor.name][rank]
        if rows[1] > rows[0]:
            pieces.append(as_bytes(tensor.rows(rows)))
    return pieces


def _packed(tensors: Sequence[Stored], shards: Shards, rank: int) -> Tensor:
    pieces = _bytes(tensors, shards, rank)
    if rank == shards.ranks.rank and pieces:
        return torch.cat(pieces)
    return torch.empty(sum(map(len, pieces)), dtype=torch.uint8, device=tensors[0].tensor.device)


def _take(
    tensors: Sequence[Stored], buffers: Sequence[Tensor], wait: Callable[[], None], shards: Shards
) -> None:
    wait()
    for rank, buffer in enumerate(buffers):
        pieces = _bytes(tensors, shards, rank)
        if rank == shards.ranks.rank or not pieces:
            continue
        for piece, received in zip(pieces, buffer.split([len(piece) for piece in pieces])):
            piece.copy_(received)

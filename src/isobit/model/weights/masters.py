"""Masters, FP32 or BF16: the rows that this rank keeps of them, and the leaves through which
autograd returns their gradients, which are FP32 in either case.

Nothing in a forward or a backward reads a master: products take the working weights, and a gradient
is returned for a leaf. Where one process has all rows of FP32 masters, leaf and master are one
tensor. Else a leaf is a single number, expanded to the master's shape; where ranks share the
masters, `isobit.distributed.exchange` takes each gradient as it appears. PyTorch gives a BF16
tensor no FP32 gradient, so those of BF16 masters have their own place (`holders`).
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from isobit.distributed import ALONE, Ranks, Shards

MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The formats by the names that configs have."""


class Masters:
    """Masters of these whole `shapes`, in a fixed order. `rows`: those that this rank keeps,
    rounded to nearest where `dtype` has fewer digits. The `.grad` of `holders` is the gradient,
    float32, of the `parameters`' rows."""

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        ranks: Ranks,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shards = Shards.of(shapes, ranks)
        local_shapes = {
            name: self.shards.own_shape(name) for name in shapes if self.shards.owned(name)
        }
        assert {name: tuple(t.shape) for name, t in rows.items()} == local_shapes
        self.dtype, wide = dtype, dtype == torch.float32
        self.parameters = {
            name: nn.Parameter(rows[name].to(device, dtype), requires_grad=wide)
            for name in local_shapes
        }
        self.leaves: Mapping[str, Tensor] = self.parameters
        self.holders: Mapping[str, Tensor] = self.parameters
        if ranks.size > 1 or not wide:
            self.leaves = {name: _leaf(shape, device) for name, shape in shapes.items()}
        if not wide:
            leaves = {name: _leaf(shape, device) for name, shape in local_shapes.items()}
            self.holders = self.leaves if ranks.size == 1 else leaves

    @staticmethod
    def elsewhere(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> "Masters":
        """Return masters without tensors: this process receives the working weights that another
        one makes."""
        masters = Masters({}, {}, device, ALONE)
        masters.leaves = {name: _leaf(shape, device) for name, shape in shapes.items()}
        return masters

    @property
    def apart(self) -> bool:
        """Whether the leaves hold no numbers: working weights cannot be made of them."""
        return self.leaves is not self.parameters

    @property
    def count(self) -> int:
        """The number of elements of all masters, on all ranks."""
        return sum(leaf.numel() for leaf in self.leaves.values())


def own_rows(whole: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return the rows that a rank keeps, of whole masters; they share no memory with them where
    ranks are several."""
    shards = Shards.of({name: tuple(tensor.shape) for name, tensor in whole.items()}, ranks)
    return dict(kept_rows(whole.items(), shards))


def kept_rows(whole: Iterable[tuple[str, Tensor]], shards: Shards) -> Iterator[tuple[str, Tensor]]:
    """Yield the rows that this rank keeps of each whole master, as they come."""
    for name, tensor in whole:
        if shards.ranks.size == 1:
            yield name, tensor
        elif shards.owned(name):
            yield name, tensor[slice(*shards.own(name))].clone()


def _leaf(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.zeros((), device=device).expand(shape).requires_grad_()

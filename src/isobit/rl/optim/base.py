"""What an optimizer is: the update of masters from their gradients, and the state that it keeps
from one to the next.

Common to all, and no business of an optimizer: clipping and the gradient's norm, saving and loading
(`sharded.py`), the learning rate of a step (`schedule.py`), BF16 masters and weight decay
(`masters.py`). To add one: a file here with a class of this protocol, its name and options in
`schedule.py`, its line in `sharded.OPTIMIZERS`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from isobit.distributed import Shards
from isobit.rl.optim.masters import UpdatedMasters
from isobit.rl.optim.schedule import OptimizerSettings


@dataclass(frozen=True)
class Form:
    """A tensor of a master's state; `block` elements of the master share one of its elements. A
    shape of () is a number of the whole master, such as its count of updates."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    block: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes; a single number counts as none."""
        return self.dtype.itemsize * math.prod(self.shape) if self.shape else 0

    def rows(self, shards: Shards, name: str) -> slice | EllipsisType:
        """Return those that belong to the rows which this rank keeps of a master."""
        if not self.shape:
            return ...
        ratio = self.block * math.prod(self.shape[1:])
        lo, hi = (row * shards.width(name) // ratio for row in shards.own(name))
        return slice(lo, hi)


STEP = Form(torch.float32, ())
"""How many updates a master has had: the state `step` of every optimizer."""


class Optimizer(Protocol):
    """The update of some masters. Each rank keeps the state of the rows that it keeps of them."""

    label: ClassVar[str]
    """What a config says to get it, for messages."""
    whole_matrices: ClassVar[bool]
    """Whether an update needs all rows of a matrix: then every rank takes part in every
    `update`."""

    settings: OptimizerSettings
    """Of the next update."""

    def __init__(
        self, masters: UpdatedMasters, names: Sequence[str], settings: OptimizerSettings
    ) -> None:
        """For the masters `names`, whichever ranks keep their rows."""

    @staticmethod
    def takes(name: str, shape: Sequence[int], settings: OptimizerSettings) -> bool:
        """Return whether it updates a master of this name and whole shape in a run of these
        settings."""

    @staticmethod
    def forms(shape: tuple[int, ...]) -> Mapping[str, Form]:
        """Return the state of a master of this shape, or of some whole rows of it, by key; `step`
        is one."""

    def update(self, names: Sequence[str], rate: float) -> None:
        """Update those of this rank's masters that have a gradient, at this learning rate. Each
        gradient is freed when it was applied."""

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of this rank's rows, by master and key; empty before the first
        update."""

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take a copy of what `tensors` gave; other masters begin again."""


def state_bytes(forms: Mapping[str, Form]) -> int:
    """Return the bytes of one master's state."""
    return sum(form.nbytes for form in forms.values())

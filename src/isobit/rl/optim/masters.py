"""The masters as an update sees them: float32 to read and to write, whatever they are kept in.

Masters in BF16 (2 bytes a parameter) would lose updates smaller than half of their last place, and
near 1 that is 2^-9, far above what a step of RL moves. So an update is computed in float32 and its
result rounded stochastically (`kernels/optim/definition.py`): the mean over the random bits is the
float32 result. The bits are those of (the run's seed, the parameter's name, its number of updates,
the element's number in the whole parameter), so the same update gives the same masters at any
number of ranks and threads, however it is cut into parts, and after a resume. (Gupta et al. 2015,
arXiv 1502.02551; Zamirai et al. 2020, arXiv 2010.06192.) Left out: Kahan summation, whose third
term takes the bytes that this saves.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from isobit.distributed import Shards
from isobit.kernels import Ops

T = TypeVar("T")
AT_ONCE = 1 << 22
"""Elements of BF16 masters, or of 8-bit moments, that are in float32 at a time."""
_ONE = 0x3F800000  # 1.0 in float32; 2^16 places above it is the next BF16 number
Piece = tuple[str, slice]
"""Elements of what a rank keeps of a parameter."""


@dataclass(frozen=True, eq=False)
class UpdatedMasters:
    """The rows that a rank keeps of the masters, and the `holders` of their gradients; `seed` is
    the run's. `matrices`: the rows of each matrix that a master is made of; one that is not in it
    is one matrix."""

    parameters: Mapping[str, Tensor]
    holders: Mapping[str, Tensor]
    shards: Shards
    ops: Ops
    seed: int
    matrices: Mapping[str, Sequence[int]]

    def by_decay(self, names: Sequence[str], weight_decay: float) -> list[tuple[float, list[str]]]:
        """Return masters by their weight decay: matrices have it, norms and biases none."""
        matrices = [name for name in names if self.parameters[name].ndim > 1]
        vectors = [name for name in names if self.parameters[name].ndim <= 1]
        return [(weight_decay, matrices), (0.0, vectors)]

    def gradient(self, name: str, part: slice) -> Tensor:
        """Return some elements [n] of the gradient of a parameter that has one."""
        gradient = self.holders[name].grad
        assert gradient is not None
        return gradient.reshape(-1)[part]

    def free_gradients(self, names: Sequence[str]) -> None:
        for name in names:
            self.holders[name].grad = None

    def wide(self, name: str, part: slice) -> Tensor:
        """Return some elements [n] float32, to change in place: of FP32 masters the storage itself,
        else a copy."""
        return self.parameters[name].detach().view(-1)[part].float()

    def put(self, name: str, part: slice, values: Tensor, step: int) -> None:
        """Write elements that update number `step` of the parameter has changed."""
        rows = self.parameters[name].detach().view(-1)[part]
        if rows.dtype != torch.float32:
            key = _key(f"masters {self.seed} {name}")
            rows.copy_(self.ops.round_stochastically(values, key, step, self._first(name, part)))

    def draw(self, what: str, name: str, part: slice, step: int, chances: Tensor) -> Tensor:
        """Return True with these chances [n], each below 1 and cut to 16 bits, for elements of a
        parameter's update number `step`; `what` names the purpose of the draws."""
        floats = (chances.mul_(1 << 16).int() + _ONE).view(torch.float32)
        key = _key(f"{what} {self.seed}")
        return self.ops.round_stochastically(floats, key, step, self._first(name, part)) > 1

    def _first(self, name: str, part: slice) -> int:
        """Return the number of a part's first element in the whole parameter."""
        return self.shards.own(name)[0] * self.shards.width(name) + part.start


def _key(what: str) -> int:
    """Return 64 bits that have nothing to do with those that tokens are drawn with."""
    digest = hashlib.sha256(what.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def pieces(names: Sequence[str], parameters: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
    """Return the parameters in their order, as pieces of at most `AT_ONCE` elements together."""
    slices = ((name, rows) for name in names for rows in parts_of(parameters[name].numel()))
    return grouped(((piece, piece[1].stop - piece[1].start) for piece in slices), AT_ONCE)


def parts_of(count: int) -> Iterator[slice]:
    """Return elements 0 to `count` in parts of `AT_ONCE`, the last of which may have fewer."""
    return (slice(i, min(i + AT_ONCE, count)) for i in range(0, count, AT_ONCE))


def grouped(items: Iterable[tuple[T, int]], at_once: int) -> Iterator[list[T]]:
    """Yield items with their sizes, in order, of at most `at_once` together where one alone is not
    larger."""
    group, total = list[T](), 0
    for item, size in items:
        if group and total + size > at_once:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group

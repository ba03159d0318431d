"""Muon: momentum whose matrices are orthogonalized before they are applied.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; scaled as in Liu et al. 2025, arXiv
2502.16982, section 2.2; the equations, defaults and options are those of `torch.optim.Muon`, which
`tests/rl/test_muon.py` compares with. With the gradient G of a matrix [A, B], the rate r and the
momentum m:

    M = m · M + (1 - m) · G,    U = m · M + (1 - m) · G with Nesterov, else M
    W = W - r · weight_decay · W - r · adjustment · NS(U),    adjustment = 0.2 · √max(A, B), or √max(1, A / B)

NS(U) takes U's singular values to about 1 by `ns_steps` iterations of Newton and Schulz with the
published quintic coefficients, in BF16 with float32 sums, as published (`orthogonalized`).

It updates the matrices of linear layers (`LINEAR_LAYERS`): those of attention and MLPs, and each
expert's, one by one, also where a checkpoint has several in one tensor (`names.matrices`), so
queries, keys and values are three.
AdamW updates embedding, head, norms, biases, sinks, and of what is inside a layer the routers, the
gates and convolutions of linear attention: small, and a router's row is a class, as a row of the
head is. (Moonlight trains its routers with Muon too.)

Ranks keep rows of a matrix, and so rows of its momentum. For the orthogonalization one rank gets
all rows from all, and sends each its rows of the result; the others do so with other matrices. It
is one function of one whole matrix on one rank: the bits are the same at any number of ranks, and,
as its sums are the backend's products, at any number of threads too (`tests/rl/test_muon.py`,
`tests/distributed/test_learning.py`); with `consistency: fast` neither is promised. Left out:
momentum in fewer bits, and other coefficients.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import ClassVar

import torch
from torch import Tensor

from isobit.kernels import Ops
from isobit.precision.flow import LINEAR_LAYERS
from isobit.rl.optim.base import STEP, Form
from isobit.rl.optim.masters import UpdatedMasters, grouped, parts_of
from isobit.rl.optim.schedule import OptimizerSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
AT_ONCE = 1 << 22
"""Elements that a rank orthogonalizes between two meetings: many small matrices, or a large one."""
_BUFFER = "momentum_buffer"
Turn = Sequence[Sequence[str]]
"""By rank, the masters that it orthogonalizes between two meetings."""


class Muon:
    """The `isobit.rl.optim.base.Optimizer` for the matrices of linear layers."""

    label: ClassVar[str] = "muon"
    whole_matrices: ClassVar[bool] = True

    def __init__(
        self, masters: UpdatedMasters, names: Sequence[str], settings: OptimizerSettings
    ) -> None:
        self._masters, self.settings, self._ops = masters, settings, masters.ops
        self._shards, self._ranks = masters.shards, masters.shards.ranks
        self._assigned = _assigned(
            {name: self._shards.shapes[name] for name in names}, self._ranks.size
        )
        self._buffers: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}

    @staticmethod
    def takes(name: str, shape: Sequence[int], settings: OptimizerSettings) -> bool:
        return (
            settings.name == "muon" and len(shape) == 2 and name.rpartition(".")[2] in LINEAR_LAYERS
        )

    @staticmethod
    def forms(shape: tuple[int, ...]) -> Mapping[str, Form]:
        return {"step": STEP, _BUFFER: Form(torch.float32, shape)}

    def update(self, names: Sequence[str], rate: float) -> None:
        updated = {name for local in self._ranks.all_gather_json(list(names)) for name in local}
        turns = [
            list(
                grouped(
                    ((n, math.prod(self._shards.shapes[n])) for n in mine if n in updated), AT_ONCE
                )
            )
            for mine in self._assigned
        ]
        for turn in zip_longest(*turns, fillvalue=()):
            self._take_turn(turn, rate)

    def _take_turn(self, turn: Turn, rate: float) -> None:
        whole = self._all_rows(
            turn, {n: self._momentum(n) for batch in turn for n in batch if self._shards.owned(n)}
        )
        for name, matrices in whole.items():
            heights = list(self._masters.matrices.get(name, (len(matrices),)))
            for matrix in matrices.split(heights):
                update = orthogonalized(matrix, self.settings.ns_steps, self._ops)
                matrix.copy_(update.mul_(adjustment(matrix.shape, self.settings.adjust_lr)))
        for name, change in self._own_rows(turn, whole).items():
            self._apply(name, change, rate)

    def _momentum(self, name: str) -> Tensor:
        """Update the momentum of this rank's rows, return the rows that are to be orthogonalized,
        and free their gradient."""
        gradient, momentum = self._masters.holders[name].grad, self.settings.momentum
        assert gradient is not None
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = torch.zeros_like(gradient)
        # no lerp, and no sum with a factor: at the end of a vector they may be rounded in another
        # way
        buffer.add_(gradient.sub(buffer).mul_(1 - momentum))
        moment = (
            buffer.sub(gradient).mul_(momentum).add_(gradient)
            if self.settings.nesterov
            else buffer.clone()
        )
        self._masters.free_gradients([name])
        return moment

    def _all_rows(self, turn: Turn, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather, from the rows that every rank keeps, all rows of the masters that this rank
        orthogonalizes in a turn."""
        mine = turn[self._ranks.rank]
        tensors = [[rows[name] for name in names if name in rows] for names in turn]
        whole = {
            name: torch.empty(self._shards.shapes[name], device=self._ops.device) for name in mine
        }
        pieces = [self._rows_of(whole, rank) for rank in range(self._ranks.size)]
        self._exchange(tensors, pieces)
        return whole

    def _own_rows(self, turn: Turn, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of all masters of a turn, from whole ones; the inverse of
        `_all_rows`."""
        pieces = [self._rows_of(whole, rank) for rank in range(self._ranks.size)]
        local: dict[str, Tensor] = {}
        for name in (name for names in turn for name in names if self._shards.owned(name)):
            local[name] = torch.empty(self._shards.own_shape(name), device=self._ops.device)
        self._exchange(pieces, [[local[name] for name in names if name in local] for names in turn])
        return local

    def _rows_of(self, whole: Mapping[str, Tensor], rank: int) -> list[Tensor]:
        """Return views of the rows that a rank keeps."""
        return [tensor[slice(*self._shards.rows[name][rank])] for name, tensor in whole.items()]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send tensors to each rank, and write what each sends into the `received`."""
        message = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        into = [tensor for tensors in received for tensor in tensors]
        sizes, expected = (
            [sum(t.numel() for t in group) for group in side] for side in (sent, received)
        )
        joined = torch.cat(message) if message else torch.empty(0, device=self._ops.device)
        data = self._ranks.all_to_all(joined, sizes, expected, range(self._ranks.size))()
        for tensor, piece in zip(
            into, data.split([tensor.numel() for tensor in into]) if into else ()
        ):
            tensor.copy_(piece.view_as(tensor))

    def _apply(self, name: str, change: Tensor, rate: float) -> None:
        step = self._steps[name] = self._steps.get(name, 0) + 1
        for span in parts_of(change.numel()):
            master = self._masters.wide(name, span)
            master.mul_(1 - rate * self.settings.weight_decay)
            master.sub_(change.view(-1)[span].mul_(rate))
            self._masters.put(name, span, master, step)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {
            name: {"step": torch.tensor(float(self._steps[name])), _BUFFER: buffer}
            for name, buffer in self._buffers.items()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._steps = {name: int(tensors["step"]) for name, tensors in state.items()}
        self._buffers = {
            name: tensors[_BUFFER].to(self._masters.parameters[name].device, copy=True)
            for name, tensors in state.items()
        }


def orthogonalized(matrix: Tensor, steps: int, ops: Ops) -> Tensor:
    """Compute U·Vᵀ of a matrix [A, B] float32 whose singular value decomposition is U·S·Vᵀ, about:
    singular values are within some 0.3 of 1 after 5 steps, and smaller where S is far smaller than
    its norm. The result is float32, of BF16 numbers.

    With X = matrix / its norm, on the side that has fewer rows, each step is X = a · X + (b · X·Xᵀ
    + c · (X·Xᵀ)²) · X; each of the three results is rounded once to BF16, its products as
    `Ops.product`.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    norm = math.sqrt(math.fsum(ops.square_sums(matrix).tolist()))
    x = (matrix.t() if tall else matrix).mul(1 / max(norm, EPS)).bfloat16().contiguous()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = ops.product(x, ops.prepare(x))
        squared = ops.product(gram, ops.prepare(gram), out=torch.float32)
        polynomial = squared.mul_(c).add_(gram.float().mul_(b)).bfloat16()
        higher = ops.product(polynomial, ops.prepare(x.t().contiguous()), out=torch.float32)
        x = higher.add_(x.float().mul_(a)).bfloat16()
    return (x.t() if tall else x).float()


def adjustment(shape: Sequence[int], rule: str) -> float:
    """Return the factor of the learning rate of a matrix [A, B]. `match_rms_adamw`: an orthogonal
    matrix has the root mean square 1 / √max(A, B), and AdamW's updates one of 0.2 to 0.4 (arXiv
    2502.16982, section 2.2)."""
    rows, columns = shape
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def working_bytes(sizes: Sequence[int]) -> int:
    """Return the most bytes that an update of matrices of these numbers of elements takes for a
    moment: the matrices of a turn as they are sent, as they arrive, whole, and in BF16 next to a
    product."""
    return 16 * min(sum(sizes), max([AT_ONCE, *sizes]))


def _assigned(shapes: Mapping[str, tuple[int, ...]], size: int) -> list[list[str]]:
    """Return, by rank, the masters that the rank orthogonalizes: the costliest first, each given to
    the rank that has the least to do. The result depends only on the shapes and the number of
    ranks."""

    def cost(name: str) -> int:
        short, long = sorted(shapes[name])
        return short * short * (2 * long + short)

    shares: list[list[str]] = [[] for _ in range(size)]
    least = [(0, rank) for rank in range(size)]
    for name in sorted(shapes, key=lambda name: (-cost(name), name)):
        busy, rank = heapq.heappop(least)
        shares[rank].append(name)
        heapq.heappush(least, (busy + cost(name), rank))
    return shares

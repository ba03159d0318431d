"""Working weights of which a group of ranks holds one copy: each keeps its output rows of every
weight, and a part (a layer, the embedding, the head) is whole on a rank while it is open.

The rows that a rank keeps are those that it multiplies by in a rollout (`model/divided`). The learner
opens a part before it uses it, in the forward and again in the backward, and two at most are open.
The tensors of a closed part stay the objects that they are, without memory. All ranks of a group open
the same parts in the same order: one that has nothing to compute follows (`following`). Left out:
which rows are whose (`distributed/layout.py`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from isobit.distributed import Ranks
from isobit.distributed.layout import Layout, Move, moves
from isobit.distributed.shards import Rows
from isobit.distributed.weights import Stored, as_bytes, part_of
from isobit.errors import IsobitError, RankLost
from isobit.kernels import Operand, Ops, Stacked, tensors_of
from isobit.model.weights.layout import Layer, Outside, made_like, stored_in, stored_rows
from isobit.model.weights.masters import Masters
from isobit.precision import PackedFP4, QTensor

_MOST_OPEN = 2
_Piece = TypeVar("_Piece", bound=Layer | Outside)
Reached = Callable[[str], None]
"""Called with each part that a backward, which others compute, has reached."""


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of a working weight: the `whole`, which has memory while its part is open, and the
    rows of it that this rank keeps. `height`: of the master's rows, of which a row is made;
    `ranges`: of these, by rank."""

    name: str
    whole: Tensor
    height: int
    ranges: tuple[tuple[Rows, ...], ...]
    local: Tensor

    def pieces(self, rank: int) -> list[Tensor]:
        """Return the bytes of a rank's rows in the whole, range by range."""
        return [_bytes_of(self.whole, rows, self.height) for rows in self.ranges[rank]]

    def within(self, rows: Rows, rank: int) -> Tensor:
        """Return the bytes of rows that this rank keeps, among its own."""
        start = 0
        for lo, hi in self.ranges[rank]:
            if lo <= rows[0] < hi:
                shift = start - lo
                return _bytes_of(self.local, (rows[0] + shift, rows[1] + shift), self.height)
            start += hi - lo
        raise AssertionError(f"rows {rows} of {self.name} are another rank's")


@dataclass(frozen=True, eq=False)
class _Part:
    tensors: list[_Tensor] = field(default_factory=list)
    storages: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)


class DividedWeights:
    """The working weights of which a `group` keeps the rows that a `layout` says."""

    def __init__(self, layout: Layout, group: Ranks) -> None:
        self.layout, self.group = layout, group
        self._parts: dict[str, _Part] = {}
        self._tensors: dict[int, _Tensor] = {}  # by id of the whole
        self._operands: dict[str, list[Operand]] = {}
        self._own: dict[int, Tensor] = {}  # bytes, by the storage of the whole
        self._shapes: dict[int, torch.Size] = {}  # of each tensor's own rows there, if it has any
        self._open: list[str] = []
        self._expected: list[tuple[str, bool]] | None = None
        self._moves: dict[str, list[Move]] = {}

    def take(self, piece: _Piece) -> _Piece:
        """Keep this rank's rows of a new layer, or of what is outside the layers, and give back the
        memory of the whole. Those of one storage, as experts have it, stay in one."""
        by_storage: dict[int, list[Stored]] = {}
        seen = set[int]()
        for name, operand, _ in stored_in(piece):
            if not self.layout.divided(name) or id(operand) in seen:  # a tied head
                continue
            seen.add(id(operand))
            if isinstance(operand, PackedFP4):
                raise IsobitError("ranks do not hold weights of two codes to a byte together yet")
            self._operands.setdefault(name, []).append(operand)
            for stored in stored_rows(name, operand):
                key = stored.tensor.untyped_storage()._cdata
                by_storage.setdefault(key, []).append(stored)
        for key, of_one in by_storage.items():
            self._keep(key, of_one)
        for name in {part_of(stored.name) for of_one in by_storage.values() for stored in of_one}:
            self._close(name)
        return piece

    def _keep(self, key: int, of_one: Sequence[Stored]) -> None:
        """Keep this rank's rows of the tensors of one storage."""
        pieces = [
            [
                _bytes_of(t.tensor, rows, t.height)
                for rows in self.layout.rows(t.name, self.group.rank)
            ]
            for t in of_one
        ]
        whole = of_one[0].tensor
        layer = self._parts.setdefault(part_of(of_one[0].name), _Part())
        local = self._own[key] = torch.cat(
            [as_bytes(whole[:0]), *(p for rows in pieces for p in rows)]
        )
        sizes = [sum(map(len, rows)) for rows in pieces]
        for stored, rows in zip(of_one, local.split(sizes)):
            layer.tensors.append(self._kept(stored, rows))
            self._tensors[id(stored.tensor)] = layer.tensors[-1]
            if len(layer.tensors[-1].local):
                self._shapes[key] = layer.tensors[-1].local.shape
        storage = whole.untyped_storage()
        layer.storages[key] = storage, storage.nbytes()

    def _kept(self, stored: Stored, data: Tensor) -> _Tensor:
        ranges = tuple(self.layout.rows(stored.name, rank) for rank in range(self.group.size))
        whole = stored.tensor
        local = data.view(whole.dtype).view(-1, *whole.shape[1:])
        return _Tensor(stored.name, whole, stored.height, ranges, local)

    def own_stack(self, stack: Stacked) -> Stacked:
        """Return the rows that this rank keeps of its experts, in one storage."""
        wholes = stack.data, stack.scale, stack.bias
        data, scale, bias = (None if whole is None else self._stacked(whole) for whole in wholes)
        assert data is not None
        return Stacked(data, scale, stack.spec, bias=bias)

    def _stacked(self, whole: Tensor) -> Tensor:
        key = whole.untyped_storage()._cdata
        return self._own[key].view(whole.dtype).view(-1, *self._shapes[key])

    def has(self, operand: Any) -> bool:
        """Return whether a working weight is one of these."""
        return any(id(tensor) in self._tensors for tensor in tensors_of(operand))

    def own(self, operand: Operand) -> Operand:
        """Return the rows that this rank keeps of a working weight."""
        data, *scale = (self._tensors[id(tensor)].local for tensor in tensors_of(operand))
        return QTensor(data, scale[0], operand.spec) if isinstance(operand, QTensor) else data

    @torch.no_grad()
    def make(self, masters: Masters, names: Collection[str], ops: Ops) -> None:
        """Make the rows of these masters again, a part at a time: their owners quantize them, and
        send each rank those that it keeps. Raises NonFiniteError on all ranks if one finds NaN or
        infinity."""
        shards, names = masters.shards, {name for name in names if name in self._operands}

        def quantized(part: set[str]) -> dict[str, list[Tensor]]:
            made = {
                name: [
                    tensor
                    for operand in self._operands[name]
                    for tensor in tensors_of(
                        made_like(operand, masters.parameters[name], ops, name)
                    )
                ]
                for name in sorted(filter(shards.owned, part))
            }
            ops.raise_faults()
            return made

        self.close()
        if names and not self._moves:
            for move in moves(shards, self.layout):
                self._moves.setdefault(part_of(move.name), []).append(move)
        for name, layer in self._parts.items():
            if needed := [move for move in self._moves.get(name, ()) if move.name in names]:
                of_part = {move.name for move in needed}
                made = shards.ranks.run_on_all(partial(quantized, of_part))
                self._exchange(layer, needed, made, masters)

    def _exchange(
        self,
        part: _Part,
        needed: Sequence[Move],
        made: dict[str, list[Tensor]],
        masters: Masters,
    ) -> None:
        """Send what was made of a part to those who keep it, in every group."""
        shards, group = masters.shards, self.group
        ranks, tensors = shards.ranks, dict[str, list[_Tensor]]()
        for tensor in part.tensors:
            tensors.setdefault(tensor.name, []).append(tensor)
        sent: list[list[Tensor]] = [[] for _ in range(ranks.size)]
        received: list[list[Tensor]] = [[] for _ in range(ranks.size)]
        for name, (lo, hi), source, target in needed:
            if source == ranks.rank:
                first = shards.own(name)[0]
                pieces = [
                    _bytes_of(rows, (lo - first, hi - first), tensor.height)
                    for rows, tensor in zip(made[name], tensors[name], strict=True)
                ]
                for to in range(target, ranks.size, group.size):
                    sent[to] += pieces
            if target == group.rank:
                received[source] += [t.within((lo, hi), group.rank) for t in tensors[name]]
        sent_sizes = [sum(map(len, pieces)) for pieces in sent]
        sizes = [sum(map(len, pieces)) for pieces in received]
        data = [piece for pieces in sent for piece in pieces]
        empty = torch.empty(0, dtype=torch.uint8, device=part.tensors[0].local.device)
        everyone, message = range(ranks.size), torch.cat([empty, *data])
        wait = ranks.all_to_all(message, sent_sizes, sizes, everyone)
        into = [piece for pieces in received for piece in pieces]
        for piece, values in zip(into, wait().split([len(piece) for piece in into])):
            piece.copy_(values)

    def open(self, part: str) -> None:
        """Make a part whole before it is used."""
        if part in self._open[-1:]:
            return
        if self._expected is not None:
            expected = self._expected.pop(0)[0] if self._expected else "nothing more"
            assert part == expected, f"{part} is opened, and other ranks open {expected}"
        self._fetch(part)

    def close(self) -> None:
        """Give back the memory of all that is open, whose rows have changed."""
        while self._open:
            self._close(self._open.pop())

    @contextmanager
    def following(
        self, forwards: int = 1, backward: bool = False, reached: Reached | None = None
    ) -> Iterator[None]:
        """Let all ranks of the group open the same: at its end, what those forwards and a backward
        open that were not computed inside this context, or only on other ranks."""
        layers = sorted((p for p in self._parts if "." in p), key=lambda p: int(p.split(".")[1]))
        head = "head" if "head" in self._parts else "embed"
        ahead = [(name, False) for name in ("embed", *layers, head)]
        last, self._expected = "".join(self._open[-1:]), []
        for name, back in ahead * forwards + [(name, True) for name in layers[::-1]] * backward:
            if name != last:
                self._expected.append((name, back))
            last = name
        try:
            yield
        except RankLost:
            raise
        except IsobitError:
            self._follow(reached)
            raise
        else:
            self._follow(reached)
        finally:
            self._expected = None

    def _follow(self, reached: Reached | None) -> None:
        for name, back in self._expected or ():
            self._fetch(name)
            if back and reached is not None:
                reached(name)

    def _fetch(self, part: str) -> None:
        if part in self._open:
            self._open.remove(part)
        else:
            while len(self._open) >= _MOST_OPEN:
                self._close(self._open.pop(0))
            for storage, size in self._parts[part].storages.values():
                storage.resize_(size)
            self._gather(self._parts[part].tensors)
        self._open.append(part)

    def _close(self, part: str) -> None:
        for storage, _ in self._parts[part].storages.values():
            storage.resize_(0)

    def _gather(self, tensors: Sequence[_Tensor]) -> None:
        rank, device = self.group.rank, tensors[0].local.device
        by_rank = [[p for t in tensors for p in t.pieces(r)] for r in range(self.group.size)]
        sizes = [sum(map(len, pieces)) for pieces in by_rank]
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        buffers[rank] = torch.cat([as_bytes(tensor.local) for tensor in tensors])
        self.group.share(buffers)()
        for pieces, buffer in zip(by_rank, buffers):
            for piece, values in zip(pieces, buffer.split([len(p) for p in pieces])):
                piece.copy_(values)


def opened(divided: DividedWeights | None, part: str) -> None:
    """Open a part before it is used, where it is divided."""
    if divided is not None:
        divided.open(part)


def reopened(divided: DividedWeights | None, part: str, *results: Tensor | None) -> Any:
    """Return results of a part, whose backward opens it again, where it is divided."""
    if divided is None or not torch.is_grad_enabled():
        return results
    return _Reopened.apply(divided, part, *results)


class _Reopened(Function):
    @staticmethod
    def forward(
        ctx: Any, divided: DividedWeights, part: str, *results: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.divided, ctx.part = divided, part
        ctx.set_materialize_grads(False)
        return tuple(None if result is None else result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.divided.open(ctx.part)
        return None, None, *gradients


def _bytes_of(tensor: Tensor, rows: Rows, height: int) -> Tensor:
    """Return the bytes of a tensor's rows that are made of a master's; a view."""
    return as_bytes(tensor[rows[0] // height : -(-rows[1] // height)])

"""The sum of gradients over micro-batches, in their order, whichever ranks computed them.

The gradient of an optimizer batch is g0 + g1 + g2 + ... in the order of its micro-batches, rounded
after each addition. In a round, rank r computes micro-batch `round * size + r`; every rank then
sends each owner its rows, and the owner adds what came in ascending order. So the sum has the bits
of one process that computes them in turn, at any number of ranks
(tests/distributed/test_exchange.py; with a library's all_reduce it has not). With `gradient_sum_group` g >
1, g micro-batches are added first and then the groups: another order, the same at any number of
ranks. Where g divides the number of ranks, g neighbours (in one machine, as launchers number ranks)
first add up theirs, each for the owners of its place in a machine, and only sums travel on: 1 / g
of the bytes between machines (tests/distributed/test_exchange.py).

Gradients leave during the backward, a layer at a time, so that no rank holds a whole gradient. A
gradient that is absent (an expert that no token chose) is sent as such, since a sum without it is
no sum with zeros: AdamW leaves a parameter without a gradient alone. Left out: what is done with
the sum (`rl/optim`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.distributed.shards import Shards
from isobit.distributed.weights import part_of

_DONE = object()


@dataclass(eq=False)
class OrderedSum:
    """The sum g0 + g1 + ... of one master's rows in the order of micro-batches: in groups of
    `group` micro-batches, and then of the groups."""

    group: int = 1
    _open: Tensor | None = None
    _total: Tensor | None = None
    _number: int = -1

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of micro-batch `index`, which is larger than the indices before."""
        number, turn = divmod(index, self.group)
        if number != self._number:
            self._close()
            self._number = number
        if self._open is not None:
            self._open.add_(gradient)
        elif self.group == 1 and self._total is not None:  # no copy of a group of one
            self._total.add_(gradient)
        else:
            self._open = gradient.clone()
        if turn == self.group - 1:
            self._close()

    def result(self) -> Tensor | None:
        """Return the sum, None if nothing was added."""
        self._close()
        return self._total

    def _close(self) -> None:
        if self._open is not None:
            self._total = self._open if self._total is None else self._total.add_(self._open)
        self._open = None


@dataclass(frozen=True, eq=False)
class Bucket:
    """Masters whose gradients travel together. A message to an owner is a number for each (1:
    present) and its rows of each; a rank that owns none of them gets no message."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # of the message to each rank

    @staticmethod
    def of(names: Sequence[str], shards: Shards) -> "Bucket":
        counts = [
            sum(shards.count(name, rank) for name in names) for rank in range(shards.ranks.size)
        ]
        return Bucket(tuple(names), tuple(count + len(names) if count else 0 for count in counts))


@dataclass(eq=False)
class _Round:
    """The gradients that this rank has of its micro-batch, by master, and the messages that are
    under way."""

    first: int  # micro-batch of rank 0
    active: int  # ranks that have one
    gradients: dict[str, Tensor] = field(default_factory=dict)
    sent: int = 0  # buckets
    waiting: list[Iterator[object]] = field(default_factory=list)


class GradientSum:
    """Sums the gradients of `leaves` (by master, in the order of `shards.shapes`) into `holders`,
    of the rows that this rank keeps: `begin`, a `round` for each micro-batch of the ranks, and
    `finish` sets their `.grad`.

    Where one process has everything, leaves are the holders and autograd adds in this order by
    itself; then only a `gradient_sum_group` needs hooks.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        holders: Mapping[str, Tensor],
        shards: Shards,
        gradient_sum_group: int = 1,
    ) -> None:
        self._leaves, self._holders, self._shards, self._group = (
            leaves,
            holders,
            shards,
            gradient_sum_group,
        )
        self._buckets = [Bucket.of(names, shards) for names in buckets(list(leaves))]
        self._place = {
            name: number for number, bucket in enumerate(self._buckets) for name in bucket.names
        }
        self._sums: dict[str, OrderedSum] = {}
        self._round: _Round | None = None
        ranks = shards.ranks
        self.hooked = ranks.size > 1 or gradient_sum_group > 1
        step = (
            gradient_sum_group
            if gradient_sum_group < ranks.size and ranks.size % gradient_sum_group == 0
            else 1
        )
        self._step = step  # ranks that add up theirs before they send: neighbours, or each alone
        self._near = range(ranks.rank // step * step, ranks.rank // step * step + step)
        self._far = range(
            ranks.rank % step, ranks.size, step
        )  # those of this rank's place among neighbours
        self._owners = sorted(
            range(ranks.size), key=lambda rank: (rank % step, rank)
        )  # in the order of messages
        if step > 1:
            near = [range(first, first + step) for first in range(0, ranks.size, step)]
            ranks.prepare([*near, *(range(offset, ranks.size, step) for offset in range(step))])

    def begin(self) -> None:
        """Begin an optimizer batch: drop the sums of the previous one and the round in progress."""
        self._sums = {name: OrderedSum(self._group) for name in self._holders}
        for holder in self._holders.values():
            holder.grad = None

    @contextmanager
    def round(self, first: int, active: int) -> Iterator[None]:
        """Send this rank's gradients while it differentiates micro-batch `first` + rank inside this
        context, if it is one of the `active` ranks that have a micro-batch. At the end, however it
        ends, all ranks have sent everything."""
        if not self.hooked:
            yield
            return
        self._round = _Round(first, active)
        hooks = [self._hook(name, leaf) for name, leaf in self._leaves.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._send(len(self._buckets))
            while self._round.waiting:
                self._go_on(self._round)
            self._round = None

    def reach(self, part: str) -> None:
        """Send what is complete once a backward has reached a part of the model (`part_of`): of a
        rank that differentiates nothing there, in step with those that do."""
        for number, bucket in enumerate(self._buckets):
            if part_of(bucket.names[0]) == part:
                self._send(number)

    def finish(self) -> None:
        """Give the holders their gradients, the sums over all micro-batches."""
        if self.hooked:
            for name, holder in self._holders.items():
                holder.grad = self._sums[name].result()
            self._sums = {}

    def _hook(self, name: str, leaf: Tensor) -> torch.utils.hooks.RemovableHandle:
        def take(leaf: Tensor) -> None:
            assert self._round is not None
            if leaf.grad is None:  # an expert that no token chose
                return
            index = self._place[name]
            self._send(
                index
            )  # a layer's gradients are complete before the first of the layer below
            assert index >= self._round.sent
            self._round.gradients[name], leaf.grad = leaf.grad, None

        return leaf.register_post_accumulate_grad_hook(take)

    def _send(self, until: int) -> None:
        """Send the buckets below number `until` that were not sent yet."""
        now = self._round
        assert now is not None
        for bucket in self._buckets[now.sent : until]:
            message = self._message(bucket, now)
            self._go_on(now)  # what is under way has travelled during the backward of a layer
            now.waiting.append(self._travel(bucket, message, now))
            next(now.waiting[-1])
        now.sent = max(now.sent, until)

    def _go_on(self, now: _Round) -> None:
        """Wait for all messages that are under way; what they are for is done, or sent on."""
        now.waiting = [travel for travel in now.waiting if next(travel, _DONE) is not _DONE]

    def _travel(self, bucket: Bucket, message: Tensor, now: _Round) -> Iterator[object]:
        """Yield a bucket's way to its owners: it pauses while messages are under way."""
        ranks = self._shards.ranks
        if self._step > 1:
            sizes = [
                sum(bucket.sizes[owner] for owner in self._owners_at(offset))
                for offset in range(self._step)
            ]
            sent = sizes if ranks.rank < now.active else [0] * len(sizes)
            received = [sizes[self._far.start] if rank < now.active else 0 for rank in self._near]
            wait = ranks.all_to_all(message, sent, received, self._near)
            yield None
            message = self._summed(bucket, wait())
        sent = [bucket.sizes[rank] if self._near.start < now.active else 0 for rank in self._far]
        received = [
            self._own(bucket) if rank - rank % self._step < now.active else 0 for rank in self._far
        ]
        wait = ranks.all_to_all(message, sent, received, self._far)
        yield None
        self._take(bucket, wait())

    def _owners_at(self, offset: int) -> range:
        return range(offset, self._size, self._step)

    def _summed(self, bucket: Bucket, received: Tensor) -> Tensor:
        """Add up the neighbours' messages in the order of ranks, and return the sums for the owners
        of this rank's offset, one behind the other."""
        sizes, count = [bucket.sizes[owner] for owner in self._far], len(bucket.names)
        total = received.new_zeros(sum(sizes) if received.numel() else 0)
        if not received.numel():
            return total
        for row in received.split(sum(sizes)):
            for owner, into, piece in zip(self._far, total.split(sizes), row.split(sizes)):
                if not piece.numel():
                    continue
                had, has = into[:count].tolist(), piece[:count].tolist()
                pieces = (self._pieces(bucket, data, owner) for data in (into, piece))
                for held, there, rows, more in zip(had, has, *pieces):
                    if there:
                        rows.add_(more) if held else rows.copy_(more)
                torch.maximum(into[:count], piece[:count], out=into[:count])
        return total

    @property
    def _size(self) -> int:
        return self._shards.ranks.size

    def _own(self, bucket: Bucket) -> int:
        return bucket.sizes[self._shards.ranks.rank]

    def _message(self, bucket: Bucket, now: _Round) -> Tensor:
        """Return the bucket's gradients on their way to their owners, taken out of the round."""
        anywhere = next(iter(self._leaves.values()))
        grads = {name: now.gradients.pop(name, None) for name in bucket.names}
        sizes = [
            bucket.sizes[owner] if self._shards.ranks.rank < now.active else 0
            for owner in self._owners
        ]
        message = torch.zeros(sum(sizes), device=anywhere.device)
        for rank, piece in zip(self._owners, message.split(sizes)):
            if not piece.numel():
                continue
            piece[: len(grads)] = torch.tensor([float(g is not None) for g in grads.values()])
            for rows, (name, gradient) in zip(self._pieces(bucket, piece, rank), grads.items()):
                if gradient is not None:
                    lo, hi = self._shards.rows[name][rank]
                    rows.copy_(gradient[lo:hi].reshape(-1))
        return message

    def _pieces(self, bucket: Bucket, message: Tensor, rank: int) -> Sequence[Tensor]:
        """Return the rows of each master in a message to a rank."""
        return message[len(bucket.names) :].split(
            [self._shards.count(name, rank) for name in bucket.names]
        )

    def _take(self, bucket: Bucket, received: Tensor) -> None:
        """Add the messages that have come, in the order of the micro-batches."""
        now = self._round
        assert now is not None
        size, rank = self._own(bucket), self._shards.ranks.rank
        if not size:
            return
        for number, message in enumerate(received.split(size)):
            present = message[: len(bucket.names)].tolist()
            for name, there, rows in zip(
                bucket.names, present, self._pieces(bucket, message, rank)
            ):
                if there and rows.numel():
                    index = now.first + number * self._step
                    self._sums[name].add(index, rows.view(self._shards.own_shape(name)))


def buckets(names: Sequence[str]) -> list[list[str]]:
    """Return the names of trained masters in the order in which a backward completes their
    gradients: the head, the layers from the last, and the embeddings."""
    head = [name for name in names if name in ("head", "final_norm")]
    embed = [name for name in names if "." not in name and name not in head]
    layers: dict[int, list[str]] = {}
    for name in names:
        if name.startswith("layers."):
            layers.setdefault(int(name.split(".")[1]), []).append(name)
    return [
        bucket
        for bucket in (head, *(layers[index] for index in sorted(layers, reverse=True)), embed)
        if bucket
    ]

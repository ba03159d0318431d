"""Several adapters in one forward over one frozen base: each row is of one of them, or of the base
alone.

A row's bits are those that it has where its adapter is the only one
(tests/engine/test_adapters.py), in every flow and at every level under which they do not depend on
its batch: products are then row by row, and the rows of every adapter go through its own factors in
the order of `low_rank.py`. Sums of rows with an adapter stay in float32 until the adapter's are
added. Rows without one are multiplied with them where that leaves their bits (`Ops.rounds_last`),
and else once more. Of experts, rows are sorted by expert and adapter.

Adapters come and go at any time, also from another thread: a forward ends with the factors that it
began with. Where C++ takes these by their addresses, an `Assignment` has them, the rows and their
offsets in its own memory. So a decode step can be recorded (`engine/captured.py`) with it, and
made again for other rows and adapters. Left out: gradients, for which there is one adapter.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.errors import IsobitError, brief
from isobit.kernels import Factors, Operand, Ops, Stacked, picked
from isobit.model.adapters.low_rank import product
from isobit.model.weights.stored import Weight

Numbers = NDArray[np.int64]
"""Of each row's adapter, [T]; -1 for the base alone."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows [R] int64 of a forward on the operators' device, sorted by the number of their adapter,
    or by their expert and that: those of numbers[i] are rows[offsets[i]] to rows[offsets[i + 1]];
    offsets int64 on the CPU."""

    numbers: tuple[Any, ...]
    rows: Tensor
    offsets: Tensor
    _chosen: "dict[tuple[bool, ...], tuple[Rows, Tensor]]" = field(default_factory=dict)

    def choose(self, known: tuple[bool, ...]) -> "tuple[Rows, Tensor]":
        """Return (the adapters of `numbers` that are `known`, the other rows). Most weights have
        the same ones, so they are searched once for all."""
        if known not in self._chosen:
            self._chosen[known] = self._split(known)
        return self._chosen[known]

    def _split(self, known: tuple[bool, ...]) -> "tuple[Rows, Tensor]":
        kept, others = list[tuple[Any, Tensor]](), list[Tensor]()
        bounds = pairwise(self.offsets.tolist())
        for number, (start, stop), chosen in zip(self.numbers, bounds, known):
            part = self.rows[start:stop]
            if chosen:
                kept.append((number, part))
            else:
                others.append(part)
        none = self.rows[:0]
        ends = torch.tensor([0, *(len(part) for _, part in kept)]).cumsum(0)
        found = Rows(
            tuple(number for number, _ in kept), torch.cat([none, *(p for _, p in kept)]), ends
        )
        return found, torch.cat([none, *others])


class _Adapter:
    """A served adapter: its factors by the place of their weight, and their addresses [weights]
    int64 (`Factors.address`)."""

    def __init__(self, found: Sequence[Factors | None]) -> None:
        self.factors = {place: each for place, each in enumerate(found) if each is not None}
        self.addresses = np.array([0 if each is None else each.address for each in found], np.int64)


class Assignment:
    """The adapter of each row of a forward. Its memory stays, so a recording can have its
    addresses: `rows` [R], sorted by the number of their adapter, `offsets` [G + 1] of adapters
    among them, and the `addresses` [G, weights] of their factors, 0 for none; int64 on the CPU.
    Where a forward has fewer adapters, the last are empty."""

    def __init__(self, serving: "MultiLora", rows: int, groups: int) -> None:
        """Allocate for forwards of up to `rows` rows and `groups` adapters, the base among them."""
        self._serving, self._groups = serving, groups
        self._rows, self._offsets = np.zeros(rows, np.int64), np.zeros(groups + 1, np.int64)
        self._addresses = np.zeros((groups, serving.num_weights), np.int64)
        self._tensors = [torch.from_numpy(x) for x in (self._rows, self._offsets, self._addresses)]
        self._of: Numbers = np.zeros(0, np.int64)
        self._by_adapter: Rows | None = None
        self._by_expert: tuple[Tensor, Rows] | None = None
        self.adapters = dict[int, _Adapter]()
        """Of the present forward, by number."""

    def fill(self, numbers: Numbers) -> None:
        """Set the adapter numbers of the next forward's rows, and hold its adapters. Raises
        IsobitError for one that is not served."""
        order, starts, present = _sorted(numbers)
        adapters = [None if n < 0 else self._serving.adapter(n) for n in present]
        self._of, self._by_adapter, self._by_expert = numbers, None, None
        self.adapters = {n: one for n, one in zip(present, adapters) if one is not None}
        self._rows[: len(order)] = order
        self._offsets[: len(starts)], self._offsets[len(starts) :] = starts, len(order)
        self._addresses[len(starts) :] = 0
        for group, one in enumerate(adapters):
            self._addresses[group] = 0 if one is None else one.addresses

    @contextmanager
    def of(self, numbers: Numbers) -> Iterator[None]:
        """Fill it for the time inside, and hold nothing afterwards: removing an adapter frees its
        factors."""
        self.fill(numbers)
        try:
            yield
        finally:
            self.adapters = {}
            self._addresses[:] = 0

    def table(self, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a weight's addresses, rows and offsets. How many adapters there are is not said,
        since the next forward of as many rows may have more of them."""
        rows, offsets, addresses = self._tensors
        for one in self.adapters.values():
            assert one.addresses[place] or place not in one.factors, "factors without an address"
        groups = min(self._groups, len(self._of))
        return addresses[:groups, place], rows[: len(self._of)], offsets[: groups + 1]

    def factors(self, number: int, place: int) -> Factors | None:
        """Return an adapter's factors of a weight, None without any."""
        one = self.adapters.get(number)
        return None if one is None else one.factors.get(place)

    def by_adapter(self, device: torch.device) -> Rows:
        """Return the forward's rows. Their numbers are read from a tensor, so that a recorder sees
        that the forward depends on them."""
        if self._by_adapter is None:
            order, starts, _ = _sorted(self._of)
            numbers = torch.from_numpy(self._of[order[starts]]).tolist()
            offsets = torch.from_numpy(np.append(starts, len(order)))
            self._by_adapter = Rows(tuple(numbers), torch.from_numpy(order).to(device), offsets)
        return self._by_adapter

    def by_expert(self, token: Tensor, offsets: Tensor) -> Rows:
        """Return the places [T k] of rows that are sorted by expert, by the (expert, number) of
        each. token [T k]: each row's place in the forward; offsets [experts + 1]: where an expert's
        begin. Found once for both matrices of the experts. Waits for a GPU."""
        if self._by_expert is None or self._by_expert[0] is not token:
            number = self._of[token.cpu().numpy()]
            expert = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets.cpu().numpy()))
            order = np.lexsort((number, expert))
            keys = np.stack((expert[order], number[order]), 1)
            new = np.ones(len(keys), dtype=bool)
            new[1:] = (keys[1:] != keys[:-1]).any(1)
            starts = np.flatnonzero(new)
            found = Rows(
                tuple(map(tuple, keys[starts].tolist())),
                torch.from_numpy(order).to(token.device),
                torch.from_numpy(np.append(starts, len(keys))),
            )
            self._by_expert = token, found
        return self._by_expert[1]


def _sorted(numbers: Numbers) -> tuple[Numbers, Numbers, list[int]]:
    """Rows by their number, where those of each begin, and the numbers in turn."""
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))
    return order, starts, in_order[starts].tolist()


class _Present(threading.local):
    """The assignment of the forward that a thread computes."""

    assignment: Assignment | None = None


class MultiLora:
    """The numbers of the adapters that are served, by name, their factors by weight, and the
    assignment of the present forward, of which each thread has its own."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self._adapters: dict[int, _Adapter] = {}
        self._weights: dict[str, AdapterRows] = {}
        self._used: dict[str, int] = {}
        self._numbers, self._lock = count(), threading.Lock()
        self._present = _Present()

    @property
    def num_weights(self) -> int:
        """The number of the model's weights that adapters may have factors of."""
        return len(self._weights)

    def of(self, weight: str) -> "AdapterRows":
        """Return what multiplies rows by a weight, for all adapters that will ever be served."""
        return self._weights.setdefault(weight, AdapterRows(self, len(self._weights)))

    def enter(self, name: str, factors: Callable[[str], Factors | None]) -> None:
        """Serve one more adapter, whose `factors` of a weight are asked for. Raises IsobitError for
        a name that is or was another's: the pages that an engine remembers are found by it."""
        with self._lock:  # the name is taken before the factors are made, which takes long
            if name in self._used:
                raise IsobitError(
                    f"adapter: the name {brief(name)!r} was given to another one before; give a "
                    "new name"
                )
            number = self._used[name] = next(self._numbers)
        try:
            self._adapters[number] = _Adapter([factors(weight) for weight in self._weights])
        except BaseException:
            del self._used[name]
            raise
        self.names[name] = number

    def leave(self, name: str) -> None:
        """Serve an adapter no longer, and free its factors when no forward has them. Raises
        IsobitError for one that is not served."""
        with self._lock:
            number = self.number(name)
            del self.names[name], self._adapters[number]

    def number(self, name: str | None) -> int:
        """Return the number of an adapter, -1 for the base alone. Raises IsobitError for one that
        is not served."""
        if name is None:
            return -1
        found = self.names.get(name)
        if found is None:
            raise _left(name)
        return found

    def adapter(self, number: int) -> _Adapter:
        """Raises IsobitError for one that is not served any more."""
        found = self._adapters.get(number)
        if found is None:
            raise _left(next(name for name, used in self._used.items() if used == number))
        return found

    def assignment(self, numbers: Numbers) -> Assignment:
        """For one forward, of rows with these numbers. Raises IsobitError for an adapter that is
        not served."""
        found = Assignment(self, len(numbers), len(np.unique(numbers)))
        found.fill(numbers)
        return found

    @property
    def present(self) -> Assignment:
        """The assignment of the forward that this thread computes."""
        found = self._present.assignment
        assert found is not None
        return found

    @contextmanager
    def forward(self, rows: int, assignment: Assignment | None) -> Iterator[None]:
        """Set this thread's assignment for a forward of `rows` rows; None: they are the base's."""
        before = self._present.assignment
        self._present.assignment = assignment or self.assignment(np.full(rows, -1))
        try:
            yield
        finally:
            self._present.assignment = before


def _left(name: str) -> IsobitError:
    return IsobitError(
        f"adapter: {brief(name)!r} is not served any more; cancel its requests first"
    )


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """A weight of the model, by its place among those that adapters may have factors of."""

    serving: MultiLora
    place: int

    def product(self, x: Operand, weight: Weight, ops: Ops, dtype: torch.dtype) -> Tensor:
        """Return y [T, N] in `dtype` of x [T, K], each row by its own adapter."""
        present, given = self.serving.present, (x, weight.prepared, weight.bias)
        if dtype == torch.bfloat16 and ops.rounds_last(x, weight.prepared):
            return ops.adapted_product(*given, *present.table(self.place), dtype)
        adapted = present.by_adapter(ops.device)
        found = [present.factors(number, self.place) for number in adapted.numbers]
        known = tuple(each is not None for each in found)
        if not any(known):
            return product(x, weight, ops, dtype)[0]
        own, others = (adapted, None) if all(known) else adapted.choose(known)
        factors = [each for each in found if each is not None]
        y = ops.adapted_product(*given, factors, own.rows, own.offsets, dtype)
        if not (others is None or dtype == torch.float32):
            y[others] = product(picked(x, others), weight, ops, dtype)[0]
        return y

    def product_of_experts(
        self,
        x: Operand,
        weights: Sequence[Weight],
        stacked: Stacked,
        token: Tensor,
        offsets: Tensor,
        ops: Ops,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return y [R, N] in `dtype` of x [R, K] sorted by expert, each row by its own adapter and
        its expert's weight; token and offsets as of `Assignment.by_expert`."""
        owners = [each.several for each in weights if isinstance(each.several, AdapterRows)]
        present, places = self.serving.present, [owner.place for owner in owners]
        if not any(place in one.factors for one in present.adapters.values() for place in places):
            return ops.grouped_product(x, stacked, offsets, dtype)
        adapted = present.by_expert(token, offsets)
        found = [present.factors(number, places[expert]) for expert, number in adapted.numbers]
        known = tuple(each is not None for each in found)
        if not any(known):
            return ops.grouped_product(x, stacked, offsets, dtype)
        own, others = (adapted, None) if all(known) else adapted.choose(known)
        factors = [each for each in found if each is not None]
        y = ops.grouped_product(x, stacked, offsets, torch.float32)
        y = ops.add_low_rank(y, x, factors, own.rows, own.offsets, dtype)
        if not (others is None or dtype == torch.float32 or ops.rounds_last(x, stacked.each[0][0])):
            y[others] = ops.grouped_product(x, stacked, offsets, dtype)[others]
        return y

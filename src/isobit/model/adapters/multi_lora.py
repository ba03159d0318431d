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
        groups, rest = list[tuple[Any, Tensor]](), list[Tensor]()
        bounds = pairwise(self.offsets.tolist())
        for number, (start, stop), chosen in zip(self.numbers, bounds, known):
            group_rows = self.rows[start:stop]
            if chosen:
                groups.append((number, group_rows))
            else:
                rest.append(group_rows)
        none = self.rows[:0]
        ends = torch.tensor([0, *(len(group_rows) for _, group_rows in groups)]).cumsum(0)
        selected = Rows(
            tuple(number for number, _ in groups), torch.cat([none, *(p for _, p in groups)]), ends
        )
        return selected, torch.cat([none, *rest])


class _Adapter:
    """A served adapter: its factors by the place of their weight, and their addresses [weights]
    int64 (`Factors.address`)."""

    def __init__(self, factors: Sequence[Factors | None]) -> None:
        self.factors = {index: pair for index, pair in enumerate(factors) if pair is not None}
        self.addresses = np.array(
            [0 if pair is None else pair.address for pair in factors], np.int64
        )


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
        self.adapters = {n: lora for n, lora in zip(present, adapters) if lora is not None}
        self._rows[: len(order)] = order
        self._offsets[: len(starts)], self._offsets[len(starts) :] = starts, len(order)
        self._addresses[len(starts) :] = 0
        for group, lora in enumerate(adapters):
            self._addresses[group] = 0 if lora is None else lora.addresses

    @contextmanager
    def of(self, numbers: Numbers) -> Iterator[None]:
        """Assign rows to adapters inside this context, by the adapter's number; none are assigned
        afterwards."""
        self.fill(numbers)
        try:
            yield
        finally:
            self.adapters = {}
            self._addresses[:] = 0

    def table(self, weight_index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a weight's addresses, rows and offsets. The number of adapters is not among them,
        since the next forward of as many rows may have more adapters."""
        rows, offsets, addresses = self._tensors
        for lora in self.adapters.values():
            assert lora.addresses[weight_index] or weight_index not in lora.factors, (
                "factors without an address"
            )
        groups = min(self._groups, len(self._of))
        return addresses[:groups, weight_index], rows[: len(self._of)], offsets[: groups + 1]

    def factors(self, number: int, weight_index: int) -> Factors | None:
        """Return an adapter's factors of a weight, None without any."""
        lora = self.adapters.get(number)
        return None if lora is None else lora.factors.get(weight_index)

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
            rows = Rows(
                tuple(map(tuple, keys[starts].tolist())),
                torch.from_numpy(order).to(token.device),
                torch.from_numpy(np.append(starts, len(keys))),
            )
            self._by_expert = token, rows
        return self._by_expert[1]


def _sorted(numbers: Numbers) -> tuple[Numbers, Numbers, list[int]]:
    """Return (rows sorted by their adapter's number, where each number's rows begin, the numbers in
    order)."""
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
        """Return the `AdapterRows` of a weight, made at the first call."""
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
        number = self.names.get(name)
        if number is None:
            raise _left(name)
        return number

    def adapter(self, number: int) -> _Adapter:
        """Return the adapter of this name. Raises IsobitError for one that is not served any
        more."""
        adapter = self._adapters.get(number)
        if adapter is None:
            raise _left(next(name for name, used in self._used.items() if used == number))
        return adapter

    def assignment(self, numbers: Numbers) -> Assignment:
        """Assign the rows of one forward to the adapters of these numbers. Raises IsobitError for
        an adapter that is not served."""
        assignment = Assignment(self, len(numbers), len(np.unique(numbers)))
        assignment.fill(numbers)
        return assignment

    @property
    def present(self) -> Assignment:
        """The assignment of the forward that this thread computes."""
        assignment = self._present.assignment
        assert assignment is not None
        return assignment

    @contextmanager
    def forward(self, rows: int, assignment: Assignment | None) -> Iterator[None]:
        """Set this thread's assignment for a forward of `rows` rows; None: they are the base's."""
        previous = self._present.assignment
        self._present.assignment = assignment or self.assignment(np.full(rows, -1))
        try:
            yield
        finally:
            self._present.assignment = previous


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
        present, operands = self.serving.present, (x, weight.prepared, weight.bias)
        if dtype == torch.bfloat16 and ops.rounds_last(x, weight.prepared):
            return ops.adapted_product(*operands, *present.table(self.place), dtype)
        adapted = present.by_adapter(ops.device)
        pairs = [present.factors(number, self.place) for number in adapted.numbers]
        known = tuple(pair is not None for pair in pairs)
        if not any(known):
            return product(x, weight, ops, dtype)[0]
        served, rest = (adapted, None) if all(known) else adapted.choose(known)
        factors = [pair for pair in pairs if pair is not None]
        y = ops.adapted_product(*operands, factors, served.rows, served.offsets, dtype)
        if not (rest is None or dtype == torch.float32):
            y[rest] = product(picked(x, rest), weight, ops, dtype)[0]
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
        owners = [item.several for item in weights if isinstance(item.several, AdapterRows)]
        present, indices = self.serving.present, [owner.place for owner in owners]
        if not any(
            index in lora.factors for lora in present.adapters.values() for index in indices
        ):
            return ops.grouped_product(x, stacked, offsets, dtype)
        adapted = present.by_expert(token, offsets)
        pairs = [present.factors(number, indices[expert]) for expert, number in adapted.numbers]
        known = tuple(item is not None for item in pairs)
        if not any(known):
            return ops.grouped_product(x, stacked, offsets, dtype)
        served, rest = (adapted, None) if all(known) else adapted.choose(known)
        factors = [item for item in pairs if item is not None]
        y = ops.grouped_product(x, stacked, offsets, torch.float32)
        y = ops.add_low_rank(y, x, factors, served.rows, served.offsets, dtype)
        if not (rest is None or dtype == torch.float32 or ops.rounds_last(x, stacked.each[0][0])):
            y[rest] = ops.grouped_product(x, stacked, offsets, dtype)[rest]
        return y

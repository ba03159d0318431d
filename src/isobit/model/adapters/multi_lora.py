"""Several adapters in one forward over one frozen base: each row is of one of them, or of the base
alone.

A row's bits are those that it has where its adapter is the only one
(tests/engine/test_adapters.py), in every flow and at every level under which they do not depend on
its batch: products are then row by row, and the rows of every adapter go through its own factors in
the order of `low_rank.py`. Sums of rows with an adapter stay in float32 until the adapter's are
added. Rows without one are multiplied with them where that leaves their bits (`Ops.rounds_last`),
and else once more. Of experts, rows are sorted by expert and adapter. Adapters come and go between
forwards. Left out: gradients, for which there is one adapter.

Where C++ takes the factors by their addresses, these, the rows and their offsets lie in a `Table`
that is filled before the forward, in the same memory for every one of few rows. So a decode step
can be recorded (`engine/captured.py`), and made again for other adapters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
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
FIXED_ROWS = 64
"""Forwards of up to so many rows have their table in the same memory."""


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
        """Those of the adapters that are `known`, each of `numbers` in turn, and the other rows. Most
        weights have the same ones, so it is found once for all of them."""
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


class Table:
    """Memory for what C++ reads of a forward of up to R rows: `rows` [R], sorted by the number of
    their adapter, `offsets` [R + 1] of adapters among them, and of each weight the `addresses` [R]
    of its factors of these adapters, 0 for none; int64 on the CPU. Adapters that a forward does not
    have are there, without rows."""

    def __init__(self, weights: int, most: int) -> None:
        self._addresses = np.zeros((weights, most), np.int64)
        self._rows, self._offsets = np.zeros(most, np.int64), np.zeros(most + 1, np.int64)
        self.rows, self.offsets = torch.from_numpy(self._rows), torch.from_numpy(self._offsets)
        self.addresses = list(torch.from_numpy(self._addresses))

    def fill(
        self, order: NDArray[np.int64], starts: NDArray[np.int64], of: Sequence[NDArray[np.int64]]
    ) -> None:
        """The rows in their order, where each adapter's begin, and its address by weight."""
        count, groups = len(order), len(starts)
        self._rows[:count], self._offsets[:groups], self._offsets[groups:] = order, starts, count
        self.forget()
        self._addresses[:, :groups] = np.stack(of, 1)

    def forget(self) -> None:
        """All addresses."""
        self._addresses[:] = 0


@dataclass(eq=False)
class MultiLora:
    """The numbers of the adapters that are served, by name, their factors by weight, and the rows
    of the present forward by number; those of the base alone have -1."""

    names: dict[str, int] = field(default_factory=dict)
    table: Table | None = None
    count: int = 0
    """Rows of the present forward."""
    has_addresses: bool = True
    """Whether all factors do, which depends on the operators."""
    _given: NDArray[np.int64] | None = None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _rows: Rows | None = None
    _columns: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    _by_expert: tuple[Tensor, Rows] | None = None
    _weights: "dict[str, AdapterRows]" = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)

    def of(self, weight: str) -> "AdapterRows":
        """What multiplies rows by a weight, for all adapters that will ever be served."""
        return self._weights.setdefault(weight, AdapterRows(self, len(self._weights)))

    def enter(self, name: str, factors: Callable[[str], Factors | None]) -> None:
        """Serve one more adapter, whose `factors` of a weight are asked for. Raises IsobitError for
        a name that is or was another's: the pages that an engine remembers are found by it."""
        if name in self._used:
            raise IsobitError(
                f"adapter: the name {brief(name)!r} was given to another one before; give a new "
                "name"
            )
        made = {weight: factors(weight) for weight in self._weights}
        number = self._used[name] = self.names[name] = len(self._used)
        column = self._columns[number] = np.zeros(len(made), np.int64)
        for place, (weight, found) in enumerate(made.items()):
            if found is not None:
                self._weights[weight].factors[number] = found
                column[place] = found.address
                self.has_addresses = self.has_addresses and found.address != 0

    def leave(self, name: str) -> None:
        """Serve an adapter no longer, and free its factors. Raises IsobitError for one that is not
        served."""
        number = self.number(name)
        del self.names[name], self._columns[number]
        self._fixed.forget()
        for rows in self._weights.values():
            rows.factors.pop(number, None)

    def number(self, name: str | None) -> int:
        """-1 for the base alone. Raises IsobitError for an adapter that is not served."""
        if name is None:
            return -1
        if name not in self.names:
            raise IsobitError(
                f"adapter: {brief(name)!r} is not served any more; cancel its requests first"
            )
        return self.names[name]

    def take(self, numbers: Numbers | None, count: int, device: torch.device) -> None:
        """The numbers [T] int64 of a forward's `count` rows, which are on a device; None: all are
        the base's. A recording does not see it, and has it done again by its caller."""
        given = np.full(count, -1) if numbers is None else numbers
        self._given, self._device, self.count = given, device, count
        self._rows = self._by_expert = None
        order, starts = _sorted(given)
        fixed = count <= FIXED_ROWS
        self.table = self._fixed if fixed else Table(len(self._weights), count)
        none = np.zeros(len(self._weights), np.int64)
        of = [none if n < 0 else self._columns[n] for n in given[order[starts]].tolist()]
        self.table.fill(order, starts, of)

    @cached_property
    def _fixed(self) -> Table:
        return Table(len(self._weights), FIXED_ROWS)

    @property
    def rows(self) -> Rows:
        """Of the present forward. Its numbers are read from a tensor, so that a recorder sees that
        the forward depends on them."""
        if self._rows is None:
            assert self._given is not None
            order, starts = _sorted(self._given)
            self._rows = Rows(
                tuple(torch.from_numpy(self._given[order[starts]]).tolist()),
                torch.from_numpy(order).to(self._device),
                torch.from_numpy(np.append(starts, self.count)),
            )
        return self._rows

    def by_expert(self, token: Tensor, offsets: Tensor) -> Rows:
        """The places [T k] of rows that are sorted by expert, by the (expert, number) of each.
        token [T k]: each row's place in the forward; offsets [experts + 1]: where an expert's
        begin. Found once for both matrices of the experts. Waits for a GPU."""
        if self._by_expert is None or self._by_expert[0] is not token:
            assert self._given is not None
            number = self._given[token.cpu().numpy()]
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


def _sorted(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows by their number, and where those of each begin."""
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    return order, np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """A weight's factors by the number of their adapter. `place`: which of the weights it is."""

    serving: MultiLora
    place: int
    factors: dict[int, Factors] = field(default_factory=dict)

    def product(self, x: Operand, weight: Weight, ops: Ops, dtype: torch.dtype) -> Tensor:
        """y [T, N] in `dtype` of x [T, K], each row by its own adapter."""
        serving = self.serving
        by_address = serving.has_addresses and dtype == torch.bfloat16
        if by_address and ops.rounds_last(x, weight.prepared):
            table, count = serving.table, serving.count
            assert table is not None
            return ops.adapted_product(
                x, weight.prepared, weight.bias, table.addresses[self.place][:count],
                table.rows[:count], table.offsets[: count + 1], dtype,
            )  # fmt: skip
        adapted = serving.rows
        known = tuple(number in self.factors for number in adapted.numbers)
        if not any(known):
            return product(x, weight, ops, dtype)[0]
        own, others = (adapted, None) if all(known) else adapted.choose(known)
        factors = [self.factors[number] for number in own.numbers]
        y = ops.adapted_product(
            x, weight.prepared, weight.bias, factors, own.rows, own.offsets, dtype
        )
        if not (others is None or dtype == torch.float32 or ops.rounds_last(x, weight.prepared)):
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
        """y [R, N] in `dtype` of x [R, K] sorted by expert, each row by its own adapter and its
        expert's weight; token and offsets as of `MultiLora.by_expert`."""
        owners = [each.several for each in weights if isinstance(each.several, AdapterRows)]
        if not any(owner.factors for owner in owners):
            return ops.grouped_product(x, stacked, offsets, dtype)
        adapted = self.serving.by_expert(token, offsets)
        found = [owners[expert].factors.get(number) for expert, number in adapted.numbers]
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

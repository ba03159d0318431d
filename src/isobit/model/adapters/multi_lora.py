"""Several adapters in one forward over one frozen base: each row is of one of them, or of the base
alone.

A row's bits are those that it has where its adapter is the only one
(tests/engine/test_adapters.py), in every flow and at every level under which they do not depend on
its batch: products are then row by row, and the rows of every adapter go through its own factors in
the order of `low_rank.py`. The base is multiplied at most twice, once for the rows with an adapter,
whose sums stay in float32 until the adapters' are added, and once for those without. Adapters come
and go between forwards. Left out: gradients, for which there is one adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.errors import IsobitError, brief
from isobit.kernels import Operand, Ops, plain, weight_of
from isobit.model.adapters.low_rank import add, product
from isobit.model.weights.stored import LowRank, Weight
from isobit.precision import QTensor


@dataclass(eq=False)
class MultiLora:
    """The numbers of the adapters that are served, by name, their factors by weight, and the rows
    of the present forward: [r] int64 by number, on the operators' device; those of the base alone
    by None."""

    names: dict[str, int] = field(default_factory=dict)
    rows: dict[int | None, Tensor] = field(default_factory=dict)
    _weights: "dict[str, AdapterRows]" = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)

    def of(self, weight: str) -> "AdapterRows":
        """What multiplies rows by a weight, for all adapters that will ever be served."""
        return self._weights.setdefault(weight, AdapterRows(self))

    def enter(self, name: str, factors: Callable[[str], tuple[LowRank, ...]]) -> None:
        """Serve one more adapter, whose `factors` of a weight are asked for. Raises IsobitError for
        a name that is or was another's: the pages that an engine remembers are found by it."""
        if name in self._used:
            raise IsobitError(
                f"adapter: the name {brief(name)!r} was given to another one before; give a new "
                "name"
            )
        made = {weight: found for weight in self._weights if (found := factors(weight))}
        number = self._used[name] = self.names[name] = len(self._used)
        for weight, found in made.items():
            self._weights[weight].factors[number] = found

    def leave(self, name: str) -> None:
        """Serve an adapter no longer, and free its factors. Raises IsobitError for one that is not
        served."""
        number = self.number(name)
        del self.names[name]
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

    def take(self, numbers: Tensor | None, count: int, device: torch.device) -> None:
        """The numbers [T] int64, on the CPU, of a forward's `count` rows; None: all are the
        base's."""
        numbers = torch.full((count,), -1) if numbers is None else numbers
        found = {
            int(number): (numbers == number).nonzero().flatten() for number in numbers.unique()
        }
        self.rows = {
            None if number < 0 else number: rows.to(device) for number, rows in found.items()
        }


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """A weight's factors by the number of their adapter."""

    serving: MultiLora
    factors: dict[int, tuple[LowRank, ...]] = field(default_factory=dict)

    def product(self, x: Operand, weight: Weight, ops: Ops, dtype: torch.dtype) -> Tensor:
        """y [T, N] in `dtype` of x [T, K], each row by its own adapter."""
        adapted = [
            (rows, self.factors[n])
            for n, rows in self.serving.rows.items()
            if n is not None and n in self.factors
        ]
        others = [
            rows for n, rows in self.serving.rows.items() if n is None or n not in self.factors
        ]
        if not adapted:
            return product(x, weight, ops, dtype)[0]
        y = torch.empty(
            (x.shape[0], weight_of(weight.prepared).shape[0]),
            dtype=dtype,
            device=adapted[0][0].device,
        )
        places = torch.cat([rows for rows, _ in adapted])
        own = rows_at(x, places)
        total, start = ops.product(own, weight.prepared, weight.bias, torch.float32), 0
        values = plain(own, dtype)  # once for all adapters
        for rows, factors in adapted:
            part = slice(start, start + len(rows))
            add(total[part], values[part], factors, ops, dtype)
            start = part.stop
        y[places] = total.to(dtype)
        if others:
            left = torch.cat(others)
            y[left] = product(rows_at(x, left), weight, ops, dtype)[0]
        return y


def rows_at(x: Operand, rows: Tensor) -> Operand:
    """Some rows of an operand, whose scales each belong to one row."""
    if not isinstance(x, QTensor):
        return x[rows]
    assert x.block[0] == 1, "rows share scales"
    return QTensor(x.data[rows], x.scale[rows], x.spec)

"""Output rows of each working weight by the rank of a group that keeps them.

The ranks of a group hold one copy of a model together. Each multiplies by whole rows of a weight, so
no sum crosses ranks: what travels are copies. Rows are cut by role: attention by heads of keys and
values, an MLP's two halves alike, others into ranges; experts are cut as MLPs where each has a block
for every rank, and elsewhere each is whole on one rank. Ranges are whole blocks of 128 rows, the
height of a scale, and need not be equal. Norms, routers, other vectors, and what gives the latents
of attention are whole on every rank, which takes from some of them its heads' share.

A function of the whole model's shapes and of the group's size, without tensors. Left out: which rank
keeps which rows of the masters (`shards.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd, lcm
from typing import NamedTuple

from isobit.distributed.shards import BLOCK_ROWS, Rows, Shards
from isobit.errors import IsobitError
from isobit.options.precisions import LINEAR_LAYERS
from isobit.precision import BLOCK, Precision

_RANGES = ("o", "down", "embed", "head")
_BY_HEADS = ("qkv", "q_b", "kv_b")
_OF_LATENTS = "qkv_a"


@dataclass(frozen=True, eq=False)
class HeadRows:
    """The heads that ranks divide an attention by: how many, the rows of each in every part of a
    master, by its role, and the columns of each in what `o` multiplies. Rows behind those of all
    heads belong to no head."""

    count: int
    rows: Mapping[str, tuple[int, ...]]
    columns: int

    @property
    def together(self) -> int:
        """The fewest heads whose rows and columns are whole blocks."""
        rows = (n for role in (*_BY_HEADS, _OF_LATENTS) for n in self.rows.get(role, ()))
        return lcm(*(BLOCK_ROWS // gcd(BLOCK_ROWS, n) for n in (*rows, self.columns)))

    @staticmethod
    def of(queries: int, kv: int, dim: int) -> "HeadRows":
        """Return those of an attention with these heads of queries, and of keys and values."""
        wide = queries // kv * dim
        return HeadRows(kv, {"qkv": (wide, dim, dim), "sinks": (queries // kv,)}, wide)


class Move(NamedTuple):
    """Rows of a weight, from a rank of one layout to a rank of another."""

    name: str
    rows: Rows
    source: int
    target: int


def cut(count: int, rank: int, size: int, unit: int = 1) -> Rows:
    """Return a rank's range of `count`, in whole units, as equal as they can be."""
    units = -(-count // unit)
    return min(units * rank // size * unit, count), min(units * (rank + 1) // size * unit, count)


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of a group of `size` ranks: `shapes` of the whole masters by name, the `heads` of
    each attention by its prefix (`layers.3`), and the number of `experts` of a mixture."""

    shapes: Mapping[str, tuple[int, ...]]
    heads: Mapping[str, HeadRows]
    size: int
    experts: int = 0

    def rows(self, name: str, rank: int) -> tuple[Rows, ...]:
        """Return the ranges of a weight's rows that a rank keeps, ascending, none of them empty;
        those of a bias are its weight's."""
        ranges = self._ranges(name, rank) if self.divided(name) else [(0, self.shapes[name][0])]
        return tuple((lo, hi) for lo, hi in ranges if hi > lo)

    def used(self, name: str, rank: int) -> tuple[Rows, ...]:
        """Return the ranges of rows that a rank computes with: those that it keeps, or its heads'
        share of what is whole on every rank."""
        prefix, role = self._role_of(name)
        if prefix not in self.heads or role not in self.heads[prefix].rows:
            return self.rows(name, rank)
        return tuple((lo, hi) for lo, hi in self._head_rows(name, rank) if hi > lo)

    def divided(self, name: str) -> bool:
        """Return whether each row of a weight is on one rank, and not on all; an adapter's factors
        are on all."""
        return name in self.shapes and self._units(name) > 0

    def columns(self, name: str) -> tuple[int, ...] | None:
        """Return how many columns of a weight's operand are on each rank, or None where all are on
        each."""
        prefix, _, role = name.rpartition(".")
        ranks = range(self.size)
        if role == "o" and prefix in self.heads:
            wide = self.heads[prefix].columns
            return tuple(wide * len(self.local_heads(prefix, rank)) for rank in ranks)
        if role != "down" or (self.whole_experts and _expert(name) is not None):
            return None
        cuts = (cut(self.shapes[name][1], rank, self.size, BLOCK_ROWS) for rank in ranks)
        return tuple(hi - lo for lo, hi in cuts)

    def result(self, name: str) -> tuple[int, ...] | None:
        """Return how many columns of a weight's result are on each rank, or None where a rank needs
        only its own."""
        alone = self.whole_experts and _expert(name) is not None
        if name.rpartition(".")[2] not in _RANGES or alone:
            return None
        by_rank = (self.rows(name, rank) for rank in range(self.size))
        return tuple(sum(hi - lo for lo, hi in ranges) for ranges in by_rank)

    def local_heads(self, prefix: str, rank: int) -> range:
        """Return the heads by which an attention is divided that are a rank's."""
        heads = self.heads[prefix]
        return range(*cut(heads.count, rank, self.size, heads.together))

    @cached_property
    def whole_experts(self) -> bool:
        """Whether each expert of a mixture is on one rank, and not by its rows on all."""
        return any(
            self._blocks(name) < self.size
            or (name.endswith("gate_up") and not self._halves_fit(name))
            for name in self.shapes
            if _expert(name) is not None and not name.endswith("_bias")
        )

    def local_experts(self, rank: int) -> range:
        """Return the experts of each mixture of which a rank keeps rows."""
        return range(
            *(cut(self.experts, rank, self.size) if self.whole_experts else (0, self.experts))
        )

    def check(self, precision: Precision) -> None:
        """Raise IsobitError, one line, for a model or a precision that `size` ranks cannot hold
        together."""
        where = f"{self.size} ranks cannot hold a model together"
        rollout = precision.rollout
        if not precision.shared or rollout.calibrated or rollout.calibrated_queries:
            has = "calibrated scales" if precision.shared else "a second engine"
            raise IsobitError(
                f"{where} under precision {precision.name}, which has {has}: choose fp8, "
                "fp8-unified, mxfp8 or bf16"
            )
        roles = {name.rpartition(".")[2] for name in self.shapes}
        for role in (role for role in LINEAR_LAYERS if role in roles):
            flow = precision.linear_flow(precision.rollout, role)
            spec, across = flow.activation, role in ("o", "down")
            grouped = self.experts > 0 and role in ("gate_up", "down")
            if across and spec is not None and not spec.columns_independent:
                fault = f"activations in {spec} have a scale beyond {BLOCK} columns"
            elif grouped and spec is not None and spec.block((2, 1))[0] > 1:
                fault = f"activations in {spec} have a scale of several rows of an expert"
            elif flow.weight is not None and not flow.weight.rows_independent:
                fault = f"weights in {flow.weight} have a scale of all rows"
            else:
                continue
            raise IsobitError(
                f"{where} under precision {precision.name}: {role}'s {fault}; choose fp8, "
                "fp8-unified, mxfp8 or bf16"
            )
        for name in self.shapes:
            if self.divided(name) and (most := self._units(name)) < self.size:
                raise IsobitError(f"{where}: {name} has {most} parts, so choose {most} at most")
            coded = self.divided(name) or name.endswith(f".{_OF_LATENTS}")
            ranges = (rows for rank in range(self.size) for rows in self.used(name, rank))
            if coded and any(lo % BLOCK_ROWS for lo, _ in ranges):
                raise IsobitError(
                    f"{where}: rows of {name} in a head or half are no multiple of {BLOCK_ROWS}"
                )

    def _units(self, name: str) -> int:
        """Return the number of parts that a weight can be divided into, 0 if it is whole on every
        rank."""
        prefix, role = self._role_of(name)
        if _expert(name) is not None and self.whole_experts:
            return self.experts
        if role in _BY_HEADS and prefix in self.heads:
            return -(-self.heads[prefix].count // self.heads[prefix].together)
        return self._blocks(name) if role in ("gate_up", *_RANGES) else 0

    def _blocks(self, name: str) -> int:
        """Return the number of blocks of a weight's rows, in a half where it has halves."""
        prefix, role = self._role_of(name)
        rows = self._inner(prefix) if role == "gate_up" else self.shapes[name][0]
        return -(-rows // BLOCK_ROWS)

    def _halves_fit(self, name: str) -> bool:
        """Return whether a half ends where a block does, or there is one."""
        inner = self._inner(name.rpartition(".")[0])
        return inner % BLOCK_ROWS == 0 or self.shapes[name][0] == inner

    def _ranges(self, name: str, rank: int) -> Iterator[Rows]:
        """Yield the ranges that a rank has of what is divided."""
        prefix, role = self._role_of(name)
        count, expert = self.shapes[name][0], _expert(name)
        if expert is not None and self.whole_experts:
            yield (0, count if expert in self.local_experts(rank) else 0)
        elif role in _BY_HEADS:
            yield from self._head_rows(name, rank)
        elif role == "gate_up":
            inner = self._inner(prefix)
            lo, hi = cut(inner, rank, self.size, BLOCK_ROWS)
            yield from ((start + lo, start + hi) for start in range(0, count, inner))
        else:
            yield cut(count, rank, self.size, BLOCK_ROWS)

    def _head_rows(self, name: str, rank: int) -> Iterator[Rows]:
        """Yield the rows of a rank's heads in each part of a master, and those of no head."""
        prefix, role = self._role_of(name)
        sizes, local = self.heads[prefix].rows[role], self.local_heads(prefix, rank)
        *starts, end = accumulate((n * self.heads[prefix].count for n in sizes), initial=0)
        for start, height in zip(starts, sizes):
            yield start + local.start * height, start + local.stop * height
        yield end, self.shapes[name][0]

    def _role_of(self, name: str) -> tuple[str, str]:
        """Return a master's prefix and role; a bias has its weight's."""
        weight = name.removesuffix("_bias")
        prefix, _, role = (weight if weight in self.shapes else name).rpartition(".")
        return prefix, role

    def _inner(self, prefix: str) -> int:
        return self.shapes[f"{prefix}.down"][1]


def _expert(name: str) -> int | None:
    """Return the number of the expert that a weight belongs to."""
    words = name.split(".")
    return int(words[words.index("experts") + 1]) if "experts" in words else None


def moves(source: Layout | Shards, target: Layout) -> Iterator[Move]:
    """Yield what each rank of `target` needs, every row of it once. What is whole on all ranks of a
    source comes from one of them each, in turn."""
    for name in target.shapes:
        for to in range(target.size):
            for lo, hi in target.rows(name, to):
                for rank, rows in _kept(source, name, to):
                    first, last = max(lo, rows[0]), min(hi, rows[1])
                    if first < last:
                        yield Move(name, (first, last), rank, to)


def _kept(source: Layout | Shards, name: str, to: int) -> Iterator[tuple[int, Rows]]:
    if isinstance(source, Shards):
        yield from enumerate(source.rows[name])
        return
    whole = (to % source.size,)
    for rank in range(source.size) if source.divided(name) else whole:
        yield from ((rank, rows) for rows in source.rows(name, rank))

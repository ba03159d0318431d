"""Which rank of a group keeps which output rows of each working weight.

The ranks of a group hold one copy of a model together. Each multiplies by whole rows of a weight, so
no sum crosses ranks: what travels are copies. Rows are cut by role: attention by heads of keys and
values, an MLP's two halves alike, a mixture by whole experts, others into ranges. Ranges are whole
blocks of 128 rows, the height of a scale, and need not be equal. Norms, routers and other vectors
are whole on every rank.

A function of the whole model's shapes and of the group's size, without tensors. Left out: which rank
keeps which rows of the masters (`shards.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from isobit.distributed.shards import BLOCK_ROWS, Rows, Shards
from isobit.errors import IsobitError
from isobit.precision import BLOCK, Precision

_RANGES = ("o", "down", "embed", "head")


class HeadRows(NamedTuple):
    """The heads of an attention: of queries, of keys and values, and their dimension."""

    queries: int
    kv: int
    dim: int


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
        return tuple((lo, hi) for lo, hi in self._ranges(name, rank) if hi > lo)

    def divided(self, name: str) -> bool:
        """Return whether each row of a weight is on one rank, and not on all."""
        return self._units(name) > 0

    def columns(self, name: str) -> tuple[int, ...] | None:
        """Return how many columns of a weight's operand are on each rank, or None where all are on
        each."""
        prefix, _, role = name.rpartition(".")
        ranks = range(self.size)
        if role == "o" and prefix in self.heads:
            heads = (self.local_heads(prefix, rank) for rank in ranks)
            return tuple(local.queries * local.dim for local in heads)
        if role != "down" or _expert(name) is not None:
            return None
        cuts = (cut(self.shapes[name][1], rank, self.size, BLOCK_ROWS) for rank in ranks)
        return tuple(hi - lo for lo, hi in cuts)

    def local_heads(self, prefix: str, rank: int) -> HeadRows:
        """Return the heads of an attention that a rank computes."""
        queries, kv, dim = self.heads[prefix]
        lo, hi = self._kv_heads(prefix, rank)
        return HeadRows((hi - lo) * queries // kv, hi - lo, dim)

    def local_experts(self, rank: int) -> range:
        """Return the experts of each mixture that a rank keeps."""
        return range(*cut(self.experts, rank, self.size))

    def check(self, precision: Precision) -> None:
        """Raise IsobitError, one line, for a model or a precision that so many ranks cannot hold
        together."""
        where = f"{self.size} ranks cannot hold a model together"
        rollout = precision.rollout
        if not precision.shared or rollout.calibrated or rollout.calibrated_queries:
            has = "calibrated scales" if precision.shared else "a second engine"
            raise IsobitError(
                f"{where} under precision {precision.name}, which has {has}: choose fp8, "
                "fp8-unified, mxfp8 or bf16"
            )
        for role in ("qkv", "o", "gate_up", "down"):
            flow = precision.linear_flow(precision.rollout, role)
            across = flow.activation if role in ("o", "down") else None
            if across is not None and not across.columns_independent:
                what = f"activations in {across} have a scale beyond {BLOCK} columns"
            elif flow.weight is not None and not flow.weight.rows_independent:
                what = f"weights in {flow.weight} have a scale of all rows"
            else:
                continue
            raise IsobitError(
                f"{where} under precision {precision.name}: {role}'s {what}; choose fp8, "
                "fp8-unified, mxfp8 or bf16"
            )
        for name in filter(self.divided, self.shapes):
            if (most := self._units(name)) < self.size:
                raise IsobitError(f"{where}: {name} has {most} parts, so choose {most} at most")
            if any(lo % BLOCK_ROWS for rank in range(self.size) for lo, _ in self.rows(name, rank)):
                raise IsobitError(
                    f"{where}: rows of {name} in a head or half are no multiple of {BLOCK_ROWS}"
                )

    def _units(self, name: str) -> int:
        """Return the number of parts that a weight can be divided into, 0 if it is whole on every
        rank."""
        weight = name.removesuffix("_bias")
        prefix, _, role = weight.rpartition(".")
        if _expert(name) is not None:
            return self.experts
        if role == "qkv" and prefix in self.heads:
            return -(-self.heads[prefix].kv // _heads_of_a_block(self.heads[prefix].dim))
        if role == "gate_up":
            return -(-self._inner(prefix) // BLOCK_ROWS)
        return -(-self.shapes[name][0] // BLOCK_ROWS) if role in _RANGES else 0

    def _ranges(self, name: str, rank: int) -> Iterator[Rows]:
        weight, count = name.removesuffix("_bias"), self.shapes[name][0]
        prefix, _, role = weight.rpartition(".")
        expert = _expert(name)
        if not self.divided(name) or (expert in self.local_experts(rank)):
            yield 0, count
        elif expert is not None:
            return
        elif role == "qkv":
            yield from self._head_rows(prefix, rank)
        elif role == "gate_up":
            inner = self._inner(prefix)
            lo, hi = cut(inner, rank, self.size, BLOCK_ROWS)
            yield from ((start + lo, start + hi) for start in range(0, count, inner))
        else:
            yield cut(count, rank, self.size, BLOCK_ROWS)

    def _head_rows(self, prefix: str, rank: int) -> Iterator[Rows]:
        """Yield the rows of a rank's queries, keys and values."""
        queries, kv, dim = self.heads[prefix]
        lo, hi = self._kv_heads(prefix, rank)
        for start, each in ((0, queries // kv), (queries, 1), (queries + kv, 1)):
            yield (start + lo * each) * dim, (start + hi * each) * dim

    def _kv_heads(self, prefix: str, rank: int) -> Rows:
        heads = self.heads[prefix]
        return cut(heads.kv, rank, self.size, _heads_of_a_block(heads.dim))

    def _inner(self, prefix: str) -> int:
        return self.shapes[f"{prefix}.down"][1]


def _expert(name: str) -> int | None:
    """Return the number of the expert that a weight belongs to."""
    words = name.split(".")
    return int(words[words.index("experts") + 1]) if "experts" in words else None


def _heads_of_a_block(dim: int) -> int:
    """Return the fewest heads whose rows are whole blocks."""
    return BLOCK_ROWS // gcd(BLOCK_ROWS, dim)


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

"""Which rank keeps which rows of the masters: whole blocks of 128 rows, for each master one range
of rows per rank.

128 rows are the height of a quantization block, so an owner quantizes its rows without the others'.
Larger masters are cut into as many ranges as there are ranks, as equal as blocks allow; smaller
ones belong to few ranks. Each master's ranges go, the largest first, to the ranks that have the
fewest bytes so far: so the order of ranks is **not** the order of rows, and what is put together
again goes by `lo`, never by rank.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from isobit.distributed.ranks import ALONE, Ranks

BLOCK_ROWS = 128
MOMENT_BLOCK = 256
"""Elements of an 8-bit moment's block (`isobit.rl.optim.eight_bit`): no range cuts one."""
Rows = tuple[int, int]
NONE: Rows = (0, 0)


@dataclass(frozen=True, eq=False)
class Shards:
    """The division of masters among ranks. `shapes` of the whole masters, and `rows[name][rank]` =
    (lo, hi): what each rank keeps; (0, 0) is nothing."""

    ranks: Ranks
    shapes: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, tuple[Rows, ...]]

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], ranks: Ranks = ALONE) -> "Shards":
        """Return the ownership of masters of these shapes: a function of the shapes and the number
        of ranks alone."""
        return Shards(ranks, dict(shapes), ownership(shapes, ranks.size))

    def own(self, name: str) -> Rows:
        """Return the rows of a master that this rank keeps."""
        return self.rows[name][self.ranks.rank]

    def owned(self, name: str) -> bool:
        """Return whether this rank keeps any row of a master."""
        lo, hi = self.own(name)
        return hi > lo

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what this rank keeps of a master."""
        lo, hi = self.own(name)
        return (hi - lo, *self.shapes[name][1:])

    def width(self, name: str) -> int:
        """Return the number of elements of a row."""
        return math.prod(self.shapes[name][1:])

    def count(self, name: str, rank: int) -> int:
        """Return the number of a master's elements that a rank keeps."""
        lo, hi = self.rows[name][rank]
        return (hi - lo) * self.width(name)

    def elements(self, rank: int) -> int:
        """Return the number of elements of all masters that a rank keeps."""
        return sum(self.count(name, rank) for name in self.shapes)


def ownership(shapes: Mapping[str, tuple[int, ...]], size: int) -> Mapping[str, tuple[Rows, ...]]:
    """Return the range (lo, hi) of rows that each rank keeps, by master and rank."""
    return _ownership(tuple(shapes.items()), size)


@lru_cache(maxsize=8)  # every load, save and sync of a model asks again
def _ownership(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], size: int
) -> Mapping[str, tuple[Rows, ...]]:
    owned: dict[str, tuple[Rows, ...]] = {}
    for (name, _), owners in zip(shapes, _dealt([shape for _, shape in shapes], [0] * size)):
        rows = [NONE] * size
        for rank, (lo, hi) in owners:
            rows[rank] = (lo, hi)
        owned[name] = tuple(rows)
    return owned


def largest_share(shapes: Iterable[tuple[int, ...]], size: int) -> int:
    """Return the number of elements that the rank with the most keeps."""
    sizes = [0] * size
    for _ in _dealt(shapes, sizes):
        pass
    return max(sizes)


def _dealt(shapes: Iterable[tuple[int, ...]], loads: list[int]) -> Iterator[list[tuple[int, Rows]]]:
    """Yield the owners of each master's ranges, the ranks with the fewest elements; `loads`, the
    elements of each rank, is added to."""
    for shape in shapes:
        width = math.prod(shape[1:])
        ranges = sorted(_ranges(shape[0], width, len(loads)), key=lambda r: r[0] - r[1])
        least = heapq.nsmallest(len(ranges), range(len(loads)), key=loads.__getitem__)
        for rank, (lo, hi) in zip(least, ranges):
            loads[rank] += (hi - lo) * width
        yield list(zip(least, ranges))


def _ranges(rows: int, width: int, size: int) -> list[Rows]:
    """Divide rows 0 to `rows` into at most `size` ranges of whole blocks."""
    height = BLOCK_ROWS
    while height * width % MOMENT_BLOCK:
        height *= 2
    blocks = -(-rows // height)
    count = min(blocks, size)
    cuts = [min(blocks * i // count * height, rows) for i in range(count + 1)]
    return list(pairwise(cuts))

"""The order of the tests under xdist's `worksteal`: what takes long comes first, on every worker.

Each worker begins with an equal, contiguous part of the list, and steals from the end of another's
when it is through with its own. A long test at the end of a part would keep one worker busy while
the others have nothing left. Tests of a file stay together, since they share fixtures; only two
files are cut, where a part ends.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

_Item = TypeVar("_Item")


def longest_first(
    items: Sequence[_Item],
    workers: int,
    file: Callable[[_Item], str],
    slow: Callable[[_Item], bool],
) -> list[_Item]:
    """The same items: in each worker's part the files with slow tests first, dealt out in turn,
    then the others."""
    files = [list(group) for _, group in groupby(items, key=file)]
    long = [each for each in files if any(map(slow, each))]
    quick = iter([item for each in files if not any(map(slow, each)) for item in each])
    ordered: list[_Item] = []
    for worker in range(workers):
        ordered += [item for each in long[worker::workers] for item in each]
        end = (worker + 1) * len(items) // workers
        while len(ordered) < end and (item := next(quick, None)) is not None:
            ordered.append(item)
    return [*ordered, *quick]

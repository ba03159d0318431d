"""Items that the ranks of a run compute in rounds: in each, every rank one. Left out: how gradients
are added (`gradient.py`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from isobit.distributed import Ranks
from isobit.errors import IsobitError, RankLost


def in_rounds(
    following: Callable[[], AbstractContextManager[None]],
    count: int,
    ranks: Ranks,
    compute: Callable[[int], None],
) -> None:
    """Compute `count` items, every `ranks.size`-th on this rank, each `following` what the other ranks
    of its round open. Raises on every rank the error of the lowest that has one."""

    def every_round() -> None:
        failed: IsobitError | None = None
        for index in range(ranks.rank, -(-count // ranks.size) * ranks.size, ranks.size):
            try:
                with following():
                    if index < count and failed is None:
                        compute(index)
            except RankLost:
                raise
            except IsobitError as error:  # the others are not kept waiting
                failed = error
        if failed is not None:
            raise failed

    ranks.run_on_all(every_round)

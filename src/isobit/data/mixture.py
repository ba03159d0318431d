"""Several files as one set: how many prompts of an epoch each of them gives.

An epoch has as many prompts as all files have rows. By their weights each file gives its share of
them, rounded so that all shares together are the epoch; without weights each gives its rows. Which
prompts, and when, `dataset.py` says.
"""

from collections.abc import Sequence
from fractions import Fraction

from isobit.errors import IsobitError


def shared_out(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` prompts among files of these weights, each above 0: the whole parts of their
    exact shares, and what is left to those with the largest rest, the first of equal ones."""
    exact = [Fraction(weight) for weight in weights]
    shares = [total * weight / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(counts)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def check_shares(total: int, weights: Sequence[float]) -> None:
    """Raise IsobitError where a weight is so small that its file gives no prompt at all."""
    for number, count in enumerate(shared_out(total, weights)):
        if not count:
            raise IsobitError(
                f"task.files.{number}.weight: {weights[number]:g} of {sum(weights):g} is no prompt "
                f"in an epoch of {total:,}: raise it, or leave the file out"
            )

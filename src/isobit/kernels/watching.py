"""A backend's operators, some of which look at their inputs and results."""

from isobit.kernels.ops import Ops


class Watching:
    """The operators of `ops`, whose subclasses observe some and return the same results."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)


def unwatched(ops: Ops) -> Ops:
    """Return the operators below all watching ones: for what a backward computes again, which a
    forward has shown already."""
    while isinstance(ops, Watching):
        ops = ops._ops
    return ops

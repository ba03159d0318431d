"""Operators that look at what passes through them, and otherwise are those of a backend."""

from isobit.kernels.types import Ops


class Watching:
    """Has the operators of `ops`; a subclass defines those that it looks at, which return what these return."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

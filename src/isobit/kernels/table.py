"""The one table of backends: name to implementation, chosen once, at the start, and recorded."""

from isobit.errors import IsobitError
from isobit.kernels.reference import ReferenceOps
from isobit.kernels.separate import SeparateOps
from isobit.kernels.types import Ops

BACKENDS = ("auto", "native", "reference")
CONSISTENCIES = ("bitwise", "fast")


def get_ops(backend: str = "auto", consistency: str = "bitwise") -> Ops:
    """The operators of a backend.

    `native` is C++ and needs a compiler on first use; `reference` is PyTorch. `auto` is native where that works. The
    result's `why` says what was chosen and for what reason. Raises IsobitError for an unknown name, and where
    `native` was asked for and cannot be built.
    """
    if backend not in BACKENDS:
        raise IsobitError(f"unknown backend {backend!r}: choose from {', '.join(BACKENDS)}")
    if consistency not in CONSISTENCIES:
        raise IsobitError(f"unknown consistency {consistency!r}: choose from {', '.join(CONSISTENCIES)}")
    if backend == "reference":
        return ReferenceOps(consistency, "reference backend: asked for")
    from isobit.kernels.native import NativeOps, available  # here: it may compile

    works, reason = available()
    if works:
        return NativeOps(consistency, f"native backend: {reason}")
    if backend == "native":
        raise IsobitError(f"backend: native cannot be built: {reason}; use backend: auto or reference")
    return ReferenceOps(consistency, f"reference backend, because native cannot be built: {reason}")


def separate_ops(learner: Ops) -> Ops:
    """The operators of a rollout that runs in an engine of its own, beside a learner with these."""
    return SeparateOps(learner)

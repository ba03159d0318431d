"""What the operators in C++ are given: the library, how sums go, and the reference operators for
what C++ does not compute."""

import ctypes
from typing import TYPE_CHECKING

import torch

from isobit.kernels.ops import Ops

if TYPE_CHECKING:
    from isobit.kernels.product.ordered_native import OrderedProducts


class NativeBase(Ops):
    """The part of a native backend that its operators read."""

    lib: ctypes.CDLL
    reference: Ops
    fast: bool
    """Whether products are a BLAS's."""
    single: bool
    """Whether norms, gates and attention are float32 inside."""
    ordered: "OrderedProducts | None"
    """The products of `consistency: bitwise`, in its order."""
    norms_heads = True
    """Whether the norms of queries and keys are `rms_norm`'s in C++, and so may be part of one
    pass."""
    rounds_probabilities = False
    """To BF16, before P·V, where they have no format of their own."""
    fallbacks: set[tuple[str, str]]
    """Operators that the reference computed, and of what."""

    def falls_back(self, operator: str, what: object) -> Ops:
        """Return the reference operators, where C++ does not compute `operator` of `what`. What of
        a model's precision takes this way is known beforehand, and logged
        (`backends/native.py`)."""
        text = str(what).removeprefix("torch.") if isinstance(what, torch.dtype) else str(what)
        self.fallbacks.add((operator, text))
        return self.reference

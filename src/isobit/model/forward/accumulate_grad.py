"""Gradients of masters that a backward's products add to, in the place of autograd.

Autograd adds a gradient to the one that a master has: that takes another buffer as large, and reads
it once more. Where a product writes its result, it can add it instead, with one float32 addition an
element either way (`tests/rl/test_adding.py`). Only where a master has one gradient a backward, and
nobody looks at it on its way: so it is the learner that says which masters, and none by default.
Left out: gradients that leave for other ranks (`distributed/exchange.py`), tied weights, vectors.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# of a tensor; not a context variable: on a GPU backwards run in autograd's own threads
_MARK = "adds_in_place"


@contextmanager
def adding_in_place(masters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, backwards add to the gradients that these `masters` have already."""
    marked = [master for master in masters if not hasattr(master, _MARK)]
    for master in marked:
        setattr(master, _MARK, True)
    try:
        yield
    finally:
        for master in marked:
            delattr(master, _MARK)


def added_to(master: Tensor) -> Tensor | None:
    """The gradient that a product adds to; None where it has to return its own."""
    gradient = master.grad if hasattr(master, _MARK) else None
    fits = gradient is not None and gradient.dtype == torch.float32 and gradient.is_contiguous()
    return gradient if fits else None

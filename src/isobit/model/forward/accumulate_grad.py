"""Gradients of masters that a backward's products add to, in the place of autograd.

Autograd adds a gradient to the one that a master has: that takes another buffer as large, and reads
it once more. Where a product writes its result, it can add it instead, with one float32 addition an
element either way (`tests/rl/test_adding.py`). Only where a master has one gradient a backward, or
is a `TiedGradient`, and nobody looks at it on its way: so it is the learner that says which masters,
and none by default. Left out: gradients that leave for other ranks (`distributed/exchange.py`),
vectors.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from isobit.kernels import Ops

# of a tensor; not a context variable: on a GPU backwards run in autograd's own threads
_MARK, _TIED = "adds_in_place", "tied_gradient"


class TiedGradient:
    """The gradient of a master that is the output head, and the embedding of `tokens` [T]: on a
    CPU.

    Autograd adds both gradients, of the master's size, and their sum to what there was: before +
    (head + embedding). Here the head's is added to what there was, and of the embedding's, which
    comes last, the tokens' rows. What these had before is put aside meanwhile, and added at the
    end; -0.0 stands there, which added to any number is that number.
    """

    def __init__(self, master: Tensor, tokens: Tensor) -> None:
        self._master = master
        self._rows, self._places = tokens.unique(return_inverse=True)
        self._aside = self._put_aside()

    def _put_aside(self) -> Tensor | None:
        if (gradient := self._master.grad) is None:
            return None
        aside = gradient[self._rows]
        gradient[self._rows] = -0.0
        return aside

    def add_head(self, gradient: Tensor, from_zero: bool) -> None:
        """Add the head's gradient, unless the head has added to it already. `from_zero`: no zero of
        it is negative, as in a sum with an embedding's."""
        if self._master.grad is None:
            self._master.grad = gradient if from_zero else gradient.add_(0.0)
        elif gradient is not self._master.grad:
            self._master.grad.add_(gradient)

    def add_embedding(self, dy: Tensor, ops: Ops) -> None:
        """Add the gradient of the rows of the tokens [T, C], after the head's."""
        gradient = self._master.grad
        assert gradient is not None
        found = ops.embedding_backward(dy, self._places, len(self._rows))
        found = gradient[self._rows].add_(found)
        gradient[self._rows] = found if self._aside is None else found.add_(self._aside)


@contextmanager
def adding_in_place(
    masters: Iterable[Tensor], tied: Tensor | None = None, tokens: Tensor | None = None
) -> Iterator[None]:
    """Inside, backwards add to the gradients that these `masters` have already; to one whose
    gradient a hook takes they do not. `tied`: the one of them that is output head and embedding, of
    these `tokens`."""
    marked = [master for master in masters if _addable(master)]
    for master in marked:
        setattr(master, _MARK, True)
    if tied is not None and tokens is not None and any(tied is master for master in marked):
        setattr(tied, _TIED, TiedGradient(tied, tokens))
    try:
        yield
    finally:
        for master in marked:
            delattr(master, _MARK)
            if hasattr(master, _TIED):
                delattr(master, _TIED)


def _addable(master: Tensor) -> bool:
    looked_at = master._backward_hooks or getattr(master, "_post_accumulate_grad_hooks", None)
    return not looked_at and not hasattr(master, _MARK)


def added_to(master: Tensor) -> Tensor | None:
    """Return the gradient that a product adds to; None where it has to return its own."""
    gradient = master.grad if hasattr(master, _MARK) else None
    fits = gradient is not None and gradient.dtype == torch.float32 and gradient.is_contiguous()
    return gradient if fits else None


def tied_gradient(master: Tensor) -> TiedGradient | None:
    """Return the collector of the gradients of a master that is output head and embedding, in the
    place of autograd."""
    found: TiedGradient | None = getattr(master, _TIED, None)
    return found

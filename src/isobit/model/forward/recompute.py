"""Activation checkpointing: a layer keeps its inputs, and its backward runs the forward again.

(Chen et al. 2016, arXiv 1604.06174.) The second forward is the first one's operators on the same
inputs, weights and positions, so results and gradients keep their bits
(`tests/model/test_recompute.py`). A Function of our own rather than `torch.utils.checkpoint`, which
drops only tensors saved by autograd, not what operators of a layer share. The level `mlp`, which
keeps all but the results of an MLP's first product, is in `layers.py`: that product is run again,
alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Recompute = bool | Literal["mlp"]
"""What a backward computes again by products: nothing, an MLP's inputs of its gates, or layers as a
whole."""
Run = Callable[..., tuple[Tensor | None, ...]]
"""The inputs to the results."""


def recomputed(
    run: Run, inputs: Sequence[Tensor | None], masters: Sequence[Tensor]
) -> tuple[Any, ...]:
    """Return `run(*inputs)`; between forward and backward nothing is kept of it but the inputs and
    its results.

    `masters` receive gradients as they would without. An input or a result may be None.
    """
    return _Recomputed.apply(run, len(inputs), *inputs, *masters)


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, run: Run, count: int, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.run, ctx.masters = run, given[count:]
        ctx.set_materialize_grads(False)  # a zero that is added would turn -0 into 0
        ctx.save_for_backward(*given[:count])
        return run(*given[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_()
            for tensor in ctx.saved_tensors
        ]
        with torch.enable_grad():
            results = ctx.run(*inputs)
        pairs = [
            (r, gradient)
            for r, gradient in zip(results, gradients)
            if r is not None and gradient is not None
        ]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                [*(each for each in inputs if each is not None), *ctx.masters],
                [gradient for _, gradient in pairs],
                allow_unused=True,  # an expert that no token chose
            )
        )
        return None, None, *(None if each is None else next(found) for each in inputs), *found

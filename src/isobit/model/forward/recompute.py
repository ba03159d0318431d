"""Activation checkpointing: a layer keeps its two inputs, and its backward runs the forward again.

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
Run = Callable[[Tensor, Tensor | None], tuple[Tensor | None, ...]]
"""(x, residual) to the results."""


def recomputed(
    run: Run, x: Tensor, residual: Tensor | None, masters: Sequence[Tensor]
) -> tuple[Any, ...]:
    """`run(x, residual)`; between forward and backward nothing is kept of it but x, residual and
    its results.

    `masters` receive gradients as they would without. A result may be None.
    """
    return _Recomputed.apply(run, x, residual, *masters)


class _Recomputed(Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, x: Tensor, residual: Tensor | None, *masters: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.run, ctx.masters, ctx.has_residual = run, masters, residual is not None
        ctx.set_materialize_grads(False)  # a zero that is added would turn -0 into 0
        ctx.save_for_backward(x, *(() if residual is None else (residual,)))
        return run(x, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            results = ctx.run(inputs[0], inputs[1] if ctx.has_residual else None)
        pairs = [
            (r, gradient)
            for r, gradient in zip(results, gradients)
            if r is not None and gradient is not None
        ]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [*inputs, *ctx.masters],
            [gradient for _, gradient in pairs],
            allow_unused=True,  # an expert that no token chose
        )
        return None, found[0], found[1] if ctx.has_residual else None, *found[len(inputs) :]

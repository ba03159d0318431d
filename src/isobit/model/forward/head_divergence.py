"""The divergence of two output heads with its gradient by one of them, a few rows of both heads'
logits at a time.

As in `head.py` logits are never held for a whole batch, and the backward computes them again: of a
chunk the gradient by its logits is autograd's, rounded to the compute format, and the two products
are those of the head's own backward. The same inputs give the same bits
(tests/rl/test_divergence.py). Left out: which divergence it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Ops, Prepared
from isobit.kernels.matrices import values
from isobit.kernels.sampling.capped import cap_slope, logits_of
from isobit.model.weights.stored import Weight

DivergenceOf = Callable[[Tensor, Tensor], Tensor]
"""[T] of logits [T, V] float32 of the model that is trained and of the other."""

WORKING_BYTES = 4 * 13
"""Of a pair of logits, with what a divergence and its gradient take besides (`isobit plan`)."""


@dataclass(frozen=True, eq=False)
class Other:
    """The model that is compared with: `hidden` [T, its width] in its compute format, its head, and
    its operators, and the cap of its logits, if they are capped. It has no gradient."""

    hidden: Tensor
    head: Prepared
    ops: Ops
    cap: float | None = None

    def logits(self, rows: slice) -> Tensor:
        """Compute the logits of these rows, [rows, V] float32."""
        return logits_of(self.ops, self.hidden[rows], self.head, self.cap)


def head_divergence(
    hidden: Tensor,
    head: Weight,
    other: Other,
    divergence: DivergenceOf,
    chunk: int,
    ops: Ops,
    cap: float | None = None,
) -> Tensor:
    """Compute the divergence of each row, [T] float32, from hidden [T, C], `chunk` rows of logits
    at a time; the logits are capped by `cap`."""
    arguments = head, other, divergence, chunk, ops, cap
    divergences: Tensor = _HeadDivergence.apply(hidden, head.master, *arguments)
    return divergences


class _HeadDivergence(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor,
        head: Weight,
        other: Other,
        divergence: DivergenceOf,
        chunk: int,
        ops: Ops,
        cap: float | None,
    ) -> Tensor:
        ctx.given = head.prepared, other, divergence, chunk, ops, cap
        ctx.save_for_backward(hidden)
        results = [
            divergence(logits_of(ops, hidden[rows], head.prepared, cap), theirs)
            for rows in _chunks(len(hidden), chunk)
            for theirs in (other.logits(rows),)
        ]
        return torch.cat(results) if results else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        weight, teacher, divergence, chunk, ops, cap = ctx.given
        dhidden, trained = torch.empty_like(hidden), ctx.needs_input_grad[1]
        dweight = torch.zeros(weight.shape, device=hidden.device) if trained else None
        for rows in _chunks(len(hidden), chunk):
            logits = logits_of(ops, hidden[rows], weight, cap).requires_grad_()
            with torch.enable_grad():
                gradients = divergence(logits, teacher.logits(rows))
                (dlogits,) = torch.autograd.grad(gradients, logits, slope[rows])
            if cap is not None:
                dlogits = dlogits * cap_slope(logits.detach(), cap)
            del gradients, logits
            dlogits = dlogits.to(hidden.dtype)
            dhidden[rows] = ops.gradient_product(dlogits, values(weight).t(), hidden.dtype)
            if dweight is not None:
                ops.gradient_product(dlogits.t(), hidden[rows].t(), torch.float32, dweight)
        return dhidden, dweight, None, None, None, None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]

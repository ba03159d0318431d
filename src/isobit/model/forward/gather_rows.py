"""Copies of rows with their gradient: the sum over a row's copies, which repeats
(`isobit.kernels.Copies`)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Copies, Ops


def copied(x: Tensor, copies: Copies, ops: Ops) -> Tensor:
    """Return the copies [R, C] of rows x [count, C]."""
    if torch.is_grad_enabled():
        return _Copied.apply(x, copies, ops)
    return x[copies.index]


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies, ops: Ops) -> Tensor:
        ctx.copies, ctx.ops = copies, ops
        return x[copies.index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.copies.added(dy.contiguous(), ctx.ops), None, None

"""What stands between the two products of an MLP, with its gradient: a gate, or ReLU² of an MLP
that has none.

ReLU² (So et al. 2021, arXiv 2109.08668), max(x, 0)², is elementwise in PyTorch, one product that is
rounded once, so a row's bits are its own on every backend; its backward is 2 · max(x, 0) · dh. Gates
are operators (`Ops.gate_mul`). Left out: a kernel that quantizes ReLU² as it makes it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Activation, Operand, Ops
from isobit.model.families.family import RELU2, MlpActivation
from isobit.model.weights.stored import Vector
from isobit.precision import QuantSpec


def activated(activation: MlpActivation, x: Tensor, ops: Ops) -> Tensor:
    """Compute `Ops.gate_mul` of x [T, 2I], or relu2 of x [T, I]: [T, I]."""
    if activation == RELU2:
        positive = torch.relu(x)
        return positive * positive
    return ops.gate_mul(activation, x)


def activated_codes(
    activation: MlpActivation, x: Tensor, spec: QuantSpec | None, name: str, ops: Ops
) -> Operand:
    """Return `activated`, quantized where there is a spec: the bits of the two in turn."""
    if spec is None:
        return activated(activation, x, ops)
    if activation == RELU2:
        return ops.quantize(activated(activation, x, ops), spec, name)
    return ops.gate_mul_quantized(activation, x, spec, name)


def activated_backward(activation: MlpActivation, dh: Tensor, x: Tensor, ops: Ops) -> Tensor:
    """Gradient of x, of that of `activated` dh [T, I]."""
    if activation == RELU2:
        return 2.0 * torch.relu(x) * dh
    return ops.gate_mul_backward(activation, dh, x)


def gated(activation: Activation, pair: Tensor, ops: Ops) -> Tensor:
    """Compute `Ops.gate_mul` of a pair (gate, x) [T, 2 H], with its gradient: [T, H]."""
    if torch.is_grad_enabled():
        return _Gated.apply(activation, pair, ops)
    return ops.gate_mul(activation, pair)


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, pair: Tensor, ops: Ops) -> Tensor:
        ctx.activation, ctx.ops = activation, ops
        ctx.save_for_backward(pair)
        return ops.gate_mul(activation, pair)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (pair,) = ctx.saved_tensors
        return None, ctx.ops.gate_mul_backward(ctx.activation, dy.contiguous(), pair), None


def times(x: Tensor, weight: Vector) -> Tensor:
    """Return x [T, C] times a weight [C], each product rounded once, with its gradient."""
    if torch.is_grad_enabled():
        return _Times.apply(x, weight.master, weight.working)
    return x * weight.working


class _Times(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, working: Tensor) -> Tensor:
        ctx.save_for_backward(x, working)
        return x * working

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, working = ctx.saved_tensors
        dweight = (dy.float() * x.float()).sum(0) if ctx.needs_input_grad[1] else None
        return dy * working, dweight, None

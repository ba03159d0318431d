"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), as a layer of
Qwen3.5 has it.

Of a layer's rows x, normed: (q, k, v, z) = x · qkv, (b, a) = x · gates; q, k and v go through a
short convolution over their last tokens and SiLU; the delta rule gives, head by head, what its
state recalls; that is normed, multiplied by silu(z), and projected. Both operators go on from what
a store has of earlier rows. Left out: their arithmetic (`Ops.short_convolution`, `Ops.delta_rule`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import DeltaHeads, Layout, Ops, StateStore
from isobit.model.forward import autograd
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.weights.layout import Delta
from isobit.model.weights.stored import Vector


@dataclass(frozen=True, eq=False)
class Recurrent:
    """What linear attention takes besides its rows: `store` has the states of earlier ones, None
    where sequences are whole."""

    sizes: LinearAttention
    eps: float
    layout: Layout
    store: StateStore | None


def linear_attention(
    qkvz: Tensor, gates: Tensor, layer: Delta, given: Recurrent, ops: Ops
) -> Tensor:
    """qkvz [T, channels + values] and gates [T, 2 Hv] float32 to [T, hidden]."""
    sizes = given.sizes
    mixed, z = qkvz.split((sizes.channels, sizes.values), dim=1)
    mixed = convolved(mixed.contiguous(), layer.conv, given, ops)
    recalled = delta_rule(mixed, gates, (layer.decay, layer.step_bias), given, ops)
    rows = recalled.reshape(-1, sizes.value_dim)
    normed = autograd.rms_norm(rows, None, layer.state_norm, given.eps, ops)[0].view(z.shape)
    return autograd.gated_linear(torch.cat((z, normed), 1), "silu", layer.o, ops)


def convolved(x: Tensor, weight: Vector, given: Recurrent, ops: Ops) -> Tensor:
    """`Ops.short_convolution` of x [T, C], with its gradient."""
    if torch.is_grad_enabled():
        return _Convolved.apply(x, weight.master, weight, given, ops)
    return ops.short_convolution(x, weight.working, given.store, given.layout)


def delta_rule(
    qkv: Tensor, gates: Tensor, fading: tuple[Vector, Vector], given: Recurrent, ops: Ops
) -> Tensor:
    """`Ops.delta_rule` of qkv [T, C], with its gradient; `fading`: decay and step_bias."""
    if torch.is_grad_enabled():
        return _DeltaRule.apply(
            qkv, gates, *(vector.master for vector in fading), fading, given, ops
        )
    return ops.delta_rule(qkv, gates, _heads(fading, given.sizes), given.store, given.layout)


def _heads(fading: Sequence[Vector], sizes: LinearAttention) -> DeltaHeads:
    decay, step_bias = fading
    counts = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
    return DeltaHeads(*counts, decay.working, step_bias.working)


class _Convolved(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor, weight: Vector, given: Recurrent, ops: Ops
    ) -> Tensor:
        ctx.weight, ctx.layout, ctx.ops = weight, given.layout, ops
        ctx.save_for_backward(x)
        return ops.short_convolution(x, weight.working, given.store, given.layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        found = ctx.ops.short_convolution_backward(
            dy.contiguous(), x, ctx.weight.working, ctx.layout
        )
        return (*found, None, None, None)


class _DeltaRule(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        gates: Tensor,
        decay: Tensor,
        step_bias: Tensor,
        fading: tuple[Vector, Vector],
        given: Recurrent,
        ops: Ops,
    ) -> Tensor:
        ctx.heads, ctx.layout, ctx.ops = _heads(fading, given.sizes), given.layout, ops
        ctx.save_for_backward(qkv, gates)
        return ops.delta_rule(qkv, gates, ctx.heads, given.store, given.layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        qkv, gates = ctx.saved_tensors
        found = ctx.ops.delta_rule_backward(dout.contiguous(), qkv, gates, ctx.heads, ctx.layout)
        return (*found, None, None, None)

"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), as a layer of
Qwen3.5 or Qwen3-Next has it.

Of a layer's rows x, normed: (q, k, v, z) = x · qkv, (b, a) = x · gates; q, k and v go through a
short convolution over their last tokens and SiLU; the delta rule gives, head by head, what its
state recalls; that is normed, multiplied by silu(z), and projected. Both operators go on from what
a store has of earlier rows. Mamba-2 layers (`mamba.py`) take them too. Left out: their arithmetic
(`Ops.short_convolution`, `Ops.delta_rule`).
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
from isobit.model.hub.mamba import Mamba
from isobit.model.weights.layout import Delta
from isobit.model.weights.stored import Vector


@dataclass(frozen=True, eq=False)
class Recurrent:
    """The inputs of linear attention besides its rows: `store` has the states of earlier ones, None
    where sequences are whole."""

    sizes: LinearAttention
    eps: float
    layout: Layout
    store: StateStore | None


def linear_attention(
    qkvz: Tensor, gates: Tensor, layer: Delta, given: Recurrent, ops: Ops
) -> Tensor:
    """Return qkvz [T, channels + values] and gates [T, 2 Hv] float32 to [T, hidden]."""
    sizes = given.sizes
    if sizes.by_head:
        mixed, z, gates = _apart(qkvz, gates, sizes)
    else:
        mixed, z = qkvz.split((sizes.channels, sizes.values), dim=1)
    mixed = convolved(mixed.contiguous(), layer.conv, given, ops)
    recalled = recurrence(mixed, gates, (layer.decay, layer.step_bias), given, ops)
    rows = recalled.reshape(-1, sizes.value_dim)
    normed = autograd.rms_norm(rows, None, layer.state_norm, given.eps, ops)[0].view(z.shape)
    return autograd.gated_linear(torch.cat((z, normed), 1), "silu", layer.o, ops)


def _apart(qkvz: Tensor, gates: Tensor, sizes: LinearAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Return (queries, keys and values of all heads; z; b and a of all) of columns that go from one
    head of keys to the next."""
    shared = sizes.value_heads // sizes.key_heads
    keys, values = sizes.key_dim, shared * sizes.value_dim

    def by_kind(x: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
        heads = x.unflatten(1, (sizes.key_heads, -1)).split(widths, dim=2)
        return [kind.flatten(1) for kind in heads]

    *mixed, z = by_kind(qkvz, (keys, keys, values, values))
    return torch.cat(mixed, 1), z, torch.cat(by_kind(gates, (shared, shared)), 1)


def convolved(
    x: Tensor, weight: Vector, given: Recurrent, ops: Ops, bias: Vector | None = None
) -> Tensor:
    """Compute `Ops.short_convolution` of x [T, C], with its gradient."""
    if torch.is_grad_enabled():
        masters = weight.master, None if bias is None else bias.master
        return _Convolved.apply(x, *masters, weight, bias, given, ops)
    working = None if bias is None else bias.working
    return ops.short_convolution(x, weight.working, given.store, given.layout, working)


def recurrence(
    qkv: Tensor, gates: Tensor, fading: Sequence[Vector], given: Recurrent, ops: Ops
) -> Tensor:
    """Compute `Ops.delta_rule` of qkv [T, C], with its gradient; `fading`: decay, step_bias and, of
    Mamba-2, skip."""
    if torch.is_grad_enabled():
        masters = [vector.master for vector in fading]
        return _Recurrence.apply(qkv, gates, fading, given, ops, *masters)
    return ops.delta_rule(qkv, gates, _heads(fading, given.sizes), given.store, given.layout)


def _heads(fading: Sequence[Vector], sizes: LinearAttention) -> DeltaHeads:
    counts = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
    least = sizes.least_step if isinstance(sizes, Mamba) else 0.0
    decay, step_bias, *more = (vector.working for vector in fading)
    return DeltaHeads(*counts, decay, step_bias, next(iter(more), None), least)


class _Convolved(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        bias_master: Tensor | None,
        weight: Vector,
        bias: Vector | None,
        given: Recurrent,
        ops: Ops,
    ) -> Tensor:
        ctx.weight, ctx.layout, ctx.ops = weight, given.layout, ops
        ctx.bias = None if bias is None else bias.working
        ctx.save_for_backward(x)
        return ops.short_convolution(x, weight.working, given.store, given.layout, ctx.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradients = ctx.ops.short_convolution_backward(
            dy.contiguous(), x, ctx.weight.working, ctx.layout, ctx.bias
        )
        dbias = gradients[2] if len(gradients) == 3 else None
        return gradients[0], gradients[1], dbias, None, None, None, None


class _Recurrence(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        gates: Tensor,
        fading: Sequence[Vector],
        given: Recurrent,
        ops: Ops,
        *masters: Tensor,
    ) -> Tensor:
        ctx.heads, ctx.layout, ctx.ops = _heads(fading, given.sizes), given.layout, ops
        ctx.save_for_backward(qkv, gates)
        return ops.delta_rule(qkv, gates, ctx.heads, given.store, given.layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        qkv, gates = ctx.saved_tensors
        gradients = ctx.ops.delta_rule_backward(
            dout.contiguous(), qkv, gates, ctx.heads, ctx.layout
        )
        return (*gradients[:2], None, None, None, *gradients[2:])

"""Attention with its gradient, for rollout and learner alike; alone, or with the linear layer behind
it, whose operand it quantizes.

As in `autograd.py` one forward serves both, and the backward is written out. Queries, keys and
values are made again in the backward; what is kept are the projection qkv, the result and its
log-sum-exp. Shapes: T rows, H query heads, KV key heads, D head dimension. Left out: the projections
before it, and linear attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Heads, KVStore, Layout, Operand, Ops, unwatched
from isobit.model.forward import autograd
from isobit.model.weights.stored import Vector, Weight
from isobit.precision import Format, QTensor, QuantSpec, quantize_with_scale


def attend(
    qkv: Tensor, masters: tuple[Tensor, Tensor] | None, given: "Attended", ops: Ops
) -> Tensor:
    """Attention [T, H, D] of qkv [T, H + 2 KV, D]: queries and keys normed and rotated, keys and
    values stored, queries rounded where the flow says so. `masters` are those of the norms.
    Straight through the roundings."""
    if torch.is_grad_enabled():
        return _with_gradient(qkv, masters, given, ops, None, [])
    return ops.attention(*_arguments(qkv, given, ops))[0]


def attend_linear(
    qkv: Tensor,
    masters: tuple[Tensor, Tensor] | None,
    given: "Attended",
    weight: Weight,
    ops: Ops,
) -> Tensor:
    """Return linear(attend(qkv)) [T, N]: the bits of the two in turn."""
    spec = weight.activation
    if torch.is_grad_enabled():
        codes: list[QTensor] = []
        to = None if spec is None else (spec, weight.name)
        out = _with_gradient(qkv, masters, given, ops, to, codes).flatten(1)
        return autograd.linear(out, weight, ops, kept=True, operand=next(iter(codes), None))
    arguments = _arguments(qkv, given, ops)
    if spec is None:
        operand: Operand = ops.attention(*arguments)[0].flatten(1)
    else:
        operand = ops.attention_quantized(*arguments, spec, weight.name, False)[1]
    return autograd.multiplied(operand, weight, ops, qkv.dtype)


def _with_gradient(
    qkv: Tensor,
    masters: tuple[Tensor, Tensor] | None,
    given: "Attended",
    ops: Ops,
    to: tuple[QuantSpec, str] | None,
    codes: list[QTensor],
) -> Tensor:
    """Attention [T, H, D]; and [T, H D] quantized `to` a spec, under a name, to `codes`, which
    autograd knows nothing of."""
    sinks = None if given.sinks is None else given.sinks.master
    return _Attend.apply(qkv, *(masters or (None, None)), sinks, given, ops, to, codes)


@dataclass(frozen=True, eq=False)
class Attended:
    """The inputs of attention besides its rows. `store` gives where keys and values are,
    `temporary` an empty one of the same kind; `window` is how many keys a row sees, None all;
    `query` is how queries are rounded, if they are, with a scale per row, or with `query_scale`
    [1]; `sinks` [H] are the heads', in float32; `probabilities` are rounded so."""

    heads: Heads
    store: Callable[[], KVStore]
    temporary: Callable[[], KVStore]
    layout: Layout
    scale: float
    window: int | None = None
    query: QuantSpec | None = None
    query_scale: Tensor | None = None
    sinks: Vector | None = None
    probabilities: Format | None = None


def rounded(x: Tensor, spec: QuantSpec, ops: Ops, scale: Tensor | None = None) -> Tensor:
    """Return x [T, H, D] quantized and dequantized, in x's dtype: with a scale per row, or with the
    given `scale` [1]."""
    flat = x.reshape(-1, x.shape[-1])
    if scale is None:
        quantized = ops.quantize(flat, spec, "queries")
    else:
        quantized = quantize_with_scale(flat, scale.to(x.device).view(1, 1), spec)
    return quantized.dequantize().to(x.dtype).view(x.shape)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_master: Tensor | None,
        k_master: Tensor | None,
        sinks_master: Tensor | None,
        given: Attended,
        ops: Ops,
        to: tuple[QuantSpec, str] | None,
        codes: list[QTensor],
    ) -> Tensor:
        arguments = _arguments(qkv, given, ops)
        if to is None:
            out, lse = ops.attention(*arguments)
        else:
            plain, quantized, lse = ops.attention_quantized(*arguments, *to, True)
            assert plain is not None
            out = plain
            codes.append(quantized)
        ctx.given, ctx.ops = given, ops
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, out, lse), attended, ops = ctx.saved_tensors, ctx.given, ctx.ops
        store = attended.temporary()
        q, dout = _queries(qkv, attended, store, unwatched(ops)), dout.contiguous()
        gradients = ops.attention_backward(
            dout, q, out, lse, store, attended.layout, attended.scale, attended.window
        )
        if (keys := attended.layout.keys) is not None:
            dq, dk, dv = gradients
            gradients = dq, keys.copies.added(dk, ops), keys.copies.added(dv, ops)
        gradients_of = ops.attention_inputs_backward(
            gradients, qkv, attended.heads, attended.layout.rotated
        )
        dsinks = None
        if ctx.needs_input_grad[3] and attended.sinks is not None:
            dsinks = ops.sinks_backward(dout, out, lse, attended.sinks.working)
        return (*gradients_of, dsinks, None, None, None, None)


_Given = tuple[Tensor, KVStore, Layout, float, int | None, Tensor | None, Format | None]


def _arguments(qkv: Tensor, given: Attended, ops: Ops) -> _Given:
    """Return what `Ops.attention` takes; keys and values are in the store afterwards."""
    store = given.store()
    q = _queries(qkv, given, store, ops)
    sinks = None if given.sinks is None else given.sinks.working
    return q, store, given.layout, given.scale, given.window, sinks, given.probabilities


def _queries(qkv: Tensor, given: Attended, store: KVStore, ops: Ops) -> Tensor:
    """[T, H, D], as they are multiplied; keys and values are in the store afterwards."""
    q = ops.attention_inputs(qkv, given.heads, store, given.layout)[0]
    return q if given.query is None else rounded(q, given.query, ops, given.query_scale)

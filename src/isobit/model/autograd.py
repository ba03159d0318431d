"""The operators with their gradients: one function each, for rollout and learner alike.

With gradients disabled a function is a direct call of the operator. With gradients enabled the same forward operator
runs inside a `torch.autograd.Function` whose backward is written out; so recording a graph cannot change a bit of the
forward (`tests/model/test_transformer.py`). Weights enter twice: the *working* weight that is multiplied, and the FP32
*master* that receives the gradient, straight through the quantization.

Shapes: T rows, K and N the inputs and outputs of a linear layer, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Heads, KVStore, Layout, Operand, Ops, plain
from isobit.model import low_rank
from isobit.model.weights import Vector, Weight, copy_spec, has_own_copy
from isobit.precision import QTensor, QuantSpec, quantize_with_scale

ALONG_INPUTS = ("1x32", "1x16", "row")


def linear(x: Tensor, weight: Weight, ops: Ops) -> Tensor:
    """x [T, K] times the weight, plus bias: [T, N] in x's dtype."""
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight.master, weight.bias_master, weight, ops, *weight.adapter_masters)
    return low_rank.product(_quantized(x, weight, ops), weight, ops, x.dtype)[0]


def rms_norm(x: Tensor, residual: Tensor | None, weight: Vector, eps: float, ops: Ops) -> tuple[Tensor, Tensor]:
    """(normed, x + residual), both [R, C]."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, residual, weight.master, weight.working, eps, ops)
    normed, summed, _ = ops.rms_norm(x, weight.working, eps, residual)
    return normed, summed


def norm_linear(
    x: Tensor, residual: Tensor | None, norm: Vector, eps: float, weight: Weight, ops: Ops
) -> tuple[Tensor, Tensor]:
    """(linear(rms_norm(x + residual)) [T, N], x + residual [T, K]): the bits of the two in turn."""
    if torch.is_grad_enabled():
        masters = norm.master, weight.master, weight.bias_master
        return _NormLinear.apply(x, residual, *masters, norm, eps, weight, ops, *weight.adapter_masters)
    operand, summed, _ = _normed(x, residual, norm, eps, weight, ops)
    return low_rank.product(operand, weight, ops, x.dtype)[0], summed


def gated_linear(gate_up: Tensor, weight: Weight, ops: Ops) -> Tensor:
    """linear(silu_mul(gate_up [T, 2K])) [T, N]: the bits of the two in turn."""
    if torch.is_grad_enabled():
        return _GatedLinear.apply(gate_up, weight.master, weight.bias_master, weight, ops, *weight.adapter_masters)
    return low_rank.product(_gated(gate_up, weight, ops), weight, ops, gate_up.dtype)[0]


def attention_inputs(
    qkv: Tensor, heads: Heads, masters: tuple[Tensor, Tensor] | None, store: KVStore, layout: Layout, ops: Ops
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H, D], k, v [T, KV, D]) of qkv [T, H + 2 KV, D]: normed and rotated; keys and values stored. `masters`
    are those of the norms."""
    if torch.is_grad_enabled():
        return _AttentionInputs.apply(qkv, *(masters or (None, None)), heads, store, layout, ops)
    return ops.attention_inputs(qkv, heads, store, layout)


def attention(q: Tensor, k: Tensor, v: Tensor, store: KVStore, layout: Layout, scale: float, ops: Ops) -> Tensor:
    """Attention over the stored keys and values: [T, H, D]. k and v, stored already, receive gradients."""
    if torch.is_grad_enabled():
        return _Attention.apply(q, k, v, store, layout, scale, ops)
    return ops.attention(q, store, layout, scale)[0]


def rounded(x: Tensor, spec: QuantSpec, ops: Ops, scale: Tensor | None = None) -> Tensor:
    """x [T, H, D] quantized and dequantized, in x's dtype: with a scale per row, or with the given `scale` [1]. The
    gradient goes straight through."""
    flat = x.reshape(-1, x.shape[-1]).detach()
    if scale is None:
        quantized = ops.quantize(flat, spec, "queries")
    else:
        quantized = quantize_with_scale(flat, scale.to(x.device).view(1, 1), spec)
    values = quantized.dequantize().to(x.dtype).view(x.shape)
    return _StraightThrough.apply(x, values) if torch.is_grad_enabled() else values


def embedding(tokens: Tensor, table: Vector, ops: Ops) -> Tensor:
    """Rows of the table [V, C] for tokens [T]."""
    if torch.is_grad_enabled():
        return _Embedding.apply(tokens, table.master, table.working, ops)
    return table.working[tokens]


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        bias_master: Tensor | None,
        weight: Weight,
        ops: Ops,
        *adapter_masters: Tensor,
    ) -> Tensor:
        ctx.weight, ctx.ops = weight, ops
        operand = _quantized(x, weight, ops)
        y, us = low_rank.product(operand, weight, ops, x.dtype)
        ctx.save_for_backward(*us, *_kept(operand, x, weight, ops))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db, *adapters = _linear_backward(ctx, dy, ctx.saved_tensors, ctx.needs_input_grad[:3])
        return dx, dw, db, None, None, *adapters


def _kept(operand: Operand, x: Tensor, weight: Weight, ops: Ops) -> tuple[Tensor, ...]:
    """The tensors that gradients of masters need later: the parts of `operand`, which was quantized from x [T, K], or
    those of a copy of x quantized along the tokens. DGrad needs neither."""
    if not weight.keeps_inputs:
        return ()
    if weight.activation is None or not has_own_copy(weight):
        return parts(operand)
    return parts(ops.quantize_along_tokens(x, weight.activation, weight.name))


def _quantized(x: Tensor, weight: Weight, ops: Ops) -> Operand:
    return x if weight.activation is None else ops.quantize(x, weight.activation, weight.name)


def parts(operand: Operand) -> tuple[Tensor, ...]:
    """The tensors as which an operand is saved for the backward."""
    return (operand.data, operand.scale) if isinstance(operand, QTensor) else (operand,)


def _linear_backward(
    ctx: Any, dy: Tensor, saved: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of the operand, of the weight and of the bias, None if not `needed`, and of each adapter's A and B.
    `saved`: each adapter's u, then the operand's parts."""
    weight, ops, dy = ctx.weight, ctx.ops, dy.contiguous()
    us, kept = saved[: len(weight.adapters)], saved[len(weight.adapters) :]
    spec = copy_spec(weight) if has_own_copy(weight) else weight.activation
    operand = QTensor(kept[0], kept[1], spec) if len(kept) == 2 else next(iter(kept), dy)
    if weight.adapters:
        dx, found = low_rank.backward(dy, operand, us, weight, ops, needed[0])
        if dx is not None:
            dx = dx.add_(_dgrad(dy, weight, ops, torch.float32)).to(dy.dtype)
    else:
        dx, found = _dgrad(dy, weight, ops, dy.dtype) if needed[0] else None, []
    dw = _wgrad(dy, operand, weight, ops) if needed[1] else None
    db = dy.double().sum(0).float() if needed[2] else None
    return dx, dw, db, *found


def _dgrad(dy: Tensor, weight: Weight, ops: Ops, out: torch.dtype) -> Tensor:
    """dx [T, K] = dy [T, N] · W [N, K], in `out`."""
    working = weight.working
    if weight.dgrad == "fp8" and isinstance(working, QTensor) and weight.gradient is not None:
        quantized = ops.quantize(dy, weight.gradient, f"output gradient of {weight.name}")
        transposed = working.transpose()
        if working.spec.granularity in ALONG_INPUTS:  # scales for every row of N: quantized again, along N
            name = f"transposed {weight.name}"
            transposed = ops.quantize(transposed.dequantize().contiguous(), working.spec, name)
        return ops.gradient_product(quantized, transposed, out)
    return ops.gradient_product(dy, plain(working, dy.dtype).t(), out)


def _wgrad(dy: Tensor, saved: Operand, weight: Weight, ops: Ops) -> Tensor:
    """dW [N, K] = dyᵀ · x in float32, both operands quantized along the tokens; `saved` is x [T, K], or its copy
    [K, T] that is already quantized along the tokens."""
    if weight.wgrad == "fp8" and isinstance(saved, QTensor) and weight.gradient is not None:
        gradient = ops.quantize_along_tokens(dy, weight.gradient, f"output gradient of {weight.name}")
        if has_own_copy(weight):
            return ops.gradient_product(gradient, saved, torch.float32)
        activation = ops.quantize_along_tokens(saved, saved.spec, weight.name)
        return ops.gradient_product(gradient, activation, torch.float32)
    return ops.gradient_product(dy.t(), plain(saved, dy.dtype).t(), torch.float32)


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, master: Tensor, working: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        normed, summed, rstd = ops.rms_norm(x, working, eps, residual)
        ctx.ops, ctx.has_residual = ops, residual is not None
        ctx.save_for_backward(summed, working, rstd)
        return normed, summed.view_as(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnormed: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.ops.rms_norm_backward(dnormed.contiguous(), *ctx.saved_tensors)
        dx = dx + dsummed
        return dx, dx if ctx.has_residual else None, dw, None, None, None


class _NormLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_master: Tensor,
        master: Tensor,
        bias_master: Tensor | None,
        norm: Vector,
        eps: float,
        weight: Weight,
        ops: Ops,
        *adapter_masters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if has_own_copy(weight):
            normed, summed, rstd = ops.rms_norm(x, norm.working, eps, residual)
            operand = _quantized(normed, weight, ops)
            kept = _kept(operand, normed, weight, ops)
        else:
            operand, summed, rstd = _normed(x, residual, norm, eps, weight, ops)
            kept = parts(operand) if weight.keeps_inputs else ()
        y, us = low_rank.product(operand, weight, ops, x.dtype)
        ctx.norm, ctx.weight, ctx.ops, ctx.has_residual = norm, weight, ops, residual is not None
        ctx.save_for_backward(summed, rstd, *us, *kept)
        return y, summed.view_as(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        summed, rstd, *saved = ctx.saved_tensors
        dnormed, dw, db, *adapters = _linear_backward(ctx, dy, saved, (True, *ctx.needs_input_grad[3:5]))
        assert dnormed is not None
        dx, dnorm = ctx.ops.rms_norm_backward(dnormed, summed, ctx.norm.working, rstd)
        dx = dx + dsummed
        return dx, dx if ctx.has_residual else None, dnorm, dw, db, None, None, None, None, *adapters


def _normed(
    x: Tensor, residual: Tensor | None, norm: Vector, eps: float, weight: Weight, ops: Ops
) -> tuple[Operand, Tensor, Tensor]:
    if weight.activation is None:
        return ops.rms_norm(x, norm.working, eps, residual)
    return ops.rms_norm_quantized(x, norm.working, eps, residual, weight.activation, weight.name)


class _GatedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        master: Tensor,
        bias_master: Tensor | None,
        weight: Weight,
        ops: Ops,
        *adapter_masters: Tensor,
    ) -> Tensor:
        if has_own_copy(weight):
            hidden = ops.silu_mul(gate_up)
            operand = _quantized(hidden, weight, ops)
            kept = _kept(operand, hidden, weight, ops)
        else:
            operand = _gated(gate_up, weight, ops)
            kept = parts(operand) if weight.keeps_inputs else ()
        y, us = low_rank.product(operand, weight, ops, gate_up.dtype)
        ctx.weight, ctx.ops = weight, ops
        ctx.save_for_backward(gate_up, *us, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, *saved = ctx.saved_tensors
        dh, dw, db, *adapters = _linear_backward(ctx, dy, saved, ctx.needs_input_grad[:3])
        return None if dh is None else ctx.ops.silu_mul_backward(dh, gate_up), dw, db, None, None, *adapters


def _gated(gate_up: Tensor, weight: Weight, ops: Ops) -> Operand:
    if weight.activation is None:
        return ops.silu_mul(gate_up)
    return ops.silu_mul_quantized(gate_up, weight.activation, weight.name)


class _AttentionInputs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_master: Tensor | None,
        k_master: Tensor | None,
        heads: Heads,
        store: KVStore,
        layout: Layout,
        ops: Ops,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads, ctx.positions, ctx.ops = heads, layout.positions, ops
        ctx.save_for_backward(qkv)
        q, k, v = ops.attention_inputs(qkv, heads, store, layout)
        return q, k, v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.ops.attention_inputs_backward(gradients, *ctx.saved_tensors, ctx.heads, ctx.positions)
        return (*found, None, None, None, None)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, store: KVStore, layout: Layout, scale: float, ops: Ops
    ) -> Tensor:
        out, lse = ops.attention(q, store, layout, scale)
        ctx.store, ctx.layout, ctx.scale, ctx.ops = store, layout, scale, ops
        ctx.save_for_backward(q, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse = ctx.saved_tensors
        gradients = ctx.ops.attention_backward(dout.contiguous(), q, out, lse, ctx.store, ctx.layout, ctx.scale)
        return (*gradients, None, None, None, None)


class _StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, master: Tensor, working: Tensor, ops: Ops) -> Tensor:
        ctx.count, ctx.ops = master.shape[0], ops
        ctx.save_for_backward(tokens)
        return working[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return None, ctx.ops.embedding_backward(dy, tokens, ctx.count), None, None

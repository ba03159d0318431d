"""The operators with their gradients: one function each, for rollout and learner alike.

With gradients disabled a function is a direct call of the operator. With gradients enabled the same forward operator
runs inside a `torch.autograd.Function` whose backward is written out; so recording a graph cannot change a bit of the
forward (`tests/model/test_transformer.py`). Weights enter twice: the *working* weight that is multiplied, and the FP32
*master* that receives the gradient, straight through the quantization.

Shapes: T rows, K and N the inputs and outputs of a linear layer, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import KVStore, Layout, Operand, Ops
from isobit.precision import QTensor, QuantSpec

_ALONG_TOKENS = {"1x128": "128x1", "1x32": "32x1", "row": "128x1"}
_ALONG_INPUTS = ("1x32", "1x16", "row")


@dataclass(frozen=True, eq=False)
class Weight:
    """One linear layer's weights [N, K]: masters, working copies, and how its three products run."""

    name: str
    master: Tensor
    working: Operand
    bias_master: Tensor | None
    bias: Tensor | None
    activation: QuantSpec | None = None
    gradient: QuantSpec | None = None
    dgrad: str = "bf16"
    wgrad: str = "bf16"


@dataclass(frozen=True, eq=False)
class Vector:
    """A norm's weight [C] or an embedding [V, C]: its master and its working copy."""

    name: str
    master: Tensor
    working: Tensor


def linear(x: Tensor, weight: Weight, ops: Ops) -> Tensor:
    """x [T, K] times the weight, plus bias: [T, N] in x's dtype."""
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight.master, weight.bias_master, weight, ops)
    operand = x if weight.activation is None else ops.quantize(x, weight.activation, weight.name)
    return ops.product(operand, weight.working, weight.bias, x.dtype)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Vector, eps: float, ops: Ops) -> tuple[Tensor, Tensor]:
    """(normed, x + residual), both [R, C]."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, residual, weight.master, weight.working, eps, ops)
    normed, summed, _ = ops.rms_norm(x, weight.working, eps, residual)
    return normed, summed


def rotary(x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, ops: Ops) -> Tensor:
    """Rotate x [T, heads, D] to its positions."""
    if torch.is_grad_enabled():
        return _Rotary.apply(x, tables, positions, ops)
    return ops.rotary(x, *tables, positions)


def attention(q: Tensor, k: Tensor, v: Tensor, store: KVStore, layout: Layout, scale: float, ops: Ops) -> Tensor:
    """Store k and v, then attend over all that is stored: [T, H, D]."""
    if torch.is_grad_enabled():
        return _Attention.apply(q, k, v, store, layout, scale, ops)
    ops.kv_write(store, k, v, layout)
    return ops.attention(q, store, layout, scale)[0]


def rounded(x: Tensor, spec: QuantSpec, ops: Ops) -> Tensor:
    """x [T, H, D] quantized per row and back, in x's dtype; the gradient goes straight through."""
    flat = x.reshape(-1, x.shape[-1])
    values = ops.quantize(flat.detach(), spec, "queries").dequantize().to(x.dtype).view(x.shape)
    return _StraightThrough.apply(x, values) if torch.is_grad_enabled() else values


def silu_mul(gate_up: Tensor, ops: Ops) -> Tensor:
    """[T, 2I] to [T, I]."""
    return _SiluMul.apply(gate_up, ops) if torch.is_grad_enabled() else ops.silu_mul(gate_up)


def embedding(tokens: Tensor, table: Vector) -> Tensor:
    """Rows of the table [V, C] for tokens [T]."""
    if torch.is_grad_enabled():
        return _Embedding.apply(tokens, table.master, table.working)
    return table.working[tokens]


def head_logprobs(
    hidden: Tensor, head: Weight, targets: Tensor, temperature: float, chunk: int, ops: Ops
) -> tuple[Tensor, Tensor]:
    """(log-probability of `targets` [T], entropy [T], without gradient), `chunk` rows of logits at a time."""
    if torch.is_grad_enabled():
        return _HeadLogprobs.apply(hidden, head.master, head, targets, temperature, chunk, ops)
    return _chunked_logprobs(hidden, head, targets, temperature, chunk, ops)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, bias_master: Tensor | None, weight: Weight, ops: Ops) -> Tensor:
        ctx.weight, ctx.ops = weight, ops
        if weight.activation is None:
            ctx.spec = None
            ctx.save_for_backward(x)
            return ops.product(x, weight.working, weight.bias, x.dtype)
        quantized = ops.quantize(x, weight.activation, weight.name)
        ctx.spec = quantized.spec
        ctx.save_for_backward(quantized.data, quantized.scale)
        return ops.product(quantized, weight.working, weight.bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, ops, dy = ctx.weight, ctx.ops, dy.contiguous()
        first, *scale = ctx.saved_tensors
        saved = QTensor(first, scale[0], ctx.spec) if scale else first
        dx = _dgrad(dy, weight, ops) if ctx.needs_input_grad[0] else None
        dw = _wgrad(dy, saved, weight, ops) if ctx.needs_input_grad[1] else None
        db = dy.double().sum(0).float() if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def _dgrad(dy: Tensor, weight: Weight, ops: Ops) -> Tensor:
    """dx [T, K] = dy [T, N] · W [N, K]."""
    working = weight.working
    if weight.dgrad == "fp8" and isinstance(working, QTensor) and weight.gradient is not None:
        quantized = ops.quantize(dy, weight.gradient, f"output gradient of {weight.name}")
        transposed = working.transpose()
        if working.spec.granularity in _ALONG_INPUTS:  # scales for every row of N: quantized again, along N
            transposed = ops.quantize(transposed.dequantize().contiguous(), working.spec, weight.name)
        return ops.product(quantized, transposed, None, dy.dtype)
    return ops.product(dy, _plain(working, dy.dtype).t().contiguous(), None, dy.dtype)


def _wgrad(dy: Tensor, saved: Operand, weight: Weight, ops: Ops) -> Tensor:
    """dW [N, K] = dyᵀ · x in float32, both operands quantized along the tokens."""
    if weight.wgrad == "fp8" and isinstance(saved, QTensor) and weight.gradient is not None:
        gradient = ops.quantize(dy, _along_tokens(weight.gradient), f"output gradient of {weight.name}")
        activation = ops.quantize(saved.dequantize(), _along_tokens(saved.spec), weight.name)
        return ops.product(gradient.transpose(), activation.transpose(), None, torch.float32)
    return ops.product(dy.t().contiguous(), _plain(saved, dy.dtype).t().contiguous(), None, torch.float32)


def _along_tokens(spec: QuantSpec) -> QuantSpec:
    return replace(spec, granularity=_ALONG_TOKENS.get(spec.granularity, spec.granularity))


def _plain(operand: Operand, dtype: torch.dtype) -> Tensor:
    return operand.dequantize().to(dtype) if isinstance(operand, QTensor) else operand


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


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, ops: Ops) -> Tensor:
        ctx.tables, ctx.positions, ctx.ops = tables, positions, ops
        return ops.rotary(x, *tables, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ops.rotary(dy.contiguous(), *ctx.tables, ctx.positions, inverse=True), None, None, None


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, store: KVStore, layout: Layout, scale: float, ops: Ops
    ) -> Tensor:
        ops.kv_write(store, k, v, layout)
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


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, ops: Ops) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(gate_up)
        return ops.silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ops.silu_mul_backward(dh.contiguous(), *ctx.saved_tensors), None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, master: Tensor, working: Tensor) -> Tensor:
        ctx.shape = master.shape
        ctx.save_for_backward(tokens)
        return working[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return None, torch.zeros(ctx.shape).index_add_(0, tokens, dy.float()), None


class _HeadLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor,
        head: Weight,
        targets: Tensor,
        temperature: float,
        chunk: int,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _chunked_logprobs(hidden, head, targets, temperature, chunk, ops)
        ctx.head, ctx.temperature, ctx.chunk, ctx.ops = head, temperature, chunk, ops
        ctx.save_for_backward(hidden, targets)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        weight, ops = ctx.head.working, ctx.ops
        transposed = weight.t().contiguous()
        dhidden, dweight = torch.empty_like(hidden), torch.zeros(weight.shape)
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = ops.product(hidden[rows], weight, None, torch.float32)
            # d log p(target) / d logits = (onehot - softmax) / temperature
            dlogits = torch.softmax(logits / ctx.temperature, -1).neg_()
            dlogits[torch.arange(dlogits.shape[0]), targets[rows]] += 1.0
            dlogits = (dlogits * (dlogprobs[rows] / ctx.temperature).unsqueeze(-1)).to(hidden.dtype)
            dhidden[rows] = ops.product(dlogits, transposed, None, hidden.dtype)
            dweight += ops.product(dlogits.t().contiguous(), hidden[rows].t().contiguous(), None, torch.float32)
        return dhidden, dweight, None, None, None, None, None


def _chunked_logprobs(
    hidden: Tensor, head: Weight, targets: Tensor, temperature: float, chunk: int, ops: Ops
) -> tuple[Tensor, Tensor]:
    logprobs, entropy = torch.empty(hidden.shape[0]), torch.empty(hidden.shape[0])
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        logits = ops.product(hidden[rows], head.working, None, torch.float32)
        logprobs[rows], entropy[rows] = ops.token_logprobs(logits, targets[rows], temperature)
    return logprobs, entropy

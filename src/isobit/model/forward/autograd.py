"""The operators with their gradients: one function each, for rollout and learner alike.

With gradients disabled a function is a direct call of the operator. With gradients enabled the same
forward operator runs inside a `torch.autograd.Function` whose backward is written out; so recording
a graph cannot change a bit of the forward (`tests/model/test_transformer.py`). Weights enter twice:
the *working* weight that is multiplied, and the FP32 *master* that receives the gradient, straight
through the quantization.

What an elementwise operator makes again bit for bit of what is kept anyway is not kept (COAT: Xi et
al. 2024, arXiv 2410.19313, which keeps it rounded): the operands of products behind norms and
gates, queries, and keys and values. `tests/model/test_saved.py` holds gradients to the bits that
they have when all is kept.

Shapes: T rows, K and N the inputs and outputs of a linear layer, V vocabulary. Left out: attention
(`attend.py`), experts and linear attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Operand, Ops, unwatched
from isobit.model.adapters import low_rank
from isobit.model.families.family import MlpActivation
from isobit.model.forward.accumulate_grad import tied_gradient
from isobit.model.forward.gate import activated, activated_backward, activated_codes
from isobit.model.forward.linear_backward import (
    GradientCodes,
    backward_of_codes,
    codes_wanted,
    linear_backward,
)
from isobit.model.weights.stored import FROZEN, Vector, Weight, copy_spec, has_own_copy
from isobit.precision import QTensor

Again = Callable[[], tuple[Tensor, Tensor]]


def linear(
    x: Tensor,
    weight: Weight,
    ops: Ops,
    *,
    kept: bool = False,
    dtype: torch.dtype | None = None,
    operand: QTensor | None = None,
) -> Tensor:
    """Return x [T, K] times the weight, plus bias: [T, N] in x's dtype, or all of it in a wider
    `dtype`. `kept`: another function keeps x for its backward, so this one does too, and not its
    codes. `operand`: x, quantized already."""
    dtype = dtype or x.dtype
    if torch.is_grad_enabled():
        masters = weight.master, weight.bias_master
        return _Linear.apply(
            x, *masters, weight, ops, kept, dtype, operand, *weight.adapter_masters
        )
    return multiplied(_quantized(x.to(dtype), weight, ops), weight, ops, dtype)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Vector, eps: float, ops: Ops
) -> tuple[Tensor, Tensor]:
    """Return (normed, x + residual), both [R, C]."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, residual, weight.master, weight.working, eps, ops)
    normed, summed, _ = ops.rms_norm(x, weight.working, eps, residual)
    return normed, summed


def unweighted_norm(x: Tensor, width: int, eps: float, ops: Ops) -> Tensor:
    """Return x [R, n · width], each `width` of its numbers normed, without a weight."""
    ones_ = Vector("", FROZEN, torch.ones(width, dtype=x.dtype, device=x.device))
    return rms_norm(x.contiguous().view(-1, width), None, ones_, eps, ops)[0].view(x.shape)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Vector,
    eps: float,
    weight: Weight,
    ops: Ops,
    codes: GradientCodes | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (linear(rms_norm(x + residual)) [T, N], x + residual [T, K]): the bits of the two in
    turn. `codes`: of the first result's gradient, from a `gated_linear` which alone is given that
    result."""
    if torch.is_grad_enabled():
        masters = norm.master, weight.master, weight.bias_master
        return _NormLinear.apply(
            x, residual, *masters, norm, eps, weight, ops, codes, *weight.adapter_masters
        )
    operand, summed, _ = _normed(x, residual, norm, eps, weight, ops)
    return multiplied(operand, weight, ops, x.dtype), summed


def gated_linear(
    gate_up: Tensor,
    activation: MlpActivation,
    weight: Weight,
    ops: Ops,
    again: "Again | None" = None,
    codes: GradientCodes | None = None,
) -> Tensor:
    """Return linear(activated(activation, gate_up [T, 2K])) [T, N]: the bits of the two in turn.
    `again`: a function that computes gate_up once more, so that it is not kept for the backward.
    `codes`: where the gradient of gate_up goes, if its maker takes it in codes."""
    if torch.is_grad_enabled():
        masters = weight.master, weight.bias_master
        return _GatedLinear.apply(
            gate_up, *masters, activation, weight, ops, again, codes, *weight.adapter_masters
        )
    return multiplied(_gated(gate_up, activation, weight, ops), weight, ops, gate_up.dtype)


def multiplied(x: Operand, weight: Weight, ops: Ops, dtype: torch.dtype) -> Tensor:
    """Return x [T, K] times the weight and adapters, without a gradient: [T, N]."""
    if weight.several is not None:
        return weight.several.product(x, weight, ops, dtype)
    return low_rank.product(x, weight, ops, dtype)[0]


def embedding(tokens: Tensor, table: Vector, scale: float | None, ops: Ops) -> Tensor:
    """Rows of the table [V, C] for tokens [T]; times a scale, which is rounded to their type
    first."""
    factor = None if scale is None else float(torch.tensor(scale, dtype=table.working.dtype))
    if torch.is_grad_enabled():
        return _Embedding.apply(tokens, table.master, table.working, factor, ops)
    return _embedded(tokens, table.working, factor, ops)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        bias_master: Tensor | None,
        weight: Weight,
        ops: Ops,
        kept: bool,
        dtype: torch.dtype,
        given: QTensor | None,
        *adapter_masters: Tensor,
    ) -> Tensor:
        ctx.weight, ctx.ops, ctx.kept, ctx.dtype = weight, ops, kept, x.dtype
        operand = _quantized(x.to(dtype), weight, ops) if given is None else given
        y, us = low_rank.product(operand, weight, ops, dtype)
        factors: tuple[Tensor, ...] = ()
        if weight.keeps_inputs:
            factors = (x,) if kept else parts(_multiplied(x.to(dtype), operand, weight, ops))
        ctx.save_for_backward(*us, *factors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight
        us = ctx.saved_tensors[: len(weight.adapters)]
        saved = ctx.saved_tensors[len(weight.adapters) :]
        if ctx.kept and saved:
            operand: Operand | None = _multiplied(saved[0].to(dy.dtype), None, weight, ctx.ops)
        else:
            # codes and scales, a tensor, or nothing
            spec = copy_spec(weight) if has_own_copy(weight) else weight.activation
            operand = (
                QTensor(saved[0], saved[1], spec)
                if len(saved) == 2 and spec is not None
                else next(iter(saved), None)
            )
        dx, dw, db, *adapters = linear_backward(ctx, dy, operand, us, ctx.needs_input_grad[:3])
        dx = None if dx is None else dx.to(ctx.dtype)
        return dx, dw, db, None, None, None, None, None, *adapters


def _multiplied(x: Tensor, operand: Operand | None, weight: Weight, ops: Ops) -> Operand:
    """Return what gradients of masters take of x [T, K]: `operand`, which was quantized from it, or
    that again; or a copy of x quantized along the tokens. DGrad needs neither."""
    if weight.activation is not None and has_own_copy(weight):
        return ops.quantize_along_tokens(x, weight.activation, weight.name)
    return _quantized(x, weight, unwatched(ops)) if operand is None else operand


def _quantized(x: Tensor, weight: Weight, ops: Ops) -> Operand:
    return x if weight.activation is None else ops.quantize(x, weight.activation, weight.name)


def parts(operand: Operand) -> tuple[Tensor, ...]:
    """Return the tensors as which an operand is saved for the backward."""
    return (operand.data, operand.scale) if isinstance(operand, QTensor) else (operand,)


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        master: Tensor,
        working: Tensor,
        eps: float,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        normed, summed, rstd = ops.rms_norm(x, working, eps, residual)
        ctx.ops, ctx.has_residual = ops, residual is not None
        ctx.save_for_backward(summed, working, rstd)
        return normed, summed.view_as(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnormed: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.ops.rms_norm_backward_added(dnormed.contiguous(), *ctx.saved_tensors, dsummed)
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
        codes: GradientCodes | None,
        *adapter_masters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        operand, summed, rstd = _normed(x, residual, norm, eps, weight, ops)
        y, us = low_rank.product(operand, weight, ops, x.dtype)
        ctx.norm = norm
        ctx.eps = eps
        ctx.weight = weight
        ctx.ops = ops
        ctx.codes = codes
        if codes is not None:
            codes.wanted = codes_wanted(weight, (True, *ctx.needs_input_grad[3:5]))
        ctx.has_residual = residual is not None
        ctx.save_for_backward(summed, rstd, *us)
        return y, summed.view_as(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        (summed, rstd, *us), norm, weight = ctx.saved_tensors, ctx.norm, ctx.weight
        operand = (
            _normed_again(summed, norm, ctx.eps, weight, ctx.ops) if weight.keeps_inputs else None
        )
        if operand is not None and ctx.codes is not None and ctx.codes.found is not None:
            gradients = backward_of_codes(ctx.codes, operand, weight, ctx.ops, dy.dtype)
        else:
            needed = (True, *ctx.needs_input_grad[3:5])
            gradients = linear_backward(ctx, dy, operand, us, needed)
        dnormed, dw, db, *adapters = gradients
        del operand
        assert dnormed is not None
        dx, dnorm = ctx.ops.rms_norm_backward_added(dnormed, summed, norm.working, rstd, dsummed)
        return (
            dx,
            dx if ctx.has_residual else None,
            dnorm,
            dw,
            db,
            None,
            None,
            None,
            None,
            None,
            *adapters,
        )


def _normed(
    x: Tensor, residual: Tensor | None, norm: Vector, eps: float, weight: Weight, ops: Ops
) -> tuple[Operand, Tensor, Tensor]:
    if weight.activation is None:
        return ops.rms_norm(x, norm.working, eps, residual)
    return ops.rms_norm_quantized(x, norm.working, eps, residual, weight.activation, weight.name)


def _normed_again(summed: Tensor, norm: Vector, eps: float, weight: Weight, ops: Ops) -> Operand:
    """Return `_multiplied` of the normed rows."""
    if has_own_copy(weight):
        return _multiplied(ops.rms_norm(summed, norm.working, eps)[0], None, weight, ops)
    return _normed(summed, None, norm, eps, weight, unwatched(ops))[0]


class _GatedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        master: Tensor,
        bias_master: Tensor | None,
        activation: MlpActivation,
        weight: Weight,
        ops: Ops,
        again: Again | None,
        codes: GradientCodes | None,
        *adapter_masters: Tensor,
    ) -> Tensor:
        y, us = low_rank.product(
            _gated(gate_up, activation, weight, ops), weight, ops, gate_up.dtype
        )
        ctx.activation, ctx.weight, ctx.ops, ctx.again = activation, weight, ops, again
        ctx.codes = codes
        ctx.save_for_backward(*us, *(() if again else (gate_up,)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, saved = ctx.weight, ctx.saved_tensors
        us, gate_up = saved[: len(weight.adapters)], ctx.again()[0] if ctx.again else saved[-1]
        ctx.again = None  # it holds the residual stream
        operand = (
            _gated_again(gate_up, ctx.activation, weight, ctx.ops) if weight.keeps_inputs else None
        )
        dh, dw, db, *adapters = linear_backward(ctx, dy, operand, us, ctx.needs_input_grad[:3])
        del operand
        if dh is None:
            dgate_up = None
        elif ctx.codes is not None and ctx.codes.wanted is not None:
            dgate_up = ctx.codes.of_gate(ctx.activation, dh, gate_up, ctx.ops)
        else:
            dgate_up = activated_backward(ctx.activation, dh, gate_up, ctx.ops)
        return dgate_up, dw, db, None, None, None, None, None, *adapters


def _gated(gate_up: Tensor, activation: MlpActivation, weight: Weight, ops: Ops) -> Operand:
    return activated_codes(activation, gate_up, weight.activation, weight.name, ops)


def _gated_again(gate_up: Tensor, activation: MlpActivation, weight: Weight, ops: Ops) -> Operand:
    """Return `_multiplied` of the gated rows."""
    if has_own_copy(weight):
        return _multiplied(activated(activation, gate_up, ops), None, weight, ops)
    return _gated(gate_up, activation, weight, unwatched(ops))


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, master: Tensor, working: Tensor, factor: float | None, ops: Ops
    ) -> Tensor:
        ctx.master, ctx.factor, ctx.ops = master, factor, ops
        ctx.save_for_backward(tokens)
        return _embedded(tokens, working, factor, ops)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        dy = dy if ctx.factor is None else dy.float() * ctx.factor
        tied = tied_gradient(ctx.master)
        if tied is not None:
            tied.add_embedding(dy, ctx.ops)
            return None, None, None, None, None
        return None, ctx.ops.embedding_backward(dy, tokens, len(ctx.master)), None, None, None


def _embedded(tokens: Tensor, table: Tensor, factor: float | None, ops: Ops) -> Tensor:
    rows = ops.embedding(tokens, table)
    return rows if factor is None else (rows.float() * factor).to(rows.dtype)

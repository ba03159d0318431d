"""Gradients of a linear layer's operand, weight, bias and adapters, its products in the formats of
the flow.

Under FP8 both products of a backward take the output's gradient: DGrad quantized along its columns,
WGrad along the tokens. One operator makes both, since it reads the gradient once; behind a gate the
gate's backward makes them itself (`GradientCodes`). Left out: what is kept for the backward, and
the forward (`autograd.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.kernels import Activation, Operand, Ops, input_gradient, plain
from isobit.model.adapters import low_rank
from isobit.model.forward.accumulate_grad import added_to
from isobit.model.weights.stored import Weight, has_own_copy
from isobit.precision import QTensor, QuantSpec

ALONG_INPUTS = ("1x32", "1x16", "row")


def linear_backward(
    ctx: Any, dy: Tensor, operand: Operand | None, us: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the operand, of the weight and of the bias, None if not `needed`,
    and of each adapter's A and B, of dy [T, N]. `operand`: the x [T, K] that WGrad and adapters
    multiply, None where the weight needs none; `us`: each adapter's u."""
    weight, ops, dy = ctx.weight, ctx.ops, dy.contiguous()
    of_inputs, of_weight = needed[0], needed[1] and operand is not None
    rows, tokens = _quantized(dy, operand, weight, ops, of_inputs, of_weight)
    if weight.adapters:
        assert operand is not None
        dx, found = low_rank.backward(dy, operand, us, weight, ops, of_inputs)
        if dx is not None:
            dx = dx.add_(_dgrad(rows, weight, ops, torch.float32)).to(dy.dtype)
    else:
        dx, found = _dgrad(rows, weight, ops, dy.dtype) if of_inputs else None, []
    del rows
    dw = None
    if of_weight and operand is not None:
        dw = _wgrad(tokens, operand, weight, ops)
    db = dy.double().sum(0).float() if needed[2] else None
    return dx, dw, db, *found


class GradientCodes:
    """The gradient dy [T, N] of a product's result in codes alone, from the backward that makes dy
    to that of the product.

    Autograd passes tensors of a result's type and no codes, so it passes an empty one in their
    place: dy is never written, nor read. `wanted`: how the product takes dy, and under which name,
    where it takes nothing but codes; `found`: these, along its columns and along the tokens.
    """

    def __init__(self) -> None:
        self.wanted: tuple[QuantSpec, str] | None = None
        self.found: tuple[QTensor, QTensor] | None = None

    def of_gate(self, activation: Activation, dh: Tensor, gate_up: Tensor, ops: Ops) -> Tensor:
        """Find them, as the gradient of gate_up; what autograd passes on."""
        assert self.wanted is not None
        self.found = ops.gate_mul_backward_quantized(activation, dh, gate_up, *self.wanted)
        return gate_up.new_empty(()).expand_as(gate_up)

    def take(self) -> tuple[QTensor, QTensor]:
        """Return what was found; it is kept no longer."""
        assert self.found is not None
        found, self.found = self.found, None
        return found


def codes_wanted(weight: Weight, needed: Sequence[bool]) -> tuple[QuantSpec, str] | None:
    """Return how `linear_backward` quantizes dy, and under which name, where it takes of it nothing
    but codes, along its columns and along the tokens."""
    low = weight.dgrad == "fp8" and isinstance(weight.working, QTensor) and needed[0]
    along = weight.wgrad == "fp8" and weight.activation is not None and needed[1]
    if weight.gradient is None or weight.adapters or needed[2] or not (low and along):
        return None
    return weight.gradient, f"output gradient of {weight.name}"


def backward_of_codes(
    codes: GradientCodes, operand: Operand, weight: Weight, ops: Ops, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Return `linear_backward` of a gradient that came in codes, that of the operand in `dtype`."""
    rows, tokens = codes.take()
    dx = _dgrad(rows, weight, ops, dtype)
    del rows
    return dx, _wgrad(tokens, operand, weight, ops), None


def _quantized(
    dy: Tensor, operand: Operand | None, weight: Weight, ops: Ops, of_inputs: bool, of_weight: bool
) -> tuple[Operand, Operand]:
    """Return (dy [T, N] as DGrad takes it, dyᵀ [N, T] as WGrad does), where they are needed."""
    spec, name = weight.gradient, f"output gradient of {weight.name}"
    low = weight.dgrad == "fp8" and isinstance(weight.working, QTensor) and of_inputs
    along = weight.wgrad == "fp8" and isinstance(operand, QTensor) and of_weight
    if spec is not None and low and along:
        return ops.quantize_both_ways(dy, spec, name)
    rows = ops.quantize(dy, spec, name) if spec is not None and low else dy
    tokens = ops.quantize_along_tokens(dy, spec, name) if spec is not None and along else dy.t()
    return rows, tokens


def _dgrad(dy: Operand, weight: Weight, ops: Ops, out: torch.dtype) -> Tensor:
    """Return dx [T, K] = dy [T, N] · W [N, K], in `out`."""
    working = weight.working
    if isinstance(dy, Tensor):
        return input_gradient(ops, dy, working, out)
    assert isinstance(working, QTensor)
    transposed = working.transpose()
    if working.spec.granularity in ALONG_INPUTS:  # a scale for every row of N: again, along N
        transposed = ops.quantize(
            transposed.dequantize().contiguous(), working.spec, f"transposed {weight.name}"
        )
    return ops.gradient_product(dy, transposed, out)


def _wgrad(dy: Operand, saved: Operand, weight: Weight, ops: Ops) -> Tensor | None:
    """Return dW [N, K] = dyᵀ [N, T] · x in float32; `saved` is x [T, K], quantized along the tokens
    where dyᵀ is, or its copy [K, T] that is already. None if it was added to the gradient that
    there is."""
    into = added_to(weight.master)
    if isinstance(dy, Tensor):
        right: Operand = plain(saved, dy.dtype).t()
    elif has_own_copy(weight):
        right = saved
    else:
        assert isinstance(saved, QTensor)
        right = ops.quantize_along_tokens(saved, saved.spec, weight.name)
    dw = ops.gradient_product(dy, right, torch.float32, into)
    return dw if into is None else None

"""Rows go through their experts sorted by expert: one grouped product for each of the two matrices.

A token is in the sorted rows once for every expert that serves it. Activations are quantized row by
row, so once per token; a row's bits are those of the expert's MLP over that row alone
(`tests/model/test_experts.py`). The forward never waits for a GPU. The backward waits once for each
of the two matrices, because an expert without rows gets no gradient.

Activations or gradients whose rows share scales (granularity `tensor`, and the like) are quantized
expert by expert, as separate matrices. Left out: which experts serve a token (`moe.py`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Operand, Ops, Stacked, grouped_input_gradient, picked, plain, unwatched
from isobit.model.forward import autograd
from isobit.model.forward.accumulate_grad import added_to
from isobit.model.forward.linear_backward import ALONG_INPUTS
from isobit.model.weights.layout import Mixture, Mlp
from isobit.model.weights.stored import Weight, has_own_copy
from isobit.precision import QTensor, QuantSpec


def through_experts(
    x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops, again: bool = False
) -> Tensor:
    """The experts `chosen` [T, k] int64 for the rows of x [T, H], times their gates [T, k] float32,
    added in float32 in the order of k and rounded once: [T, H] in x's dtype. `again`: the backward
    computes both products again; where rows share scales it does not."""
    first = layer.experts[0]
    if any(
        _shares_scales(spec) for weight in (first.gate_up, first.down) for spec in _specs(weight)
    ):
        return _one_by_one(x, gates, chosen, layer, ops)
    if torch.is_grad_enabled():
        weights = [e.gate_up for e in layer.experts] + [e.down for e in layer.experts]
        masters = [weight.master for weight in weights] + [weight.bias_master for weight in weights]
        return _Experts.apply(x, gates, chosen, layer, ops, again, *masters)
    return _forward(x, gates, chosen, layer, ops)[0]


def mlp(x: Tensor, layer: Mlp, ops: Ops) -> Tensor:
    """The gated MLP of one expert: x [T, H] to [T, H]."""
    return autograd.gated_linear(
        autograd.linear(x, layer.gate_up, ops), layer.activation, layer.down, ops
    )


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        chosen: Tensor,
        layer: Mixture,
        ops: Ops,
        again: bool,
        *masters: Tensor | None,
    ) -> Tensor:
        total, places, gate_up, results = _forward(x, gates, chosen, layer, ops)
        ctx.layer, ctx.ops, ctx.again = layer, ops, again
        inputs = (
            (x,) if again or layer.experts[0].gate_up.keeps_inputs else ()
        )  # the router keeps it too
        ctx.save_for_backward(gates, *places, *inputs, *(() if again else (gate_up, results)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        layer, ops, count = ctx.layer, ctx.ops, len(ctx.layer.experts)
        gates, rows, place, offsets, *kept = ctx.saved_tensors
        first = layer.experts[0]
        up, down, activation = first.gate_up, first.down, first.activation
        needed = ctx.needs_input_grad[6:]
        gate_up, results = (
            _results(kept[0], rows, offsets, layer, unwatched(ops)) if ctx.again else kept[-2:]
        )
        dy, dgates = ops.sum_of_rows_backward(dtotal.contiguous(), results, place, gates)
        ddown: list[Tensor | None] = [None] * count
        dup: list[Tensor | None] = [None] * count
        if any(needed[count : 2 * count]):
            own = has_own_copy(down)
            hidden = (
                ops.gate_mul(activation, gate_up) if own else _gated(gate_up, layer, unwatched(ops))
            )
            downs = [e.down for e in layer.experts]
            ddown = _weight_gradients(dy, hidden, downs, offsets, needed[count : 2 * count], ops)
            del hidden
        dgate_up = ops.gate_mul_backward(
            activation, _input_gradient(dy, layer.down, down, offsets, ops), gate_up
        )
        if any(needed[:count]):
            inputs = kept[0] if has_own_copy(up) else _inputs(kept[0], up, unwatched(ops))
            ups = [e.gate_up for e in layer.experts]
            dup = _weight_gradients(
                dgate_up, picked(inputs, rows), ups, offsets, needed[:count], ops
            )
        dbias = _bias_gradients(dgate_up, offsets, needed[2 * count : 3 * count], ops)
        dbias += _bias_gradients(dy, offsets, needed[3 * count :], ops)
        dx = None
        if ctx.needs_input_grad[0]:
            drows = _input_gradient(dgate_up, layer.gate_up, up, offsets, ops)
            dx = ops.sum_of_rows(drows, place.sort(1).values, None)  # in the order of the experts
        return dx, dgates, None, None, None, None, *dup, *ddown, *dbias


Places = tuple[Tensor, Tensor, Tensor]
"""Of the rows sorted by expert: each row's token [T k], the rows of each token [T, k], and where
every expert's rows begin [experts + 1]."""


def _forward(
    x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops
) -> tuple[Tensor, Places, Tensor, Tensor]:
    """(sums [T, H], places; of the sorted rows gate_up [T k, 2I] and results [T k, H])."""
    rows, place, offsets = ops.by_expert(chosen, len(layer.experts))
    gate_up, results = _results(x, rows, offsets, layer, ops)
    return ops.sum_of_rows(results, place, gates), (rows, place, offsets), gate_up, results


def _results(
    x: Tensor, rows: Tensor, offsets: Tensor, layer: Mixture, ops: Ops
) -> tuple[Tensor, Tensor]:
    """(gate_up [T k, 2I], results [T k, H]) of the rows of x [T, H] at these places, which are
    sorted by expert."""
    first = layer.experts[0]
    gate_up = ops.grouped_product(
        _inputs(x, first.gate_up, ops), layer.gate_up, offsets, x.dtype, rows
    )
    return gate_up, ops.grouped_product(_gated(gate_up, layer, ops), layer.down, offsets, x.dtype)


def _inputs(x: Tensor, weight: Weight, ops: Ops) -> Operand:
    return x if weight.activation is None else ops.quantize(x, weight.activation, _name(weight))


def _gated(gate_up: Tensor, layer: Mixture, ops: Ops) -> Operand:
    first = layer.experts[0]
    spec = first.down.activation
    if spec is None:
        return ops.gate_mul(first.activation, gate_up)
    return ops.gate_mul_quantized(first.activation, gate_up, spec, _name(first.down))


def _input_gradient(
    dy: Tensor, stacked: Stacked, weight: Weight, offsets: Tensor, ops: Ops
) -> Tensor:
    """dx [R, K] = dy [R, N] · W [N, K] of every row's expert, as of a linear layer."""
    if weight.dgrad == "fp8" and stacked.spec is not None and weight.gradient is not None:
        quantized = ops.quantize(dy, weight.gradient, f"output gradient of {_name(weight)}")
        transposed = stacked.transpose()
        if (
            stacked.spec.granularity in ALONG_INPUTS
        ):  # scales for every row of N: quantized again, along N
            spec, name = stacked.spec, f"transposed {_name(weight)}"
            transposed = transposed.map(
                lambda w: ops.quantize(plain(w, torch.float32).contiguous(), spec, name)
            )
        return ops.grouped_product(quantized, transposed, offsets, dy.dtype)
    return grouped_input_gradient(ops, dy, stacked, offsets)


def _weight_gradients(
    dy: Tensor,
    x: Operand,
    weights: Sequence[Weight],
    offsets: Tensor,
    needed: tuple[bool, ...],
    ops: Ops,
) -> list[Tensor | None]:
    """dW [N, K] float32 of every expert that has rows and needs one, of dy [R, N] and the rows x
    [R, K] as they were multiplied; before they were quantized, where WGrad has copies of its own.
    None of what was added to a gradient."""
    weight, masters = weights[0], [each.master for each in weights]
    name, into = _name(weight), [added_to(master) for master in masters]
    if has_own_copy(weight) and isinstance(x, Tensor):
        assert weight.gradient is not None
        assert weight.activation is not None
        found: list[Tensor | None] = [None] * len(needed)
        for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
            if stop > start:
                copy = ops.quantize_along_tokens(x[start:stop], weight.activation, name)
                gradient = ops.quantize_along_tokens(
                    dy[start:stop], weight.gradient, f"output gradient of {name}"
                )
                found[expert] = ops.gradient_product(gradient, copy, torch.float32, into[expert])
    else:
        given = weight.gradient if weight.wgrad == "fp8" and isinstance(x, QTensor) else None
        found = ops.grouped_weight_gradient(dy, x, offsets, given, name, into)
    return [dw if wanted and old is None else None for dw, wanted, old in zip(found, needed, into)]


def _bias_gradients(
    dy: Tensor, offsets: Tensor, needed: Sequence[bool], ops: Ops
) -> list[Tensor | None]:
    """[N] float32 of every expert that has rows and needs one, of dy [R, N]."""
    if not any(needed):
        return [None] * len(needed)
    return [
        db if wanted else None for db, wanted in zip(ops.grouped_bias_gradient(dy, offsets), needed)
    ]


def _one_by_one(x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops) -> Tensor:
    rows, slots = chosen.shape
    token, place, offsets = ops.by_expert(chosen, len(layer.experts))
    parts = x.index_select(0, token).split(offsets.diff().tolist())
    found = [mlp(part, expert, ops) for part, expert in zip(parts, layer.experts) if part.shape[0]]
    if not found:
        return x.new_empty(0, x.shape[1])
    results = torch.cat(found).index_select(0, place.flatten()).view(rows, slots, -1).float()
    total = gates[:, :1] * results[:, 0]
    for slot in range(1, slots):
        total = total + gates[:, slot : slot + 1] * results[:, slot]
    return total.to(x.dtype)


def _specs(weight: Weight) -> list[QuantSpec]:
    """The specs of the activation and of the output gradient, if they are quantized."""
    gradient = weight.gradient if weight.dgrad == "fp8" else None
    return [spec for spec in (weight.activation, gradient) if spec is not None]


def _shares_scales(spec: QuantSpec) -> bool:
    return spec.block((2, 1 << 20))[0] > 1 or spec.scale == "nvfp4"


def _name(weight: Weight) -> str:
    """The name of all experts' weights together: `layers.3.experts.down`."""
    return weight.name.replace(".experts.0.", ".experts.")

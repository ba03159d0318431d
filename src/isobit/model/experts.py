"""Rows go through their experts sorted by expert: one grouped product for each of the two matrices.

A token is in the sorted rows once for every expert that serves it. Activations are quantized row by row, so once per
token; a row's bits are those of the expert's MLP over that row alone (`tests/model/test_experts.py`). The forward never
waits for a GPU, unless WGrad has copies of its own. The backward waits once for each of the two matrices, because an
expert without rows gets no gradient.

Activations or gradients whose rows share scales (granularity `tensor`, and the like) are quantized expert by expert, as
separate matrices. Left out: which experts serve a token (`moe.py`).
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Operand, Ops, Stacked, plain
from isobit.model import autograd
from isobit.model.autograd import ALONG_INPUTS
from isobit.model.weights import Weight, copy_spec, has_own_copy
from isobit.model.working import Mixture, Mlp
from isobit.precision import QTensor, QuantSpec


def through_experts(x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops) -> Tensor:
    """The experts `chosen` [T, k] int64 for the rows of x [T, H], times their gates [T, k] float32, added in float32 in
    the order of k and rounded once: [T, H] in x's dtype."""
    first = layer.experts[0]
    if any(_shares_scales(spec) for weight in (first.gate_up, first.down) for spec in _specs(weight)):
        return _one_by_one(x, gates, chosen, layer, ops)
    if torch.is_grad_enabled():
        masters = [expert.gate_up.master for expert in layer.experts] + [expert.down.master for expert in layer.experts]
        return _Experts.apply(x, gates, chosen, layer, ops, *masters)
    return _forward(x, gates, chosen, layer, ops)[0]


def by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(order [T k], offsets [count + 1]), int64, of choices [T, k]: the flattened choices sorted by expert, then by
    row; and where each expert's rows begin, with their number at the end."""
    assert count < 1 << 15
    found = chosen.flatten().to(torch.int16).sort(stable=True)  # few bits to sort by: a GPU takes them in passes
    return found.indices, torch.searchsorted(
        found.values, torch.arange(count + 1, dtype=torch.int16, device=chosen.device)
    )


def mlp(x: Tensor, layer: Mlp, ops: Ops) -> Tensor:
    """The gated MLP of one expert: x [T, H] to [T, H]."""
    return autograd.gated_linear(autograd.linear(x, layer.gate_up, ops), layer.down, ops)


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops, *masters: Tensor
    ) -> Tensor:
        total, places, inputs, gate_up, hidden, results = _forward(x, gates, chosen, layer, ops)
        (rows, _, offsets), up, down = places, layer.experts[0].gate_up, layer.experts[0].down
        kept = autograd.parts(inputs) if up.keeps_inputs else ()
        kept_hidden = autograd.parts(hidden) if down.keeps_inputs else ()
        if has_own_copy(up):
            kept = _copies(x.index_select(0, rows), up, offsets, ops)
        if has_own_copy(down):
            kept_hidden = _copies(ops.silu_mul(gate_up), down, offsets, ops)
        ctx.layer, ctx.ops, ctx.num_inputs = layer, ops, len(kept)
        ctx.save_for_backward(gates, *places, gate_up, results, *kept, *kept_hidden)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        layer, ops, count = ctx.layer, ctx.ops, len(ctx.layer.experts)
        gates, rows, place, offsets, gate_up, results, *parts = ctx.saved_tensors
        up, down = layer.experts[0].gate_up, layer.experts[0].down
        inputs, hidden = parts[: ctx.num_inputs], parts[ctx.num_inputs :]
        needed = ctx.needs_input_grad[5:]
        dy, dgates = ops.sum_of_rows_backward(dtotal.contiguous(), results, place, gates)
        ddown = _weight_gradients(dy, hidden, None, down, offsets, needed[count:], ops)
        dgate_up = ops.silu_mul_backward(_input_gradient(dy, layer.down, down, offsets, ops), gate_up)
        dup = _weight_gradients(dgate_up, inputs, rows, up, offsets, needed[:count], ops)
        dx = None
        if ctx.needs_input_grad[0]:
            drows = _input_gradient(dgate_up, layer.gate_up, up, offsets, ops)
            dx = ops.sum_of_rows(drows, place.sort(1).values, None)  # in the order of the experts
        return dx, dgates, None, None, None, *dup, *ddown


Places = tuple[Tensor, Tensor, Tensor]
"""Of the rows sorted by expert: each row's token [T k], the rows of each token [T, k], and where every expert's rows
begin [experts + 1]."""


def _forward(
    x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops
) -> tuple[Tensor, Places, Operand, Tensor, Operand, Tensor]:
    """(sums [T, H], places, operand of x [T, H]; of the sorted rows gate_up [T k, 2I], operand, results [T k, H])."""
    first = layer.experts[0]
    order, offsets = by_expert(chosen, len(layer.experts))
    rows, place = order // chosen.shape[1], _inverse(order).view(chosen.shape)
    spec, gated = first.gate_up.activation, first.down.activation
    inputs: Operand = x if spec is None else ops.quantize(x, spec, _name(first.gate_up))
    gate_up = ops.grouped_product(_pick(inputs, rows), layer.gate_up, offsets, x.dtype)
    hidden: Operand = (
        ops.silu_mul(gate_up) if gated is None else ops.silu_mul_quantized(gate_up, gated, _name(first.down))
    )
    results = ops.grouped_product(hidden, layer.down, offsets, x.dtype)
    return ops.sum_of_rows(results, place, gates), (rows, place, offsets), inputs, gate_up, hidden, results


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def _input_gradient(dy: Tensor, stacked: Stacked, weight: Weight, offsets: Tensor, ops: Ops) -> Tensor:
    """dx [R, K] = dy [R, N] · W [N, K] of every row's expert, as of a linear layer."""
    if weight.dgrad == "fp8" and stacked.spec is not None and weight.gradient is not None:
        quantized = ops.quantize(dy, weight.gradient, f"output gradient of {_name(weight)}")
        transposed = stacked.transpose()
        if stacked.spec.granularity in ALONG_INPUTS:  # scales for every row of N: quantized again, along N
            spec, name = stacked.spec, f"transposed {_name(weight)}"
            transposed = transposed.map(lambda w: ops.quantize(plain(w, torch.float32).contiguous(), spec, name))
        return ops.grouped_product(quantized, transposed, offsets, dy.dtype)
    values = stacked if stacked.spec is None else stacked.map(lambda w: plain(w, dy.dtype))
    return ops.grouped_product(dy, values.transpose(), offsets, dy.dtype)


def _weight_gradients(
    dy: Tensor,
    saved: list[Tensor],
    rows: Tensor | None,
    weight: Weight,
    offsets: Tensor,
    needed: tuple[bool, ...],
    ops: Ops,
) -> list[Tensor | None]:
    """dW [N, K] float32 of every expert that has rows and needs one. `saved`: the parts of an operand, of which dy has
    the `rows`, by default all; or those of the copies that `_copies` made."""
    if not any(needed):
        return [None] * len(needed)
    name = _name(weight)
    if has_own_copy(weight):
        assert weight.gradient is not None
        found: list[Tensor | None] = [None] * len(needed)
        for expert, (start, stop), copy in _split(saved, weight, offsets):
            gradient = ops.quantize_along_tokens(dy[start:stop], weight.gradient, f"output gradient of {name}")
            found[expert] = ops.gradient_product(gradient, copy, torch.float32)
    else:
        operand = _operand(saved, weight)
        given = weight.gradient if weight.wgrad == "fp8" and isinstance(operand, QTensor) else None
        found = ops.grouped_weight_gradient(dy, operand if rows is None else _pick(operand, rows), offsets, given, name)
    return [dw if wanted else None for dw, wanted in zip(found, needed)]


def _copies(x: Tensor, weight: Weight, offsets: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
    """Codes [K, R] and scales [K, blocks] of x [R, K] quantized along the tokens, expert by expert; waits for the
    GPU, to know where each expert's rows begin."""
    assert weight.activation is not None
    bounds = [pair for pair in pairwise(offsets.tolist()) if pair[1] > pair[0]]
    found = [ops.quantize_along_tokens(x[i:j], weight.activation, _name(weight)) for i, j in bounds]
    if not found:
        return x.new_empty(x.shape[1], 0), x.new_empty(x.shape[1], 0)
    codes = torch.cat([copy.data.view(torch.uint8) for copy in found], 1)
    return codes.view(found[0].data.dtype), torch.cat([copy.scale for copy in found], 1)


def _split(saved: list[Tensor], weight: Weight, offsets: Tensor) -> Iterator[tuple[int, tuple[int, int], QTensor]]:
    """(expert, its rows, its copy [K, rows]) of every expert that has rows."""
    (codes, scales), spec, column = saved, copy_spec(weight), 0
    for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
        if stop > start:
            wide = spec.block((codes.shape[0], stop - start))[1]
            blocks = -(-(stop - start) // wide)
            yield expert, (start, stop), QTensor(codes[:, start:stop], scales[:, column : column + blocks], spec)
            column += blocks


def _one_by_one(x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops) -> Tensor:
    rows, slots = chosen.shape
    order, offsets = by_expert(chosen, len(layer.experts))
    parts = x.index_select(0, order // slots).split(offsets.diff().tolist())
    found = [mlp(part, expert, ops) for part, expert in zip(parts, layer.experts) if part.shape[0]]
    if not found:
        return x.new_empty(0, x.shape[1])
    results = torch.cat(found).index_select(0, _inverse(order)).view(rows, slots, -1).float()
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


def _pick(operand: Operand, rows: Tensor) -> Operand:
    """The rows of an operand at these indices."""
    if isinstance(operand, Tensor):
        return operand.index_select(0, rows)
    codes = operand.data.view(torch.uint8).index_select(0, rows).view(operand.data.dtype)
    return QTensor(codes, operand.scale.index_select(0, rows), operand.spec)


def _operand(parts: list[Tensor], weight: Weight) -> Operand:
    if len(parts) == 1:
        return parts[0]
    assert weight.activation is not None
    return QTensor(parts[0], parts[1], weight.activation)


def _name(weight: Weight) -> str:
    """The name of all experts' weights together: `layers.3.experts.down`."""
    return weight.name.replace(".experts.0.", ".experts.")

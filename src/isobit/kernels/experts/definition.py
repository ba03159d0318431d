"""A mixture of experts: routing (probabilities, the most probable experts and their gates, row by
row), products of the rows that each expert has, and the sums of what a token's experts give.

softmax over the experts is float64 inside, its denominator the tree of `sums.tree_sum`, and rounded
to float32; gates are added in float32 in the order of the experts they belong to. So no sum depends
on the number of rows (`tests/kernels/test_routing.py`). Left out: the router's logits, which are a
product, and the gradient of routing (`model/forward/moe.py`).
"""

from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from isobit.kernels.matrices import Gradients, Operand, Stacked, picked, plain, rows_of
from isobit.kernels.ops import Ops
from isobit.kernels.reference.sums import tree_sum
from isobit.precision import QTensor, QuantSpec
from isobit.precision.packed_fp4 import panels


def route(
    logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.double()
    weights = torch.exp(wide - wide.amax(1, keepdim=True))
    probabilities = (weights / tree_sum(weights).unsqueeze(1)).float()
    chosen = probabilities.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()
    gates = probabilities.gather(1, chosen if given is None else given)
    return probabilities, chosen, gates / ordered_sum(gates).unsqueeze(1) if normalize else gates


def ordered_sum(x: Tensor) -> Tensor:
    """Return sums of the rows of x [T, k], k >= 1, in ascending order of the columns: [T]."""
    total = x[:, 0]
    for column in x.unbind(1)[1:]:
        total = total + column
    return total


def by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Ops.by_expert`, by a stable sort."""
    assert count < 1 << 15
    result = (
        chosen.flatten().to(torch.int16).sort(stable=True)
    )  # few bits to sort by: a GPU takes them in passes
    experts = torch.arange(count + 1, dtype=torch.int16, device=chosen.device)
    order, offsets = result.indices, torch.searchsorted(result.values, experts)
    position = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    return order // chosen.shape[1], position.view(chosen.shape), offsets


def grouped_product(
    ops: Ops,
    a: Operand,
    weights: Stacked,
    offsets: Tensor,
    out: torch.dtype,
    rows: Tensor | None = None,
) -> Tensor:
    a = a if rows is None else picked(a, rows)
    products = [
        ops.product(rows_of(a, start, stop), weight, bias, out)
        for weight, bias, (start, stop) in zip(*weights.each, pairwise(offsets.tolist()))
        if stop > start
    ]
    return (
        torch.cat(products)
        if products
        else torch.empty((0, weights.shape[1]), dtype=out, device=offsets.device)
    )


def grouped_input_gradient(
    ops: Ops, dy: Tensor, weights: Stacked, offsets: Tensor, out: torch.dtype | None = None
) -> Tensor:
    """Return dx [R, K] = dy [R, N] · W [N, K] of every row's expert, in `out`, or dy's type."""
    out = out or dy.dtype
    if weights.common is None:
        whole = weights if weights.spec is None else weights.map(lambda one: plain(one, dy.dtype))
        return ops.grouped_product(dy, whole.transpose(), offsets, out)
    count, rows, inner = weights.shape
    slabs = (
        Stacked(weights.values(columns=some).to(dy.dtype)) for some in panels(inner, count * rows)
    )
    return torch.cat([ops.grouped_product(dy, slab.transpose(), offsets, out) for slab in slabs], 1)


def grouped_weight_gradient(
    ops: Ops,
    dy: Tensor,
    x: Operand,
    offsets: Tensor,
    gradient: QuantSpec | None,
    name: str,
    into: Gradients = (),
) -> list[Tensor | None]:
    gradients: list[Tensor | None] = []
    for (start, stop), previous in zip_longest(pairwise(offsets.tolist()), into):
        rows, inputs = dy[start:stop], rows_of(x, start, stop)
        if stop == start:
            gradients.append(None)
        elif gradient is not None and isinstance(inputs, QTensor):
            left = ops.quantize_along_tokens(rows, gradient, f"output gradient of {name}")
            right = ops.quantize_along_tokens(inputs, inputs.spec, name)
            gradients.append(ops.gradient_product(left, right, torch.float32, previous))
        else:
            gradients.append(
                ops.gradient_product(rows.t(), plain(inputs, dy.dtype).t(), torch.float32, previous)
            )
    return gradients


def grouped_bias_gradient(dy: Tensor, offsets: Tensor) -> list[Tensor | None]:
    """Compute `Ops.grouped_bias_gradient`, in float64."""
    bounds = pairwise(offsets.tolist())
    return [
        dy[start:stop].double().sum(0).float() if stop > start else None for start, stop in bounds
    ]


def sum_of_rows(x: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
    total: Tensor | None = None
    for slot in range(place.shape[1]):
        row = x.index_select(0, place[:, slot]).float()
        row = row if gates is None else gates[:, slot : slot + 1] * row
        total = row if total is None else total + row
    assert total is not None
    return total.to(x.dtype)


def sum_of_rows_backward(
    dy: Tensor, x: Tensor, place: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dgates, wide = torch.empty_like(x), torch.empty_like(gates), dy.float()
    for slot in range(place.shape[1]):
        dx.index_copy_(0, place[:, slot], (wide * gates[:, slot : slot + 1]).to(x.dtype))
        dgates[:, slot] = (wide * x.index_select(0, place[:, slot]).float()).sum(1)
    return dx, dgates

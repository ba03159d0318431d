"""Routing in a mixture of experts: probabilities, the most probable experts and their gates, row by row.

softmax over the experts is float64 inside, its denominator the tree of `sums.tree_sum`, and rounded to float32; gates
are added in float32 in the order of the experts they belong to. So no sum depends on the number of rows
(`tests/kernels/test_routing.py`). Left out: the router's logits, which are a product, and gradients
(`model/forward/moe.py`).
"""

import torch
from torch import Tensor

from isobit.kernels.reference.sums import tree_sum


def route(logits: Tensor, count: int, normalize: bool, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As `Ops.route`."""
    wide = logits.double()
    weights = torch.exp(wide - wide.amax(1, keepdim=True))
    probabilities = (weights / tree_sum(weights).unsqueeze(1)).float()
    chosen = probabilities.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()
    gates = probabilities.gather(1, chosen if given is None else given)
    return probabilities, chosen, gates / ordered_sum(gates).unsqueeze(1) if normalize else gates


def ordered_sum(x: Tensor) -> Tensor:
    """Sums of the rows of x [T, k], k >= 1, in ascending order of the columns: [T]."""
    total = x[:, 0]
    for column in x.unbind(1)[1:]:
        total = total + column
    return total

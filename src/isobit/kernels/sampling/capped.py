"""Logits that are capped, cap · tanh(logits / cap) (Gemma 2: arXiv 2408.00118), and their slope.

Elementwise, and held: what samples and what learns reads the same numbers. Left out: the head's
fused operators, which know of no cap.
"""

import torch
from torch import Tensor

from isobit.kernels.matrices import Prepared
from isobit.kernels.ops import Ops

_AT_ONCE = 2**22
"""Logits that are capped at a time, in float64."""


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Compute `Ops.cap_logits`: with t = exp(-2 · |x| / cap) the magnitude of cap · tanh(x / cap)
    is cap · (1 - t) / (1 + t), in float64, rounded once."""
    for rows in logits.split(max(1, _AT_ONCE // logits.shape[1])):
        x = rows.double()
        t = torch.exp(x.abs() * -2.0 / cap)
        rows.copy_(torch.copysign(cap * (1.0 - t) / (1.0 + t), x))
    return logits


def logits_of(ops: Ops, hidden: Tensor, weight: Prepared, cap: float | None) -> Tensor:
    """Return logits [T, V] float32 of hidden rows [T, C] under the head's weight [V, C], capped
    where the model caps them."""
    logits = ops.product(hidden, weight, None, torch.float32)
    return logits if cap is None else ops.cap_logits(logits, cap)


def cap_slope(capped: Tensor, cap: float) -> Tensor:
    """Return the derivative of capped logits by those that were capped: 1 - (capped / cap)²."""
    return 1.0 - (capped / cap).square_()

"""Unnormalized probabilities w = exp(score - peak), and their rounding before P·V: to BF16, or to
E4M3.

E4M3 takes w · 2^8, since w is at most 1 and 2^8 is the largest power of two that it holds: the
values are E4M3(w · 2^8) / 2^8, to nearest even, multiples of 2^-17 below 2^-14. The sum of weights
is of w itself.

In float64 the score's last place must not decide a code, nor the library whose exp it is. So a code
is the number of `boundaries` that score - peak reaches, by the exact exp; a code is that of the
score as `lane_sum` adds it, and where another order might give another one (`uncertain`) that order
is needed. In float32 the definitions of score and exp leave one w. Held by
`tests/kernels/test_probabilities.py`.
"""

import math
from decimal import Decimal, localcontext
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from isobit.kernels.reference.sums import tree_sum
from isobit.precision import BF16, E4M3, Format

SHIFT = 2.0**8
_LANES = 8
_DIGITS = 50


def to_e4m3(weights: Tensor) -> Tensor:
    """Return E4M3(w · 2^8) / 2^8 of float32 weights from 0 to 1."""
    return (weights * SHIFT).to(E4M3.dtype).to(weights.dtype) / SHIFT


def weigh(shifted: Tensor, probabilities: Format | None) -> tuple[Tensor, Tensor]:
    """Return (weights w = exp(score - peak), w as rounded for the product with the values).
    Overwrites its input."""
    if probabilities is E4M3 and shifted.dtype == torch.float64:
        rounded = _values(shifted.device)[_codes(shifted)]
        return shifted.exp_(), rounded
    weights = shifted.exp_()
    if probabilities is None:
        return weights, weights
    if probabilities is E4M3:
        return weights, to_e4m3(weights)
    assert probabilities is BF16
    return weights, weights.to(torch.bfloat16).to(weights.dtype)


def uncertain(shifted: Tensor, error: Tensor) -> Tensor:
    """Return which rows [..., R] of score - peak [..., R, K] have a code that another number within
    `error` [..., R, 1] might not have."""
    return (_codes(shifted - error) != _codes(shifted + error)).any(-1)


def lane_sum(x: Tensor) -> Tensor:
    """Sum over dimension 1 in eight lanes, as C++ adds a score in float64: lane l adds the terms l,
    l + 8 ... in ascending order, then the lanes are added as a tree."""
    missing = -x.shape[1] % _LANES
    lanes = torch.nn.functional.pad(x.movedim(1, -1), (0, missing)).unflatten(-1, (-1, _LANES))
    total = torch.zeros_like(lanes[..., 0, :])
    for i in range(lanes.shape[-2]):
        total = total + lanes[..., i, :]
    return tree_sum(total)


@cache
def boundaries() -> Tensor:
    """Return, for each code up to that of 2^8 but the last, the least float64 number whose exp,
    which is never a tie, is nearer to the next code."""
    values = _values(torch.device("cpu")).tolist()
    edges = []
    with localcontext() as context:
        context.prec = _DIGITS
        for below, above in pairwise(values):
            exact = Decimal((below + above) / 2).ln()
            nearest = float(exact)
            edges.append(nearest if Decimal(nearest) > exact else math.nextafter(nearest, math.inf))
    return torch.tensor(edges, dtype=torch.float64)


@cache
def _values(device: torch.device) -> Tensor:
    """Return the values of the codes from 0 to that of 2^8, over 2^8."""
    last = int(torch.tensor(SHIFT).to(E4M3.dtype).view(torch.uint8))
    codes = torch.arange(last + 1, dtype=torch.uint8, device=device)
    return codes.view(E4M3.dtype).double() / SHIFT


def _codes(shifted: Tensor) -> Tensor:
    return torch.bucketize(shifted, boundaries().to(shifted.device), out_int32=True, right=True)

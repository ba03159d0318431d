"""Sums of squares by row, in float64 and in a fixed order; and stochastic rounding from float32 to
BF16 (Gupta et al. 2015, arXiv 1502.02551, section 3; for weights that are trained in BF16: Zamirai
et al. 2020, arXiv 2010.06192).

16 random bits are added to the magnitude's lower half, which is then cut off: a carry into the
upper half, with the probability of that half's distance from the lower neighbour, is a step to the
upper one, in every binade and below the smallest normal number. The bits are half a word of
Philox4x32-10 for each element: of the counter (element // 8, step, 0, 0) under the key `seed`, so
they do not depend on what else is rounded. Left out: other formats.
"""

import torch
from torch import Tensor

from isobit.kernels.sampling.definition import MASK, philox

_LARGEST, _INFINITY, _NAN = 0x7F7F, 0x7F800000, 0x7FC0
_ROWS = 128  # that are in float64 at a time
_AT_ONCE = 1 << 20
"""Elements whose random words, int64 in PyTorch, are held at a time."""


def round_stochastically(x: Tensor, seed: int, step: int, first: int) -> Tensor:
    """Return `isobit.kernels.ops.Ops.round_stochastically`. Numbers that would be infinite become
    the largest BF16 number; infinity stays, and NaN is 0x7fc0 with its sign."""
    check_stochastic(x, first)
    parts = [
        _rounded(part, seed, step, first + n * _AT_ONCE) for n, part in enumerate(x.split(_AT_ONCE))
    ]
    return torch.cat(parts)


def check_stochastic(x: Tensor, first: int) -> None:
    """Assert what every backend requires of the arguments."""
    assert x.ndim == 1, f"round_stochastically expects a vector, got shape {tuple(x.shape)}"
    assert x.dtype == torch.float32, f"round_stochastically expects float32, got {x.dtype}"
    assert first % 8 == 0, "a counter gives the bits of 8 elements"
    assert first + len(x) <= 8 << 32, "the counter of the last element has 32 bits"


def _rounded(x: Tensor, seed: int, step: int, first: int) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    carried = (magnitude.long() + noise(len(x), seed, step, first, x.device)) >> 16
    rounded = carried.clamp_max_(_LARGEST)
    rounded = torch.where(
        magnitude < _INFINITY, rounded, torch.where(magnitude > _INFINITY, _NAN, _INFINITY >> 16)
    )
    return (rounded | (bits >> 16 & 0x8000)).to(torch.int16).view(torch.bfloat16)


def noise(count: int, seed: int, step: int, first: int, device: torch.device) -> Tensor:
    """Return the random bits of elements `first` to `first` + count, [count] int64 from 0 to
    65,535."""
    element = torch.arange(first // 8, (first + count + 7) // 8, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox(
        (element, zero + (step & MASK), zero, zero),
        (zero + (seed & MASK), zero + (seed >> 32 & MASK)),
    )
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).view(-1)[:count]


def square_sums(x: Tensor) -> Tensor:
    return torch.cat([_halved(rows.double().square_()) for rows in x.split(_ROWS)])


def _halved(x: Tensor) -> Tensor:
    """Return the sum of each row of x [R, C], whose second half is added to the first until one
    column is left."""
    while (width := x.shape[1]) > 1:
        half = (width + 1) // 2
        x, second = x[:, :half], x[:, half:]
        x[:, : width - half] += second
    return x.squeeze(1)

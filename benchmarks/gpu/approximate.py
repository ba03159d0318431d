"""The sigmoid of the gate's backward (`isobit.kernels.triton.numbers.sigmoid`), which is two
approximate instructions on a GPU, against float64's over a fixed grid, to a bound.

It is no rollout's, nor any forward's: those divide exactly. With e = exp(-x), σ = 1 / (1 + e), and
u = 2^-24, its steps are off by

- x · log2(e): u from the product and `CONSTANT` from the constant, of the exponent; that is
  |x| · (u + CONSTANT) of e;
- `ex2.approx.ftz`: at most 2^-22 of e (PTX ISA, ex2);
- 1 + e: what is off in e, times e / (1 + e) = 1 - σ; and u;
- `rcp.approx.ftz`: at most 2^-22 of σ, twice what the manual has of a wide range (PTX ISA, rcp).

So |found - σ| <= σ · ((1 - σ) · (2^-22 + |x| · (u + CONSTANT)) + u + 2^-22) · (1 + 2^-10) + 2^-126:
the factor is for products of errors, and below 2^-126 results are zero.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.common import Bench, Case
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch

UNIT, APPROXIMATE, LEAST = 2.0**-24, 2.0**-22, 2.0**-126
CONSTANT = abs(float(torch.tensor(math.log2(math.e), dtype=torch.float32)) / math.log2(math.e) - 1)
"""How far off log2(e) is in float32."""
_MOST = 104.0  # beyond, float32 has no sigmoid but 0 and 1
_BLOCK = 1024


@triton.jit
def sigmoids(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """y [count] = sigmoid(x [count]), float32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr + at, numbers.sigmoid(x), mask=at < count)


def grid(steps: int) -> Tensor:
    """Numbers [n] float32: whole parts of 1 / `steps` from -104 to 104, and powers of two of either
    sign down to the smallest normal one."""
    even = torch.arange(-int(_MOST) * steps, int(_MOST) * steps + 1, dtype=torch.float64) / steps
    powers = torch.pow(2.0, torch.arange(-126, 0, dtype=torch.float64))
    return torch.cat([even, powers, -powers]).float()


def bound(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid, how far off it may be) of x, in float64."""
    x = x.double()
    sigma, rest = torch.sigmoid(x), torch.sigmoid(-x)
    relative = rest * (APPROXIMATE + x.abs() * (UNIT + CONSTANT)) + UNIT + APPROXIMATE
    return sigma, sigma * relative * (1 + 2.0**-10) + LEAST


def check(case: Case, bench: Bench) -> None:
    """How many of the grid are beyond the bound, and the largest error in it. The control: of
    numbers that are 2^-16 larger."""
    x = grid(16 if bench.rehearsal else 4096)
    sigma, limit = bound(x)
    for what, given, expected in (
        ("to its bound", x, "equal"),
        ("of other numbers", x * (1 + 2.0**-16), "different"),
    ):
        there = given.to(bench.device)
        y = torch.empty_like(there)
        launch(sigmoids, (-(-len(x) // _BLOCK),), there, y, len(x), num_warps=4, BLOCK=_BLOCK)
        share = (y.cpu().double() - sigma).abs() / limit
        beyond = ~(share <= 1)  # NaN too
        worst = int(share.argmax())
        case.row(
            what, compared=len(x), differing=int(beyond.sum()), expected=expected,
            holds=bool(beyond.any()) == (expected == "different"),
            largest=float(share[worst]), at=float(x[worst]),
        )  # fmt: skip

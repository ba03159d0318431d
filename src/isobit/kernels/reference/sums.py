"""Sums in a fixed order, and a test of where another order could give other bits.

The reference defines a sum of float64 terms by one tree (`tree_sum`), the same whatever else is in
the batch. A BLAS is many times faster, but the order in which it adds depends on shapes and
threads. Its result and the tree's are both within a known bound of the true sum (Higham 2002,
sections 3.1 and 4.2). Where no boundary between two roundings lies within that bound, both round to
the same bits, and the BLAS's result is used; elsewhere (`undecided`) the tree is. This is the
rounding test of Ziv (1991). So results are the tree's at any shape and thread count: *proven* for
finite operands and any BLAS that adds the products of an element and nothing else, in whatever
order, fused or not (`tests/kernels/test_sums.py`). A wider bound makes the tree needed more often,
and never changes a bit.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

UNIT = 2.0**-53
"""The largest relative error of one float64 operation."""

# half units in the last place, for the few roundings that follow a sum: of a bias, of a quotient
_ROOM = 8
_LOST_BITS = {torch.float32: 29, torch.bfloat16: 45}
_DIGITS = {torch.bfloat16: 8, torch.float32: 24}
_WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_TILE = 1 << 15  # elements that are tested together: they stay in the cache
_SUM_BLOCK = 1 << 14
_CHUNK = 1 << 17  # products of the tree at a time


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over a dimension of K terms, in halves: x[i] + x[i + h], h the powers of two below K, the
    largest first.

    Zeros at the end change nothing, and the result is never -0. Its error is at most ⌈log2 K⌉ ·
    2^-53 · Σ|x|, to first order.
    """
    count = x.shape[dim]
    if count < 2:
        return x.sum(dim) + 0.0
    half = 1 << ((count - 1).bit_length() - 1)
    total = x.narrow(dim, 0, half).clone()
    total.narrow(dim, 0, count - half).add_(x.narrow(dim, half, count - half))
    while half > 1:
        half //= 2
        total.narrow(dim, 0, half).add_(total.narrow(dim, half, half))
    return total.select(dim, 0) + 0.0


def block_sum(x: Tensor) -> Tensor:
    """Compute the sum of all elements, in blocks of a fixed size where there are many, so that its
    bits do not depend on threads: PyTorch shares a sum of more than 32,768 elements among them."""
    if x.numel() <= _SUM_BLOCK:
        return x.sum()
    flat = x.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % _SUM_BLOCK)).view(-1, _SUM_BLOCK)
    return block_sum(blocks.sum(1))


def total(values: Tensor) -> float:
    """Return the `block_sum` of all values, computed in float64 without a gradient."""
    return float(block_sum(values.detach().double()))


def mean(values: Tensor) -> float:
    """Compute the mean of all values from their `total`; NaN where there are none."""
    return total(values) / (values.numel() or math.nan)


def undecided(x: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Find the elements of float64 x that, changed by at most `error` and some roundings, might
    round to another number of `dtype`: places [count, dimensions of x]. `error` broadcasts to x; it
    is 0, or at least 2^-132. NaN in x is NaN in any order.

    Rounding changes where the lost bits of x are 100...0. How far they are from that is counted in
    units of x's last place, and taken as if these were |x| · 2^-53, which is between half a unit
    and one. Just above a power of two the nearest boundary is below x, half as far as the count
    says, and there |x| · 2^-53 is half a unit. Where `dtype` is subnormal the error exceeds all
    that a count can be.
    """
    half = 1 << (_LOST_BITS[dtype] - 1)
    units = x.contiguous().view(torch.int64).bitwise_and(2 * half - 1).sub_(half).abs_().sub_(_ROOM)
    margin = units.double().mul_(x.abs()).sub_(error / UNIT)
    if margin.numel() == 0 or float(margin.amin()) >= 0:
        return torch.empty((0, x.ndim), dtype=torch.int64, device=x.device)
    return (margin >= 0).logical_not_().logical_and_(x == x).nonzero()


def product_sums(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute the float64 matrix of tree_sum(a[i] · b[j]) + bias[j] for a [M, K], b [N, K], BF16 or
    FP32; elements may differ from it only in ways that rounding to `dtype` removes.

    Products are exact in float64. A row's elements are multiples of a power of two; where sums of
    products of such multiples need no more than 53 bits, every order is exact and nothing need be
    tested, as for most BF16 data.
    """
    left, right = a.double(), b.double()
    total = left @ right.t()
    if bias is not None:
        total += bias.double()
    if a.numel() == 0 or b.numel() == 0:
        return total
    error_a, error_b = _errors(left, a, right, b)
    step = max(1, _CHUNK // a.shape[1])
    for rows in _tiles(error_a, error_b):
        tile = total[rows]
        unsure = undecided(tile, error_a[rows, None] * error_b, dtype)
        for i, j in (chunk.unbind(1) for chunk in unsure.split(step)):
            sums = tree_sum(left[rows][i] * right[j])
            tile[i, j] = sums if bias is None else sums + bias[j].double()
    return total.add_(0.0)  # -0 becomes 0


def _tiles(error_a: Tensor, error_b: Tensor) -> Iterator[slice]:
    """Yield some rows at a time; none if every sum is exact."""
    if float(error_a.amax()) == 0 or float(error_b.amax()) == 0:
        return
    step = max(1, _TILE // error_b.shape[0])
    for start in range(0, error_a.shape[0], step):
        yield slice(start, min(start + step, error_a.shape[0]))


def _errors(left: Tensor, a: Tensor, right: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x [M], y [N]): x[i] · y[j] bounds how far two orders of the sum of a[i] · b[j] are
    apart.

    Each is within (K - 1) · 2^-53 · Σ|a·b| of the true sum, to first order, and Σ|a·b| is at most
    the product of the Euclidean norms. It is 0 where all partial sums are multiples, below 2^53, of
    one power of two.
    """
    norm_a, norm_b = norm_bound(left), norm_bound(right)
    reach_a, reach_b = norm_a / _grid(a), norm_b / _grid(b)
    inexact_a = (reach_a * reach_b.amax() <= 1 / UNIT).logical_not_()  # NaN is inexact
    inexact_b = (reach_b * reach_a.amax() <= 1 / UNIT).logical_not_()
    return norm_a.mul_(inexact_a).mul_((a.shape[1] + 64) * UNIT), norm_b.mul_(inexact_b)


def _grid(x: Tensor) -> Tensor:
    """Return, for every row of BF16 or FP32 x, a number, float64 [rows], not larger than the last
    place of any nonzero element; infinity for a row of zeros."""
    word, infinity = _WORDS[x.dtype], x.new_full((), torch.inf)
    largest = torch.iinfo(word).max
    # sign off, then 0 becomes the largest of all, and the others the next smaller number
    words = x.contiguous().view(word).bitwise_and(largest).sub_(1).bitwise_and_(largest)
    least = torch.minimum(words.amin(-1), infinity.view(word))
    return least.view(x.dtype).double() * 2.0 ** -_DIGITS[x.dtype]


def norm_bound(x: Tensor) -> Tensor:
    """Return a bound of the Euclidean norm over the last dimension: 0, or at least 2^-66."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return norm.mul_(1 + 2.0**-20).add_(norm.sign(), alpha=2.0**-66)

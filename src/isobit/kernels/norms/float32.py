"""Norms and gates in float32 in the order `rows32-v1`, the definition: with attention
(`attention/float32.py`) what `consistency: bitwise` computes within a row on a CPU, next to rotation
and quantization, which are elementwise anyway.

All operations are those of IEEE 754 in float32, subnormal numbers included (unlike `tdp32-v1`,
whose hardware flushes them). A sum of products over n places has L lanes: lane l is a chain of
fused multiply-adds from zero over the places l, l + L, l + 2L ..., and then halves of the lanes are
added, the upper to the lower, until one is left. L is 64 over the channels of a norm and 16 over a
head. Sums over rows or keys are in `blocked_sum`. exp is a polynomial of degree 7, log one of
float64: no function of a library is in the path.

The error of a sum in lanes is at most γ(⌈n / L⌉ + log2 L) · Σ|a·b|, γ(k) = k·2^-24 / (1 - k·2^-24)
(Higham 2002, section 4.2), that of `exp` relatively 2^-22 above -87, where it becomes 0. So rstd is
within γ(⌈n / 64⌉ + 15) / 2 + 2^-22 of the float64 one, relatively, y within 2^-23 more before its
rounding, and silu(gate) · up within 2^-21, and |gate · up| · 2^-125 where exp ends
(`tests/kernels/test_rows32.py`); GELU has |k| · 2^-22 more, k as in `inner`. Squares must stay
below 2^128, as they do for channels below 2^60; beyond, a row is NaN. Log-probabilities and
sampling stay float64: they are read by the loss, and cost little.
"""

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.norms.definition import (
    CLAMPED,
    FAR,
    GELU,
    bounded,
    gated,
    gated_backward,
    within_bounds,
)
from isobit.kernels.ops import Activation

ORDER = "rows32-v1"
CHANNEL_LANES, HEAD_LANES = 64, 16
CHAIN = 32
"""Terms of a chain in `blocked_sum`."""
_LOST, _HALF = (1 << 29) - 1, 1 << 28  # the bits of a float64 that float32 lacks
_LN2 = (-0.693359375, 2.12194440e-4)
_TAYLOR = tuple(1.0 / n for n in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `definition.rms_norm`: rstd = 1 / sqrt(Σs² / n + eps), y = (s · rstd) · weight, each
    operation rounded."""
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = summed.float()
    squared = dot(wide, wide, CHANNEL_LANES) / x.shape[-1] + eps
    rstd = (
        1.0 / squared.double().sqrt().float()
    )  # PyTorch's sqrt of float32 is not always the nearest number
    rstd = torch.where(
        squared < torch.inf, rstd, torch.nan
    )  # not 0, so that weights that blew up are noticed
    return (wide * rstd.unsqueeze(-1) * weight.float()).to(x.dtype), summed, rstd


def rms_norm_backward(
    dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `definition.rms_norm_backward`."""
    normed = summed.float() * rstd.unsqueeze(-1)
    scaled = dy.float() * weight.float()
    mean = dot(scaled, normed, CHANNEL_LANES) / summed.shape[-1]
    ds = rstd.unsqueeze(-1) * (scaled - normed * mean.unsqueeze(-1))
    return ds.to(summed.dtype), blocked_sum(dy.float(), normed)


def gate_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    """Compute `definition.gate_mul`."""
    gate, up = bounded(activation, gate_up)
    return gated(activation, gate, up, exp(-inner(activation, gate)[0])).to(gate_up.dtype)


def gate_mul_backward(activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
    """Compute `definition.gate_mul_backward`."""
    gate, up = bounded(activation, gate_up)
    k, slope = inner(activation, gate)
    gradient = gated_backward(activation, dh.float(), gate, up, exp(-k), slope)
    return within_bounds(activation, gate_up, gradient).to(gate_up.dtype)


def inner(activation: Activation, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return (k, gate·k') of `definition.inner`: k = x·(a + b·x²), the sum a fused multiply-add, x
    at most `FAR` from 0."""
    if activation != "gelu_pytorch_tanh":
        k = gate * CLAMPED[0] if activation == "swiglu_clamped" else gate
        return k, k
    x = gate.clamp(-FAR, FAR)
    first, second, third = (gate.new_tensor(value) for value in GELU)
    square = x * x
    return x * fma(square, second, first), x * fma(square, third, first)


def dot(a: Tensor, b: Tensor, lanes: int) -> Tensor:
    """Sum of a · b over the last dimension, in lanes; the others broadcast."""
    missing = -a.shape[-1] % lanes
    parts = [functional.pad(x, (0, missing)).unflatten(-1, (-1, lanes)) for x in (a, b)]
    total = torch.zeros((), device=a.device)
    for i in range(parts[0].shape[-2]):
        total = fma(parts[0][..., i, :], parts[1][..., i, :], total)
    return tree(total)


def tree(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two: halves are added until one is left."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x.squeeze(-1)


def blocked_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a · b over the first dimension: every 32 places, from place 0, are a chain of fused
    multiply-adds from zero, and chains are added in ascending order to zero. Error as above, with
    γ(32 + ⌈n / 32⌉)."""
    missing = -a.shape[0] % CHAIN
    parts = [
        torch.cat((x, x.new_zeros(missing, *x.shape[1:]))).unflatten(0, (-1, CHAIN)) for x in (a, b)
    ]
    chains = torch.zeros((), device=a.device)
    for i in range(CHAIN):
        chains = fma(parts[0][:, i], parts[1][:, i], chains)
    total = torch.zeros(chains.shape[1:], device=a.device)
    for chain in chains:
        total = total + chain
    return total


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a · b + c of float32 numbers, rounded once.

    The product is exact in float64. float32(float64(sum)) is wrong only where float64 has rounded
    to a number halfway between two of float32, or where the result is subnormal and that halfway is
    elsewhere: there an inexact float64 sum with an even last bit is first moved by one towards the
    true sum (rounding to odd).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    words = total.view(torch.int64)
    doubtful = ((words & _LOST) == _HALF) | (total.abs() < 2.0**-125)
    if doubtful.any():
        x, y, s = (t.expand_as(total)[doubtful] for t in (product, addend, total))
        part = s - x
        error = (x - (s - part)) + (y - part)  # of the sum in float64, exactly (Knuth)
        inexact = (error != 0) & torch.isfinite(error) & (words[doubtful] & 1 == 0)
        words[doubtful] += torch.where(inexact, torch.where((error > 0) == (s > 0), 1, -1), 0)
    return total.float()


def exp(x: Tensor) -> Tensor:
    """Return e^x of float32: x = n ln 2 + r, Taylor to r^7; 0 below -87, and no more than e^88."""
    number = x.new_tensor
    magic = number(1.5 * 2.0**23)
    tiny, x = x < -87.0, torch.where(x > 88.0, number(88.0), x)
    shifted = x * number(1.44269504) + magic
    n = shifted - magic
    r = fma(n, number(_LN2[1]), fma(n, number(_LN2[0]), x))
    p = number(1.0) / number(5040.0)
    for term in _TAYLOR:
        p = fma(p, r, number(term))
    exponent = (shifted.view(torch.int32) - magic.view(torch.int32) + 127) << 23
    return torch.where(tiny, number(0.0), p * exponent.view(torch.float32))


def log(x: Tensor) -> Tensor:
    """Return ln x of float64 numbers: x = m 2^e with m between 1/√2 and √2, s = (m - 1) / (m + 1),
    2 (s + s³/3 + ... + s²¹/21); infinity and NaN are themselves."""
    m, exponent = torch.frexp(x)
    small = m < 0.70710678118654752
    m, exponent = torch.where(small, m + m, m), exponent.double() - small.double()
    s = (m - 1.0) / (m + 1.0)
    square, total = s * s, torch.full_like(s, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        total = total * square + 1.0 / odd
    return torch.where(
        (x > 0) & (x < torch.inf), exponent * 0.69314718055994531 + (s + s) * total, x
    )

"""Norms and gates, and their backwards.

Reductions are float64 over a contiguous last dimension, whose order per row PyTorch fixes;
elementwise functions are only those whose bits do not depend on shape (so silu is `x / (1 +
exp(-x))`, not `F.silu`). So the bits of a row are the same in every batch: *proven* where functions
are elementwise, and measured of PyTorch's row sums (`tests/kernels/test_pointwise.py`). Backwards
are float32 inside: they must repeat, but no rollout has to agree with them.
"""

import torch
from torch import Tensor

from isobit.kernels.ops import Activation, Ops
from isobit.kernels.reference.rounding import round_once
from isobit.precision import QTensor, QuantSpec

GELU = (1.5957691216057308, 0.07135481627260025, 0.21406444881780076)
"""2·√(2/π), 0.044715 times that, and three times this."""
FAR = 16.0
"""Of a gate with GELU: where it is larger, it is the gate, or 0, to the last bit of float32."""
CLAMPED = (1.702, 7.0)
"""Of gpt-oss's gates: what a gate's k is times the gate, and the most that gates, and ups of either
sign, are."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = s · rstd · weight with s = x + residual and rstd = 1 / sqrt(mean(s²) + eps) (Zhang
    and Sennrich 2019, eq. 4).

    Three values are rounded, once each: s to x's type (going through float32 is harmless for a sum
    of two bfloat16: Figueroa 1995), rstd to float32, y to x's type.
    """
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = summed.contiguous().double()
    rstd = (1.0 / torch.sqrt((wide * wide).sum(-1) / x.shape[-1] + eps)).float()
    y = round_once(wide * rstd.double().unsqueeze(-1) * weight.double(), x.dtype)
    return y, summed, rstd


def rms_norm_backward(
    dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `Ops.rms_norm_backward`. With n = s · rstd: ds = rstd · (dy·w - n · mean(dy·w·n)), dw
    = Σ_rows dy·n."""
    normed = summed.float() * rstd.unsqueeze(-1)
    scaled = dy.float() * weight.float()
    ds = rstd.unsqueeze(-1) * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return ds.to(summed.dtype), (dy.float() * normed).sum(0)


def gate_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    """Return gate / (1 + exp(-k)) · up, in float32, rounded once (SwiGLU and GEGLU: Shazeer 2020);
    k as in `inner`, gate and up as in `bounded`. With `sigmoid` up / (1 + exp(-gate))."""
    gate, up = bounded(activation, gate_up)
    return gated(activation, gate, up, inner(activation, gate)[0]).to(gate_up.dtype)


def gated(activation: Activation, gate: Tensor, up: Tensor, exponential: Tensor) -> Tensor:
    """Return activation(gate) · up, given exp(-k), before it is rounded."""
    below = 1.0 + exponential
    return up / below if activation == "sigmoid" else gate / below * up


def gate_mul_backward(activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
    """Compute `Ops.gate_mul_backward` in float64."""
    gate, up = bounded(activation, gate_up)
    gradient = gated_backward(activation, dh.float(), gate, up, *inner(activation, gate))
    return within_bounds(activation, gate_up, gradient).to(gate_up.dtype)


def gated_backward(
    activation: Activation, dh: Tensor, gate: Tensor, up: Tensor, exponential: Tensor, slope: Tensor
) -> Tensor:
    """Given exp(-k) and gate·k', with σ = 1 / (1 + exp(-k)): d gate = dh·up·σ·(1 + gate·k'·(1 -
    σ)), d up = dh·gate·σ; with `sigmoid` d gate = dh·up·σ·(1 - σ), d up = dh·σ."""
    sigma = 1.0 / (1.0 + exponential)
    if activation == "sigmoid":
        return torch.cat((dh * up * (sigma * (1.0 - sigma)), dh * sigma), dim=-1)
    dgate = dh * up * (sigma * (1.0 + slope * (1.0 - sigma)))
    return torch.cat((dgate, dh * (gate * sigma)), dim=-1)


def bounded(activation: Activation, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up in float32, bounded as gpt-oss's: the gate to at most 7, `up` to ±7, and 1
    is added to `up`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation != "swiglu_clamped":
        return gate, up
    most = CLAMPED[1]
    return gate.clamp(max=most), up.clamp(-most, most) + 1.0


def within_bounds(activation: Activation, gate_up: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient of what `bounded` gives as that of its input: 0 where that is beyond a
    bound."""
    if activation != "swiglu_clamped":
        return gradient
    gate, up = gate_up.chunk(2, dim=-1)
    beyond = torch.cat((gate > CLAMPED[1], up.abs() > CLAMPED[1]), dim=-1)
    return gradient.masked_fill(beyond, 0.0)


def inner(activation: Activation, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return (exp(-k), gate·k') of a gate in float32: k = gate for SiLU and sigmoid; for GELU in
    its form with tanh, which is gate / (1 + exp(-k)) too, k = 2·√(2/π)·(gate + 0.044715·gate³) in
    float64 (Hendrycks and Gimpel 2016); for gpt-oss's gates k = 1.702·gate."""
    if activation != "gelu_pytorch_tanh":
        k = gate * CLAMPED[0] if activation == "swiglu_clamped" else gate
        return torch.exp(-k), k
    x = gate.clamp(-FAR, FAR).double()
    first, second, third = GELU
    square = x * x
    return torch.exp(-(x * (first + second * square))).float(), (
        x * (first + third * square)
    ).float()


def rms_norm_quantized(
    ops: Ops,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    spec: QuantSpec,
    name: str,
) -> tuple[QTensor, Tensor, Tensor]:
    """Compute `Ops.rms_norm_quantized`: the two operators in turn."""
    y, summed, rstd = ops.rms_norm(x, weight, eps, residual)
    return ops.quantize(y, spec, name), summed, rstd


def rms_norm_backward_added(
    ops: Ops, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `Ops.rms_norm_backward_added`: the two in turn."""
    dx, dweight = ops.rms_norm_backward(dy, summed, weight, rstd)
    return dx + added, dweight


def gate_mul_quantized(
    ops: Ops, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
) -> QTensor:
    """Compute `Ops.gate_mul_quantized`: the two operators in turn."""
    return ops.quantize(ops.gate_mul(activation, gate_up), spec, name)


def gate_mul_backward_quantized(
    ops: Ops, activation: Activation, dh: Tensor, gate_up: Tensor, spec: QuantSpec, name: str
) -> tuple[QTensor, QTensor]:
    """Compute `Ops.gate_mul_backward_quantized`: the two operators in turn."""
    return ops.quantize_both_ways(ops.gate_mul_backward(activation, dh, gate_up), spec, name)

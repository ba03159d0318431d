"""The one quantizer: FP8 codes with a scale per block, and back.

For every block of a matrix: `scale = amax / max` (or that, rounded up to a power of two), `code = cast(clamp(x / scale,
-max, max))`, `value = code * scale`. There is no floor under amax; an all-zero block has scale 1. Every other
implementation (native, GPU) must return these bits; `tests/kernels` compares them.

Left out: which tensor is quantized how (`flow.py`), and rounding modes other than round-to-nearest-even.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError
from isobit.precision.formats import E4M3, Format

BLOCK = 128
"""Length of a scaling group, and of a step along the reduced dimension of a block-scaled product."""

GRANULARITIES = ("1x128", "128x128", "128x1", "row", "column", "tensor")
SCALE_FORMATS = ("fp32", "ue8m0")
_TRANSPOSED = {"1x128": "128x1", "128x1": "1x128", "row": "column", "column": "row"}
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class QuantSpec:
    """How a matrix is quantized: element format, which elements share a scale, and the scale's own format.

    `granularity` names the block as rows x columns; `row`, `column`, `tensor` are one block, whatever their size.
    `scale` is `fp32`, or `ue8m0`: a power of two, rounded up, so that no element of the block overflows.
    """

    format: Format = E4M3
    granularity: str = "1x128"
    scale: str = "ue8m0"

    def __post_init__(self) -> None:
        if not self.format.is_fp8:
            raise IsobitError(f"cannot quantize to {self.format}: block scales need e4m3 or e5m2")
        if self.granularity not in GRANULARITIES:
            raise IsobitError(f"unknown granularity {self.granularity!r}: choose from {', '.join(GRANULARITIES)}")
        if self.scale not in SCALE_FORMATS:
            raise IsobitError(f"unknown scale format {self.scale!r}: choose from {', '.join(SCALE_FORMATS)}")

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a full block of a matrix of this shape; a dimension below 128 is one block."""
        rows, columns = max(shape[0], 1), max(shape[1], 1)
        return {
            "1x128": (1, min(BLOCK, columns)),
            "128x1": (min(BLOCK, rows), 1),
            "128x128": (min(BLOCK, rows), min(BLOCK, columns)),
            "row": (1, columns),
            "column": (rows, 1),
            "tensor": (rows, columns),
        }[self.granularity]

    def transpose(self) -> "QuantSpec":
        return replace(self, granularity=_TRANSPOSED.get(self.granularity, self.granularity))

    def __str__(self) -> str:
        return f"{self.format} {self.granularity} {self.scale}"


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized matrix: FP8 `data` [R, C] and FP32 `scale` [ceil(R / block rows), ceil(C / block columns)]."""

    data: Tensor
    scale: Tensor
    spec: QuantSpec

    @property
    def shape(self) -> tuple[int, int]:
        return (self.data.shape[0], self.data.shape[1])

    @property
    def nbytes(self) -> int:
        return self.data.numel() + 4 * self.scale.numel()

    @cached_property
    def block(self) -> tuple[int, int]:
        return self.spec.block(self.shape)

    def transpose(self) -> "QTensor":
        """The transposed matrix [C, R], over the same storage."""
        return QTensor(self.data.t(), self.scale.t(), self.spec.transpose())

    def dequantize(self) -> Tensor:
        """The values [R, C] in float32: code times scale, rounded once (exact where the scale is a power of two)."""
        return self.data.to(torch.float32) * expand_scale(self.scale, self.block, self.shape)


@dataclass(frozen=True)
class QuantStats:
    """What a quantization did. Fractions are of all elements; the error is the norm's, relative to the input's."""

    saturated: float
    flushed: float
    relative_error: float


def expand_scale(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Repeat block scales to one per element, [R, C]."""
    if scale.numel() == 1:
        return scale.expand(shape)
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]] if block[0] > 1 else scale
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]] if block[1] > 1 else rows


def scales(amax: Tensor, form: Format, scale_format: str) -> Tensor:
    """Scales for blocks of these largest magnitudes (float32, same shape).

    FP32: amax / max. UE8M0: 2 ** ceil(log2(amax / max)), taken from the bits of the quotient, so that it is exact.
    A quotient below the smallest normal float32 becomes that; a zero amax gives 1.
    """
    quotient = (amax / form.max).clamp(min=_SMALLEST_SCALE)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(quotient)
        quotient = torch.ldexp(torch.ones_like(quotient), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(amax == 0, torch.ones_like(quotient), quotient)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of `x` [R, C], in float32; NaN and infinity propagate."""
    magnitude = x.float().abs()
    pad_rows, pad_columns = -x.shape[0] % block[0], -x.shape[1] % block[1]
    if pad_rows or pad_columns:
        magnitude = torch.nn.functional.pad(magnitude, (0, pad_columns, 0, pad_rows))
    tiles = magnitude.reshape(magnitude.shape[0] // block[0], block[0], -1, block[1])
    return tiles.amax(dim=(1, 3))


def quantize(x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
    """Quantize a bfloat16 or float32 matrix [R, C].

    Raises NonFiniteError, naming the tensor, if `x` holds NaN or an infinity.
    """
    assert x.ndim == 2, f"quantize expects a matrix, got shape {tuple(x.shape)}"
    shape = (x.shape[0], x.shape[1])
    block = spec.block(shape)
    if x.numel() == 0:
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        return QTensor(x.to(spec.format.dtype), x.new_ones(grid, dtype=torch.float32), spec)
    amax = block_amax(x, block)
    if not torch.isfinite(amax).all():
        raise NonFiniteError(nonfinite_message(name, spec))
    return quantize_with_scale(x, scales(amax, spec.format, spec.scale), spec)


def quantize_with_scale(x: Tensor, scale: Tensor, spec: QuantSpec) -> QTensor:
    """Quantize a finite matrix [R, C] with block scales [ceil(R / block rows), ceil(C / block columns)] that are given:
    what exceeds them saturates."""
    shape = (x.shape[0], x.shape[1])
    scaled = x.float() / expand_scale(scale, spec.block(shape), shape)
    # torch <= 2.11 casts overflow to NaN, later versions saturate: the clamp makes both the same.
    return QTensor(scaled.clamp(-spec.format.max, spec.format.max).to(spec.format.dtype), scale, spec)


def nonfinite_message(name: str, spec: QuantSpec) -> str:
    """The line that every quantizer raises on NaN or infinity."""
    return f"cannot quantize {name} to {spec.format}: it holds NaN or infinity"


def statistics(x: Tensor, quantized: QTensor) -> QuantStats:
    """Compare a matrix with its quantization: fractions clamped and flushed to zero, relative error."""
    if x.numel() == 0:
        return QuantStats(0.0, 0.0, 0.0)
    values = x.float()
    restored = quantized.dequantize()
    limit = quantized.spec.format.max * expand_scale(quantized.scale, quantized.block, quantized.shape)
    # a block's own maximum may exceed the limit by the rounding of its scale: that is not saturation
    saturated = (values.abs() > limit * (1 + 2**-20)).double().mean().item()
    flushed = ((values != 0) & (restored == 0)).double().mean().item()
    norm = values.double().norm().item()
    error = (values.double() - restored.double()).norm().item()
    return QuantStats(saturated, flushed, error / norm if norm > 0 else 0.0)

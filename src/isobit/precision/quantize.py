"""The one quantizer: FP8, FP4 or INT8 codes with a scale per block, and back.

For every block of a matrix: `scale = amax / max` (or that, rounded up to a power of two), `code =
cast(clamp(x / scale, -max, max))`, `value = code * scale`. amax has no lower bound; an
all-zero block has scale 1. Every other implementation (native, GPU) must return these bits;
`tests/kernels` compares them.

Left out: the choice of formats per tensor (`flow.py`), and rounding modes other than
round-to-nearest-even.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError
from isobit.precision.formats import E2M1, E4M3, INT8, Format

BLOCK = 128
"""Length of a scaling group, and of a step along the reduced dimension of a block-scaled product,
at most."""

GRANULARITIES = (
    "1x128",
    "128x128",
    "128x1",
    "1x32",
    "32x1",
    "1x16",
    "16x1",
    "row",
    "column",
    "tensor",
)
SCALE_FORMATS = ("fp32", "ue8m0", "nvfp4", "nvfp4-row")
_TRANSPOSED = {
    **{f"1x{size}": f"{size}x1" for size in (128, 32, 16)},
    **{f"{size}x1": f"1x{size}" for size in (128, 32, 16)},
    "row": "column",
    "column": "row",
}
_ALONG_ROWS = {"1x128": "128x1", "1x32": "32x1", "row": "128x1"}
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class QuantSpec:
    """The quantization of a matrix: element format, which elements share a scale, and the scale's
    format.

    `granularity` names the block as rows x columns; `row`, `column`, `tensor` are one block,
    whatever their size. `scale` is `fp32`; or `ue8m0`: a power of two, rounded up, so that no
    element of the block overflows; or `nvfp4`: an E4M3 number times one FP32 number for the whole
    tensor (`nvfp4-row`: for its row, so that rows stay independent).
    """

    format: Format = E4M3
    granularity: str = "1x128"
    scale: str = "ue8m0"

    def __post_init__(self) -> None:
        if not self.format.is_quantized:
            raise IsobitError(
                f"cannot quantize to {self.format}: block scales need e4m3, e5m2, e2m1 or int8"
            )
        if self.granularity not in GRANULARITIES:
            raise IsobitError(
                f"unknown granularity {self.granularity!r}: choose from {', '.join(GRANULARITIES)}"
            )
        if self.scale not in SCALE_FORMATS:
            raise IsobitError(
                f"unknown scale format {self.scale!r}: choose from {', '.join(SCALE_FORMATS)}"
            )

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return (rows, columns) of a full block of a matrix of this shape; a dimension below 128
        is one block."""
        rows, columns = max(shape[0], 1), max(shape[1], 1)
        whole = {"row": (1, columns), "column": (rows, 1), "tensor": (rows, columns)}
        if self.granularity in whole:
            return whole[self.granularity]
        high, wide = (int(size) for size in self.granularity.split("x"))
        return min(high, rows), min(wide, columns)

    @property
    def rows_independent(self) -> bool:
        """Whether blocks of 128 rows are quantized alike alone and among others; if not,
        `quantize_part` needs to know the largest magnitude of all."""
        assert self.granularity not in ("column", "32x1", "16x1"), (
            f"{self}: no such scales of weights"
        )
        return self.granularity != "tensor" and self.scale != "nvfp4"

    @property
    def columns_independent(self) -> bool:
        """Whether blocks of 128 columns are quantized alike alone and among others: every scale is
        of what lies inside such a block."""
        return self.granularity not in ("row", "tensor") and self.scale in ("fp32", "ue8m0")

    def transpose(self) -> "QuantSpec":
        return replace(self, granularity=_TRANSPOSED.get(self.granularity, self.granularity))

    def __str__(self) -> str:
        return f"{self.format} {self.granularity} {self.scale}"


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized matrix: codes `data` [R, C] and FP32 `scale` [ceil(R / block rows), ceil(C /
    block columns)]."""

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
        """Return the transposed matrix [C, R], over the same storage."""
        return QTensor(self.data.t(), self.scale.t(), self.spec.transpose())

    def dequantize(self) -> Tensor:
        """Return the values [R, C] in float32: code times scale, rounded once (exact where the
        scale is a power of two)."""
        return self.data.to(torch.float32) * expand_scale(self.scale, self.block, self.shape)


def along_rows(spec: QuantSpec) -> QuantSpec:
    """Return the spec of a matrix that is reduced along its rows, not its columns, as WGrad's
    operands are."""
    return replace(spec, granularity=_ALONG_ROWS.get(spec.granularity, spec.granularity))


def expand_scale(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Repeat block scales to one per element, [R, C]."""
    if scale.numel() == 1:
        return scale.expand(shape)
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]] if block[0] > 1 else scale
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]] if block[1] > 1 else rows


def scales(amax: Tensor, form: Format, scale_format: str) -> Tensor:
    """Return scales for blocks of these largest magnitudes (float32, same shape).

    FP32: amax / max. UE8M0: 2 ** ceil(log2(amax / max)), taken from the bits of the quotient, so
    that it is exact. A quotient below the smallest normal float32 becomes that; a zero amax gives
    1.
    """
    quotient = (amax / form.max).clamp(min=_SMALLEST_SCALE)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(quotient)
        quotient = torch.ldexp(
            torch.ones_like(quotient), exponent - (mantissa == 0.5).to(exponent.dtype)
        )
    return torch.where(amax == 0, torch.ones_like(quotient), quotient)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block of `x` [R, C], in float32; NaN and infinity
    propagate."""
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
    scale = (
        two_level_scales(amax, spec)
        if spec.scale.startswith("nvfp4")
        else scales(amax, spec.format, spec.scale)
    )
    return quantize_with_scale(x, scale, spec)


def two_level_scales(amax: Tensor, spec: QuantSpec) -> Tensor:
    """Return NVFP4's scales for blocks of these largest magnitudes [R, blocks]: E4M3(amax / max /
    g) · g in float32.

    g = largest magnitude / (max · 448), of the whole tensor or of the row (NVIDIA 2025, arXiv
    2509.25149, appendix B). A zero block has scale 1; a scale that E4M3 would flush takes its
    smallest number. E4M3 rounds to nearest, so a block's largest element may exceed the format's
    maximum by a little, and is clamped.
    """
    largest = amax.amax(1, keepdim=True) if spec.scale == "nvfp4-row" else amax.amax().reshape(1, 1)
    common = common_scale(largest, spec)
    ratio = (amax / spec.format.max / common).clamp(2.0**-9, E4M3.max)
    return torch.where(amax == 0, 1.0, ratio.to(E4M3.dtype).float() * common)


def common_scale(largest: Tensor, spec: QuantSpec) -> Tensor:
    """Return the g of NVFP4's scales, of the largest magnitudes of tensors or rows."""
    return torch.where(largest > 0, largest / (spec.format.max * E4M3.max), 1.0).clamp(
        min=_SMALLEST_SCALE
    )


def quantize_part(x: Tensor, spec: QuantSpec, largest: float, name: str = "tensor") -> QTensor:
    """Quantize some rows of a matrix whose largest magnitude is `largest`: their codes and scales
    in `quantize` of the whole matrix. Raises NonFiniteError as it does."""
    if not math.isfinite(largest):
        raise NonFiniteError(nonfinite_message(name, spec))
    everything = torch.full((1, 1), largest, dtype=torch.float32, device=x.device)
    if spec.granularity == "tensor":
        return quantize_with_scale(x, scales(everything, spec.format, spec.scale), spec)
    assert spec.scale == "nvfp4", f"{spec}: rows are independent"
    amax = block_amax(x, spec.block((x.shape[0], x.shape[1])))
    block_scales = two_level_scales(torch.cat([amax, everything.expand(1, amax.shape[1])]), spec)[
        :-1
    ]
    return quantize_with_scale(x, block_scales, spec)


def largest_of(magnitudes: Iterable[float]) -> float:
    """Return the largest value of a tensor; NaN if it holds one."""
    numbers = list(magnitudes)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _cast(scaled: Tensor, form: Format) -> Tensor:
    """Return the codes of values within the format's range, rounded to nearest, ties to even."""
    if form is INT8:
        return scaled.round().to(form.dtype)
    if form is not E2M1:
        return scaled.to(form.dtype)
    index = torch.bucketize(scaled.abs(), _E2M1_BORDERS.to(scaled.device))
    return torch.copysign(_E2M1_VALUES.to(scaled.device)[index], scaled).to(form.dtype)


_E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# halfway between two values; where the upper one is even, just below, since a value on the border
# belongs to the lower
_E2M1_BORDERS = torch.tensor([0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0])


def quantize_with_scale(x: Tensor, scale: Tensor, spec: QuantSpec) -> QTensor:
    """Quantize a finite matrix [R, C] with block scales [ceil(R / block rows), ceil(C / block
    columns)] that are given: what exceeds them saturates."""
    shape = (x.shape[0], x.shape[1])
    scaled = x.float() / expand_scale(scale, spec.block(shape), shape)
    # torch <= 2.11 casts overflow to NaN, later versions saturate: the clamp makes both the same.
    return QTensor(_cast(scaled.clamp(-spec.format.max, spec.format.max), spec.format), scale, spec)


def nonfinite_message(name: str, spec: QuantSpec) -> str:
    """Return the line that every quantizer raises on NaN or infinity."""
    return f"cannot quantize {name} to {spec.format}: it holds NaN or infinity"

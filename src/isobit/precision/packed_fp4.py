"""NVFP4 weights as they are stored when nothing writes them again: two codes to a byte, scales of a
byte.

A quantizer gives codes that are E4M3 numbers, a byte each, and float32 scales: 10 bits a weight.
Here it is 4.5 bits, and what is unpacked are the same codes and the same scales, bit for bit
(`tests/precision/test_packed_fp4.py`). A product unpacks some rows at a time, or in its inner loop;
never the whole weight. Left out: formats other than NVFP4, and weights that are trained, whose
storage a sync overwrites (`QTensor`)."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from isobit.precision.formats import E2M1, E4M3
from isobit.precision.quantize import QTensor, QuantSpec, block_amax, common_scale

NVFP4 = QuantSpec(E2M1, "1x16", "nvfp4")
GROUP = 16
"""Columns that share a scale."""
_PANEL = 1 << 20
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, eq=False)
class PackedFP4:
    """A weight [R, C], C a multiple of 16: `codes` [R, C / 2] uint8, an even column in the low half
    of its byte; and `scales` [R, C / 16] uint8, which are E4M3 numbers to be multiplied by `common`
    [1] float32. A scale of byte 0 is 1, which a block of zeros has."""

    codes: Tensor
    scales: Tensor
    common: Tensor

    spec = NVFP4

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], 2 * self.codes.shape[1])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return (self.codes, self.scales, self.common)

    @property
    def nbytes(self) -> int:
        return nbytes(*self.shape)

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> QTensor:
        """Return some rows and columns, bounded by multiples of 16, as the quantizer returned
        them."""
        start, stop, _ = columns.indices(self.shape[1])
        codes = self.codes[rows, start // 2 : stop // 2]
        scales = self.scales[rows, start // GROUP : stop // GROUP]
        return QTensor(unpacked(codes), unpacked_scales(scales, self.common), NVFP4)

    def dequantize(self) -> Tensor:
        """Return all values [R, C] in float32."""
        return self.part().dequantize()


def holds(spec: QuantSpec, shape: tuple[int, ...]) -> bool:
    """Return whether `PackedFP4` hold such a weight. One block of 16 columns is multiplied like a
    whole row of FP8, in another order."""
    return spec == NVFP4 and shape[1] % GROUP == 0 and shape[1] > GROUP


def nbytes(rows: int, columns: int) -> int:
    """Return the bytes of a packed weight of this shape."""
    return rows * (columns // 2 + columns // GROUP) + 4


def packed(quantized: QTensor, x: Tensor) -> PackedFP4:
    """Return the numbers of a quantized matrix packed two codes to a byte; `x` [R, C] holds the
    values before quantization, from which the common scale is computed again."""
    assert holds(quantized.spec, quantized.shape)
    index = _nibble_of(quantized.data.device).index_select(
        0, quantized.data.view(torch.uint8).flatten().int()
    )
    pairs = index.view(quantized.shape[0], -1, 2)
    common = common_scale(block_amax(x, (1, GROUP)).amax().reshape(1), NVFP4)
    ratios = (quantized.scale / common).clamp(2.0**-9, E4M3.max).to(E4M3.dtype)
    scales = torch.where(ratios.float() * common == quantized.scale, ratios.view(torch.uint8), 0)
    return PackedFP4(pairs[..., 0] | pairs[..., 1] << 4, scales, common)


def unpacked(codes: Tensor) -> Tensor:
    """Return E4M3 codes [..., C] of pairs [..., C / 2]."""
    pairs = _pairs(codes.device).index_select(0, codes.flatten().int())
    return pairs.view(*codes.shape[:-1], 2 * codes.shape[-1]).view(E4M3.dtype)


def unpacked_scales(scales: Tensor, common: Tensor) -> Tensor:
    """Return float32 scales: E4M3 numbers times the common factor, [1] or [..., 1]."""
    return torch.where(scales == 0, 1.0, scales.view(E4M3.dtype).float() * common)


def panels(count: int, width: int) -> list[slice]:
    """Divide `count` rows or columns, of `width` elements each, into slices of about a million
    elements, at multiples of 16."""
    size = max(_PANEL // max(width, 1) // GROUP, 1) * GROUP
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """Return the two E4M3 codes [256, 2] uint8 of a byte."""
    codes = (
        torch.tensor([*_VALUES, *(-value for value in _VALUES)]).to(E4M3.dtype).view(torch.uint8)
    )
    byte = torch.arange(256)
    return torch.stack([codes[byte & 15], codes[byte >> 4]], 1).to(device)


@lru_cache(maxsize=8)
def _nibble_of(device: torch.device) -> Tensor:
    """Return the nibble [256] uint8 of an E4M3 code that E2M1 has; of another, anything."""
    nibbles = torch.zeros(256, dtype=torch.uint8)
    nibbles[_pairs(torch.device("cpu"))[:16, 0].long()] = torch.arange(16, dtype=torch.uint8)
    return nibbles.to(device)

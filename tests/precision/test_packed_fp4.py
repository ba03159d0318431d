"""NVFP4 weights two codes to a byte: what was quantized comes back bit for bit, at 4.5 bits a
weight."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.precision import E2M1, E4M3, PackedFP4, QTensor, QuantSpec, quantize
from isobit.precision.packed_fp4 import NVFP4, holds, nbytes, packed, panels
from tests.kernels.helpers import draw, same

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def weight(seed: int, rows: int = 48, columns: int = 96) -> Tensor:
    """Blocks of very different magnitudes, some of zeros of either sign, some far below the
    largest."""
    x = draw(seed, rows, columns, dtype=torch.float32) * draw(
        seed + 1, rows, columns // 16, dtype=torch.float32
    ).mul(4).exp().repeat_interleave(16, 1)
    x[1, 16:32], x[2] = 0.0, -0.0
    return x


def same_matrix(a: QTensor, b: QTensor) -> bool:
    return (
        same(a.data.view(torch.uint8), b.data.view(torch.uint8))
        and same(a.scale, b.scale)
        and a.spec == b.spec
    )


def swapped(found: PackedFP4) -> PackedFP4:
    """The control of all claims about bits: every even column exchanged with the odd one beside
    it."""
    return replace(found, codes=found.codes << 4 | found.codes >> 4)


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e-36, 1e30, 0.0])
def test_what_was_quantized_comes_back(factor: float) -> None:
    for seed in range(8):
        x = weight(seed) * factor
        quantized = quantize(x, NVFP4)
        found = packed(quantized, x)
        assert same_matrix(found.part(), quantized)
        assert same(found.dequantize(), quantized.dequantize())
        if factor:
            assert not same_matrix(swapped(found).part(), quantized)
    alone = torch.ones(1, 32) * factor
    assert same_matrix(packed(quantize(alone, NVFP4), alone).part(), quantize(alone, NVFP4))


def test_bytes_mean_what_the_format_says() -> None:
    """Decoded by hand: the even column in the low half, three bits of magnitude under a sign;
    scales in E4M3 times one number, and 1 for byte 0."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.tensor(
        [[0, 1, 0x38, 0x7E]] * 8, dtype=torch.uint8
    )  # 1, 2^-9, 1 and 448 times the number
    common = torch.tensor([0.3])
    found = PackedFP4(codes, scales, common).dequantize()
    for row in range(8):
        for column in range(64):
            code = int(codes[row, column // 2]) >> 4 * (column % 2) & 15
            value = MAGNITUDES[code & 7] * (-1 if code & 8 else 1)
            scale = [
                torch.tensor(1.0),
                *(torch.tensor(x) * common[0] for x in (2.0**-9, 1.0, 448.0)),
            ][column // 16]
            assert found[row, column] == value * scale


def test_parts_are_those_of_the_whole() -> None:
    x = weight(3)
    quantized = quantize(x, NVFP4)
    found = packed(quantized, x).part(slice(5, 21), slice(32, 80))
    wanted = QTensor(quantized.data[5:21, 32:80], quantized.scale[5:21, 2:5], NVFP4)
    assert same_matrix(found, wanted)
    assert not same_matrix(
        packed(quantized, x).part(slice(5, 21), slice(16, 64)), wanted
    )  # the control


def test_a_weight_takes_four_and_a_half_bits() -> None:
    x = draw(1, 512, 1024, dtype=torch.float32)
    quantized = quantize(x, NVFP4)
    found = packed(quantized, x)
    assert (
        sum(part.numel() * part.element_size() for part in found.tensors)
        == found.nbytes
        == nbytes(512, 1024)
    )
    assert 8 * found.nbytes / x.numel() == pytest.approx(4.5, abs=1e-3)
    assert 8 * quantized.nbytes / x.numel() == 10
    assert found.shape == quantized.shape


def test_what_is_held() -> None:
    assert holds(NVFP4, (3, 32))
    for spec, shape in (
        (NVFP4, (3, 16)),
        (NVFP4, (3, 40)),
        (QuantSpec(E2M1, "1x16", "nvfp4-row"), (3, 32)),
        (QuantSpec(E2M1, "1x16", "fp32"), (3, 32)),
        (QuantSpec(E4M3, "1x32"), (3, 32)),
    ):
        assert not holds(spec, shape)


@pytest.mark.parametrize(
    ("count", "other"), [(1, 1), (100, 32), (5000, 4096), (48, 10**7), (16, 0)]
)
def test_panels_cover_all_at_multiples_of_16(count: int, other: int) -> None:
    found = panels(count, other)
    assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])]
    assert found[-1].stop == count
    assert all(each.start % 16 == 0 for each in found)
    assert max(each.stop - each.start for each in found) * other <= max(1 << 20, 16 * other)

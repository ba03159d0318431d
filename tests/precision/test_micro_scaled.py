"""MXFP8 and NVFP4: grids, blocks and scales by their specifications, and products of small
blocks."""

import itertools

import pytest
import torch

from isobit.kernels import get_ops
from isobit.precision import E2M1, E4M3, QuantSpec, precision_from, quantize
from tests.kernels.helpers import normal

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MXFP8 = QuantSpec(E4M3, "1x32", "ue8m0")
NVFP4 = QuantSpec(E2M1, "1x16", "nvfp4")
NVFP4_ROW = QuantSpec(E2M1, "1x16", "nvfp4-row")


def test_e2m1_rounds_to_nearest_and_ties_to_even() -> None:
    """Against all values between two neighbours of the grid, the borders among them, of both
    signs."""
    for sign, (low, high) in itertools.product((1.0, -1.0), itertools.pairwise(GRID)):
        middle = (low + high) / 2
        even = low if GRID.index(low) % 2 == 0 else high
        inside = [low, torch.nextafter(torch.tensor(middle), torch.tensor(low)).item(), middle]
        inside += [torch.nextafter(torch.tensor(middle), torch.tensor(high)).item(), high]
        x = torch.tensor(
            [[sign * value for value in inside] + [sign * 6.0] * 11]
        )  # the scale of such a block is 1
        q = quantize(x, QuantSpec(E2M1, "1x16", "fp32"))
        assert q.scale.tolist() == [[1.0]]
        assert q.dequantize()[0, :5].abs().tolist() == [low, low, even, high, high]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 32), (4, 100)])
def test_mxfp8_has_a_power_of_two_for_every_32(shape: tuple[int, int]) -> None:
    x = normal(*shape) * 100
    q = quantize(x, MXFP8)
    assert q.scale.shape == (shape[0], -(-shape[1] // 32))
    assert torch.equal(torch.frexp(q.scale).mantissa, torch.full_like(q.scale, 0.5))
    for row, block in itertools.product(range(shape[0]), range(q.scale.shape[1])):
        peak = x[row, 32 * block : 32 * block + 32].abs().max()
        assert q.scale[row, block] / 2 < peak / 448 <= q.scale[row, block]


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_ROW])
def test_nvfp4_scales_are_e4m3_times_one_number(spec: QuantSpec) -> None:
    x = normal(6, 80) * torch.logspace(-2, 2, 6).unsqueeze(1)
    q = quantize(x, spec)
    assert q.scale.shape == (6, 5)
    largest = x.abs().amax(1, keepdim=True) if spec is NVFP4_ROW else x.abs().max()
    ratio = q.scale / (largest / (6 * 448))
    assert torch.allclose(ratio.to(torch.float8_e4m3fn).float(), ratio, rtol=1e-6)
    error = (q.dequantize() - x).norm(dim=1) / x.norm(dim=1)
    assert float(error.max() if spec is NVFP4_ROW else error[-1]) < 0.15
    assert set(
        (q.dequantize() / q.scale.repeat_interleave(16, 1))
        .abs()
        .round(decimals=3)
        .unique()
        .tolist()
    ) <= set(GRID)


def test_nvfp4_zero_blocks_and_blocks_far_below_the_largest() -> None:
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16] = 1e4, 1e-6
    q = quantize(x, NVFP4)
    assert q.scale[0, 2] == 1.0
    assert q.dequantize()[0, 32:].eq(0).all()
    assert q.scale[0, 1] > 0
    assert quantize(torch.zeros(2, 16), NVFP4).dequantize().eq(0).all()


def test_a_row_does_not_see_the_others_only_with_a_number_of_its_own() -> None:
    x = normal(4, 64)
    x[3] *= 1000
    alone, together = quantize(x[:1], NVFP4_ROW), quantize(x, NVFP4_ROW)
    assert torch.equal(alone.dequantize(), together.dequantize()[:1])
    assert not torch.equal(
        quantize(x[:1], NVFP4).dequantize(), quantize(x, NVFP4).dequantize()[:1]
    )  # the control


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    ("left", "right"), [(MXFP8, MXFP8), (NVFP4_ROW, NVFP4), (MXFP8, QuantSpec(E4M3, "128x128"))]
)
@pytest.mark.parametrize("columns", [16, 48, 300])
def test_products_of_small_blocks(
    backend: str, left: QuantSpec, right: QuantSpec, columns: int
) -> None:
    ops = get_ops(backend)
    a, b = ops.quantize(normal(9, columns), left), ops.quantize(normal(20, columns, seed=1), right)
    assert torch.equal(a.scale, quantize(normal(9, columns), left).scale)
    found = ops.product(a, b, None, torch.float32)
    wanted = a.dequantize().double() @ b.dequantize().double().t()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    one = ops.product(ops.quantize(normal(9, columns)[2:3], left), b, None, torch.float32)
    assert torch.equal(one, found[2:3])


def test_an_activation_number_for_the_whole_batch_is_not_bitwise() -> None:
    assert precision_from("nvfp4").varies_with_batch() is None
    assert precision_from("mxfp8").varies_with_batch() is None

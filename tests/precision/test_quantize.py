"""The quantizer: scales, codes, ragged blocks, extremes; and what powers of two buy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.errors import IsobitError
from isobit.precision import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    INT8,
    QTensor,
    QuantSpec,
    QuantTotals,
    error_sums,
    quantize,
    quantize_with_scale,
    scales,
)
from isobit.precision.errors import QuantStats
from isobit.precision.quantize import SCALE_FORMATS

GRANULARITIES = ("1x128", "128x128", "128x1", "row", "column", "tensor")
INT8_VALUES = torch.arange(-127.0, 128.0)
finite_floats = st.floats(-(2.0**100), 2.0**100, allow_nan=False, width=32)


def statistics(x: torch.Tensor, quantized: QTensor) -> QuantStats:
    totals = QuantTotals()
    totals.add(error_sums(x, quantized))
    return totals.stats()


def e4m3_values() -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes[~codes.isnan()].sort().values


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (128, 128), (130, 257), (1, 300), (300, 1)])
def test_every_block_has_the_scale_of_its_own_maximum(
    granularity: str, scale: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-4, 4, shape[1])
    spec = QuantSpec(E4M3, granularity, scale)
    quantized = quantize(x, spec)
    rows, columns = spec.block(shape)
    for i in range(quantized.scale.shape[0]):
        for j in range(quantized.scale.shape[1]):
            block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            ratio = block.abs().max() / 448
            expected = 2.0 ** math.ceil(math.log2(ratio)) if scale == "ue8m0" else ratio
            assert quantized.scale[i, j] == expected
    assert quantized.scale.numel() == math.ceil(shape[0] / rows) * math.ceil(shape[1] / columns)


@given(st.lists(finite_floats, min_size=1, max_size=40), st.sampled_from(["fp32", "ue8m0"]))
@settings(max_examples=200, deadline=None)
def test_codes_are_the_nearest_and_error_is_bounded(values: list[float], scale: str) -> None:
    x = torch.tensor([values])
    quantized = quantize(x, QuantSpec(E4M3, "1x128", scale))
    scaled = (x.double() / quantized.scale.double()).clamp(-448, 448)
    grid = e4m3_values().double()
    nearest = (scaled.unsqueeze(-1) - grid).abs().min(-1).values
    distance = (scaled - quantized.data.double()).abs()
    assert bool((distance <= nearest * (1 + 1e-6) + 1e-12).all())


@given(st.lists(finite_floats, min_size=1, max_size=40), st.sampled_from(["fp32", "ue8m0"]))
@settings(max_examples=80, deadline=None)
def test_int8_codes_are_quotients_rounded_to_even(values: list[float], scale: str) -> None:
    """Against Python's numbers: the quotient rounded to float32, then to a whole number, `round`
    being half to even."""
    found = quantize(torch.tensor([values]), QuantSpec(INT8, "row", scale))
    x, step = np.array(values, np.float32), np.float32(found.scale.item())
    assert found.data.dtype == torch.int8
    assert found.data[0].tolist() == [round(min(max(float(q), -127.0), 127.0)) for q in x / step]
    largest = float(np.abs(x).max())
    ratio = float(np.float32(largest) / np.float32(127)) if largest else 1.0
    wanted = (
        2.0 ** math.ceil(math.log2(ratio))
        if scale == "ue8m0" and ratio > 2.0**-126
        else max(ratio, 2.0**-126)
    )
    assert float(step) == wanted
    assert (np.abs(found.dequantize()[0].numpy() - x) <= step * np.float32(0.50001)).all()


def test_int8_rounds_ties_to_even_and_clamps_to_symmetric_codes() -> None:
    """The controls: codes of a quotient rounded half up, and of a scale of amax / 128, are
    others."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0]])
    found = quantize(x, QuantSpec(INT8, "row", "fp32"))
    assert found.scale.item() == 1
    assert found.data[0].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]
    assert found.data[0].tolist() != (x + 0.5).floor()[0].tolist()
    assert found.data[0].tolist() != (x / (127 / 128)).round()[0].tolist()
    beyond = quantize_with_scale(
        x * 2, found.scale, found.spec
    )  # a scale that is given may be too small
    assert (int(beyond.data.min()), int(beyond.data.max())) == (-127, 127)
    assert bool((INT8_VALUES.to(torch.bfloat16).float() == INT8_VALUES).all())
    assert bool((INT8_VALUES.to(torch.float16).float() == INT8_VALUES).all())


@given(finite_floats.filter(lambda v: v != 0))
@settings(max_examples=300, deadline=None)
def test_ue8m0_is_the_smallest_power_of_two_that_does_not_overflow(value: float) -> None:
    amax = torch.tensor(abs(value))
    scale = scales(amax, E4M3, "ue8m0")
    assert torch.frexp(scale).mantissa == 0.5
    assert amax.double() / scale.double() <= 448
    assert scale == 2.0**-126 or amax.double() / (scale.double() / 2) > 448


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(E4M3, "1x128", "fp32"),
        QuantSpec(E5M2, "row", "ue8m0"),
        QuantSpec(INT8, "row", "fp32"),
    ],
)
def test_zero_blocks_have_scale_one_and_tiny_values_survive(spec: QuantSpec) -> None:
    zeros = quantize(torch.zeros(2, 5), spec)
    assert bool((zeros.scale == 1).all())
    assert bool((zeros.dequantize() == 0).all())
    tiny = torch.tensor([[1e-9, -3e-9, 0.0]])
    assert statistics(tiny, quantize(tiny, spec)).relative_error < 0.2
    assert bool(torch.isfinite(quantize(torch.tensor([[1e-45, 0.0]]), spec).dequantize()).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_input_is_refused_by_name(bad: float) -> None:
    x = torch.ones(3, 200)
    x[1, 150] = bad
    with pytest.raises(IsobitError, match=r"layers\.3\.down"):
        quantize(x, QuantSpec(), "layers.3.down")


def test_every_e4m3_value_survives_and_nothing_becomes_nan() -> None:
    grid = e4m3_values().unsqueeze(0)
    quantized = quantize(grid, QuantSpec(E4M3, "row", "fp32"))
    assert quantized.scale.item() == 1
    assert torch.equal(quantized.dequantize(), grid)
    above = quantize(torch.tensor([[448.0 * (1 + 2**-23), 1.0]]), QuantSpec(E4M3, "row", "fp32"))
    assert not bool(above.data.float().isnan().any())


def test_transpose_is_a_view_of_the_same_values() -> None:
    x = torch.randn(200, 150)
    for granularity in GRANULARITIES:
        quantized = quantize(x, QuantSpec(E4M3, granularity, "fp32"))
        turned = quantized.transpose()
        assert torch.equal(turned.dequantize(), quantized.dequantize().t())
        assert turned.data.data_ptr() == quantized.data.data_ptr()
        direct = quantize(x.t().contiguous(), turned.spec)
        assert torch.equal(direct.dequantize(), turned.dequantize())


def test_requantizing_along_the_other_dimension_is_free_only_with_powers_of_two() -> None:
    """What lets one saved activation serve FProp and WGrad (docs/numerics.md, section 2); FP32
    scales add error."""
    torch.manual_seed(1)
    x = torch.randn(256, 256)
    for scale, added in (("ue8m0", False), ("fp32", True)):
        first = quantize(x, QuantSpec(E4M3, "1x128", scale)).dequantize()
        second = quantize(first, QuantSpec(E4M3, "128x1", scale)).dequantize()
        # a power-of-two scale only moves exponents, so a change needs an underflow, which this data
        # does not have
        assert (not torch.equal(first, second)) is added
        assert statistics(x, quantize(first, QuantSpec(E4M3, "128x1", scale))).relative_error > 0.02


def test_statistics_count_what_they_name() -> None:
    x = torch.tensor([[448.0, 1e-9, 0.0, 1.0]])
    stats = statistics(x, quantize(x, QuantSpec(E4M3, "row", "fp32")))
    assert stats.flushed == 0.25
    assert stats.saturated == 0
    assert 0 < stats.relative_error < 1e-9


def test_saturation_is_counted_against_a_stale_scale() -> None:
    x = torch.tensor([[100.0, 1.0]])
    quantized = quantize(x, QuantSpec(E4M3, "row", "fp32"))
    assert statistics(x * 2, quantized).saturated == 0.5


def test_a_spec_must_make_sense() -> None:
    with pytest.raises(IsobitError, match="e4m3, e5m2, e2m1 or int8"):
        QuantSpec(BF16)
    with pytest.raises(IsobitError, match="granularity"):
        QuantSpec(E4M3, "2x2")
    with pytest.raises(IsobitError, match="scale format"):
        QuantSpec(E4M3, "row", "fp16")


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_whether_scales_lie_inside_blocks_of_columns(granularity: str, scale: str) -> None:
    """As the specification says, columns 128 to 256 alone have the codes and scales that they have
    beside others, or not; the second half is larger, so a scale of both shows."""
    if scale.startswith("nvfp4"):
        spec = QuantSpec(E2M1, "1x16", scale)
    else:
        spec = QuantSpec(E4M3, granularity, scale)
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(0))
    x[:, 128:] *= 5
    whole, alone = quantize(x, spec), quantize(x[:, :128].contiguous(), spec)
    codes = whole.data.view(torch.uint8)[:, :128], alone.data.view(torch.uint8)
    width = alone.scale.shape[1]
    same = torch.equal(*codes) and torch.equal(whole.scale[:, :width], alone.scale)
    assert same == spec.columns_independent

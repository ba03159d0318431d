"""One rounding from float64, against rational arithmetic; and that PyTorch's own cast is two."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.kernels.reference.rounding import round_once

from .helpers import rounded, same

DTYPES = (torch.bfloat16, torch.float32)
LARGEST = 3.0e38  # below bfloat16's largest number, 3.39e38
ordinary = st.floats(-LARGEST, LARGEST, allow_nan=False)


@given(ordinary, st.sampled_from(DTYPES))
@settings(max_examples=500, deadline=None)
def test_rounding_is_that_of_rational_arithmetic(value: float, dtype: torch.dtype) -> None:
    result = round_once(torch.tensor(value, dtype=torch.float64), dtype)
    assert result.dtype == dtype
    assert float(result) == rounded(Fraction(value), dtype)


@given(
    st.integers(0x80, 0x7F00),
    st.sampled_from([0.0, 2.0**-9, 2.0**-20, 2.0**-24, 2.0**-25, 2.0**-30, 2.0**-44]),
    st.sampled_from([-1.0, 1.0]),
    st.sampled_from([-1.0, 1.0]),
)
@settings(max_examples=500, deadline=None)
def test_rounding_beside_the_middle_of_two_bfloat16(
    code: int, distance: float, side: float, sign: float
) -> None:
    """Halfway and a little off it, where a rounding to float32 first would land on the tie."""
    low, high = (
        torch.tensor([code, code + 1], dtype=torch.int16).view(torch.bfloat16).double().tolist()
    )
    value = sign * ((low + high) / 2 + side * distance * (high - low))
    result = round_once(torch.tensor([value], dtype=torch.float64), torch.bfloat16)
    assert float(result) == rounded(Fraction(value), torch.bfloat16)


def test_a_cast_through_float32_is_two_roundings() -> None:
    """The negative control: 1 + 2^-8 + 2^-40 is above the middle of 1 and 1 + 2^-7, but not in
    float32."""
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40], dtype=torch.float64)
    assert round_once(value, torch.bfloat16).tolist() == [1 + 2.0**-7, 1 + 2.0**-7]
    assert value.float().bfloat16().tolist() == [1.0, 1 + 2.0**-6]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_of_the_format_stays_what_it_is(dtype: torch.dtype) -> None:
    every = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    )
    every = every[~every.isnan()].to(dtype)
    assert same(round_once(every.double(), dtype), every)


@pytest.mark.parametrize("dtype", DTYPES)
def test_specials_overflow_and_underflow(dtype: torch.dtype) -> None:
    tiny = 2.0 ** (-133 if dtype == torch.bfloat16 else -149)  # the smallest subnormal
    numbers = [math.inf, -math.inf, 1e39, -1e300, 0.0, -0.0, 1e-300, tiny, tiny * 0.5, tiny * 0.75]
    values = torch.tensor(numbers, dtype=torch.float64)
    result = round_once(values, dtype).double().tolist()
    assert result == [math.inf, -math.inf, math.inf, -math.inf, 0.0, -0.0, 0.0, tiny, 0.0, tiny]
    assert bool(round_once(torch.tensor([math.nan], dtype=torch.float64), dtype).isnan().all())

"""Casts and scales of the Triton kernels, against PyTorch's: every code, ties, limits, NaN and
infinity."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch
from isobit.precision import E4M3, INT8, QuantSpec, quantize, scales

from ..helpers import draw, same
from .helpers import DEVICE


@triton.jit
def _cast(x_ptr, y_ptr, COUNT: tl.constexpr, TO: tl.constexpr):
    at = tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    if TO == "bf16":
        tl.store(y_ptr + at, numbers.to_bf16(x))
    elif TO == "e4m3":
        tl.store(y_ptr + at, numbers.to_e4m3(x))
    elif TO == "from":
        tl.store(y_ptr + at, numbers.from_codes(x))
    elif TO == "ue8m0":
        tl.store(y_ptr + at, numbers.block_scale(x, True))
    elif TO == "int8":
        tl.store(y_ptr + at, numbers.to_int8(x))
    elif TO == "fp32 of int8":
        tl.store(y_ptr + at, numbers.block_scale(x, False, tl.int8))
    elif TO == "ue8m0 of int8":
        tl.store(y_ptr + at, numbers.block_scale(x, True, tl.int8))
    else:
        tl.store(y_ptr + at, numbers.block_scale(x, False))


def _run(x: Tensor, to: str, dtype: torch.dtype) -> Tensor:
    count = triton.next_power_of_2(x.numel())
    padded = torch.zeros(count, dtype=x.dtype)
    padded[: x.numel()] = x
    y = torch.empty(count, dtype=dtype, device=DEVICE)
    launch(_cast, (1,), padded.to(DEVICE), y, num_warps=4, COUNT=count, TO=to)
    return y.cpu()[: x.numel()]


def _numbers() -> Tensor:
    """Magnitudes from 2^-149 to 2^127, values halfway between neighbouring codes and beside them,
    and the limits."""
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([torch.nextafter(halves, halves.new_tensor(x)) for x in (0.0, 1e9)])
    wide = draw(0, 4096, dtype=torch.float32, spread=8.0)
    limits = torch.tensor(
        [0.0, 448.0, 448.01, 463.9, 464.0, 465.0, 1e30, 3.4e38, 2.0**-149, 2.0**-126, 2.0**-10]
    )
    positive = torch.cat([codes, halves, beside, wide.abs(), limits])
    return torch.cat([positive, -positive])


def test_to_e4m3_is_pytorchs_cast_after_a_clamp() -> None:
    x = _numbers()
    assert same(_run(x, "e4m3", torch.uint8), x.clamp(-448, 448).to(E4M3.dtype).view(torch.uint8))
    assert (_run(torch.tensor([float("nan")]), "e4m3", torch.uint8) & 0x7F).item() == 0x7F


def test_from_e4m3_is_every_codes_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found, wanted = _run(codes, "from", torch.float32), codes.view(E4M3.dtype).float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert same(found[~wanted.isnan()], wanted[~wanted.isnan()])


def test_int8_rounds_ties_to_even() -> None:
    """Every half between -127 and 127, and what is beside it. The control: rounded half up, every
    other one differs."""
    halves = torch.arange(-253, 254) / 2
    x = torch.cat(
        [halves, *(torch.nextafter(halves, torch.tensor(end)) for end in (-127.0, 127.0))]
    )
    found = _run(x, "int8", torch.int8)
    assert same(found, x.round().to(torch.int8))
    assert int((found[: len(halves)] != (halves + 0.5).floor()).sum()) == 127
    codes = torch.arange(-127, 128, dtype=torch.int8)
    assert same(_run(codes, "from", torch.float32), codes.float())


def test_to_bf16_rounds_to_nearest_even() -> None:
    x = torch.cat([_numbers(), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, float("inf")])])
    assert same(_run(x, "bf16", torch.bfloat16), x.bfloat16())
    assert _run(torch.tensor([float("nan")]), "bf16", torch.bfloat16).isnan().all()


@pytest.mark.parametrize("kind", ["ue8m0", "fp32"])
def test_scales_are_the_quantizers(kind: str) -> None:
    for form, name in ((E4M3, kind), (INT8, f"{kind} of int8")):
        powers = form.max * 2.0 ** torch.arange(-135, 110.0)
        amax = torch.cat(
            [
                _numbers().abs(),
                powers,
                *(torch.nextafter(powers, torch.tensor(end)) for end in (0.0, 1e38)),
            ]
        ).float()
        assert same(_run(amax, name, torch.float32), scales(amax, form, kind))
        assert not same(
            _run(amax, name, torch.float32), scales(amax, E4M3 if form is INT8 else INT8, kind)
        )
        assert _run(torch.tensor([float("inf"), float("nan")]), name, torch.float32).isnan().all()


def test_the_comparison_can_fail() -> None:
    """The control: without the clamp's limit, or rounded the other way, codes differ."""
    x = _numbers()
    assert not same(
        _run(x * (1 + 2.0**-4), "e4m3", torch.uint8),
        x.clamp(-448, 448).to(E4M3.dtype).view(torch.uint8),
    )
    floored = quantize(x.view(1, -1), QuantSpec(E4M3, "tensor", "fp32")).scale[0, 0]
    assert float(floored) != float(_run(x.abs().max().view(1), "ue8m0", torch.float32))

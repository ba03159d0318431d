"""The model of Hopper's matrix instruction: against a reading of its definition in fractions, one
element at a time, and what has an order in it."""

from fractions import Fraction
from math import inf, isfinite, nan, trunc
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch

from ..helpers import draw, same
from . import hopper
from .hopper import BF16, E4M3, FP16, Card, Instruction

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the instruction")
FORMATS = {"bf16": (torch.bfloat16, BF16), "fp16": (torch.float16, FP16),
           "e4m3": (torch.float8_e4m3fn, E4M3)}  # fmt: skip


def _exponent(x: Fraction, least: int) -> int:
    """floor(log2 |x|), at least that of the smallest normal number; of zero -126."""
    if x == 0:
        return -126
    found = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return max(found if abs(x) >= Fraction(2) ** found else found - 1, least)


def _defined(a: list[float], b: list[float], c: float, by: Instruction) -> float:
    """One element of c + a · b, as the module's docstring has it."""
    for first in range(0, len(a), by.inner):
        pairs = list(zip(a, b))[first : first + by.inner]
        plain = sum(x * y for x, y in pairs) + c
        if not isfinite(plain):
            c = plain
            continue
        terms = [(Fraction(x) * Fraction(y), _exponent(Fraction(x), by.least)
                  + _exponent(Fraction(y), by.least)) for x, y in pairs]  # fmt: skip
        terms.append((Fraction(c), _exponent(Fraction(c), -126)))
        unit = Fraction(2) ** (max(exponent for _, exponent in terms) - by.aligned)
        total = sum(trunc(term / unit) for term, _ in terms) * unit
        unit = Fraction(2) ** (_exponent(total, -126) - by.kept)
        c = float(np.float32(float(trunc(total / unit) * unit)))
    return c


def _operands(kind: str, spread: float, inner: int = 96) -> tuple[Any, Any, Any]:
    """a [9, K], b [K, 5] in this format and c [9, 5], as values in float64, with zeros, subnormal
    numbers, terms that cancel, and an accumulator that is larger than all."""
    dtype = FORMATS[kind][0]
    most = float(torch.finfo(dtype).max)
    a, b = (draw(seed, n, inner, dtype=torch.float32, spread=spread).clamp(-most, most)
            for seed, n in enumerate((9, 5)))  # fmt: skip
    a[0] = 0
    a[1, ::2] = 0
    a[2] *= torch.finfo(dtype).smallest_normal
    a[3, 1::2], b[3, 1::2] = -a[3, ::2], b[3, ::2]
    c = draw(7, 9, 5, dtype=torch.float32, spread=2 * spread)
    c[4] *= 2.0**20
    c[5] = 0
    c[6] = -0.0
    left, right = (x.to(dtype).double().numpy() for x in (a, b))
    return left, right.T, c.numpy()


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_element_is_the_definitions(kind: str, spread: float) -> None:
    """The control: one binary place fewer on the way is noticed."""
    by = FORMATS[kind][1]
    a, b, c = _operands(kind, spread)
    found = hopper.multiply(a, b, c, by)
    wanted = [[_defined([*row], [*column], float(start), by) for column, start in zip(b.T, starts)]
              for row, starts in zip(a, c)]  # fmt: skip
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.int32), np.array(wanted, np.float32).view(np.int32))
    fewer = Instruction(by.inner, by.aligned - 1, by.kept, by.least)
    assert (hopper.multiply(a, b, c, fewer) != found).any()


@pytest.mark.parametrize("kind", FORMATS)
def test_terms_of_an_instruction_have_no_order_and_sides_are_alike(kind: str) -> None:
    """And a chain has an order: with its instructions the other way round other bits come out."""
    by = FORMATS[kind][1]
    a, b, c = _operands(kind, 2.0)
    found = hopper.multiply(a, b, c, by)
    inside = np.arange(96).reshape(-1, by.inner)[:, ::-1].ravel()
    assert np.array_equal(hopper.multiply(a[:, inside], b[inside], c, by), found)
    assert np.array_equal(hopper.multiply(b.T, a.T, c.T, by).T, found)
    whole = np.arange(96).reshape(-1, by.inner)[::-1].ravel()
    assert not np.array_equal(hopper.multiply(a[:, whole], b[whole], c, by), found)
    assert not np.array_equal(hopper.unlike_sides(b.T, a.T, c.T, by).T,
                              hopper.unlike_sides(a, b, c, by))  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_finite(kind: str) -> None:
    by = FORMATS[kind][1]
    a, b, c = np.ones((4, 64)), np.ones((64, 2)), np.zeros((4, 2), np.float32)
    c[0, 0], c[1, 0], a[2, 40] = inf, -inf, nan
    found = hopper.multiply(a, b, c, by)
    assert found[[0, 1, 3]].tolist() == [[inf, 64], [-inf, 64], [64, 64]]
    assert (found[2].view(np.uint32) == 0x7FFFFFFF).all()


@triton.jit
def _multiplied(a_ptr, b_ptr, d_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    d = numbers.dot(a, b, tl.zeros((M, N), tl.float32))
    tl.store(d_ptr + m[:, None] * N + n[None, :], d)


def _interpreted(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] · b [N, K]ᵀ by a kernel."""
    d = torch.empty(len(a), len(b))
    launch(_multiplied, (1,), a, b, d, num_warps=4, M=len(a), N=len(b), K=a.shape[1])
    return d


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [64, 32])
def test_a_card_computes_the_interpreters_products(rows: int, kind: str) -> None:
    """Of low tiles of E4M3 too, which are another instruction: as float16. The control: without a
    card the bits are others."""
    dtype, by = FORMATS[kind]
    a, b = (
        draw(i, n, 128, dtype=torch.float32, spread=1.0).clamp(-448, 448).to(dtype)
        for i, n in enumerate((rows, 16))
    )
    given = (a, b) if kind != "e4m3" else (a.view(torch.uint8), b.view(torch.uint8))
    plain = _interpreted(*given)
    with Card().computes() as card:
        found = _interpreted(*given)
    if kind == "e4m3" and rows < 64:
        by = FP16
    left, right, zeros = a.double().numpy(), b.double().numpy().T, np.zeros((rows, 16))
    assert same(found, torch.from_numpy(hopper.multiply(left, right, zeros, by)))
    assert not same(found, plain)
    assert sum(card.asked.values()) == 1
    assert same(_interpreted(*given), plain)


def test_float32_stays_with_the_interpreter() -> None:
    a, b = draw(0, 16, 32, dtype=torch.float32), draw(1, 16, 32, dtype=torch.float32)
    plain = _interpreted(a, b)
    with Card().computes() as card:
        assert same(_interpreted(a, b), plain)
    assert not card.asked

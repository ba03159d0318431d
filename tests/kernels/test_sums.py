"""Sums in a fixed order: the tree by its definition, plain products that are the tree's whatever
the batch, and what a BLAS does to the same data."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobit.kernels import get_ops
from isobit.kernels.reference import sums
from isobit.kernels.reference.rounding import round_once
from isobit.kernels.reference.sums import tree_sum, undecided

from .helpers import draw, rounded, same, threads

REFERENCE = get_ops("reference", "exact")
DTYPES = (torch.bfloat16, torch.float32)


def by_halves(terms: list[float]) -> float:
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    return by_halves([x + y for x, y in zip(terms, terms[half:])] + terms[len(terms) - half : half])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 31, 32, 33, 100, 257])
def test_the_tree_is_its_definition_and_zeros_at_its_end_change_nothing(count: int) -> None:
    x = draw(count, 6, count, dtype=torch.float32, spread=3.0).double() / 3
    found = tree_sum(x)
    assert found.tolist() == [by_halves(row) for row in x.tolist()]
    assert same(tree_sum(x.t().contiguous(), dim=0), found)
    for more in (1, 7, 300):
        assert same(tree_sum(torch.nn.functional.pad(x, (0, more))), found)
    if count > 2:
        order = torch.tensor([0, 2, 1, *range(3, count)])
        assert not same(tree_sum(x[:, order]), found), "the control: another order"


def test_the_sum_of_a_row_is_never_minus_zero() -> None:
    for shape in ((2, 1), (2, 5), (2, 0)):
        assert same(
            tree_sum(torch.full(shape, -0.0, dtype=torch.float64)),
            torch.zeros(2, dtype=torch.float64),
        )


def cancelling(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Pairs of ±1e8 among 1e-3, which meet equal weights."""
    random = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=random) * 1e-3
    b = torch.randn(columns, inner, generator=random)
    order = torch.randperm(inner, generator=random)
    plus, minus = order[: inner // 8], order[inner // 8 : inner // 8 * 2]
    a[:, plus], a[:, minus], b[:, minus] = 1e8, -1e8, b[:, plus]
    return a, b


def wide(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Exponents all over float32, up to results that are subnormal or infinite."""
    random = torch.Generator().manual_seed(1)
    a, b = (
        torch.randn(n, inner, generator=random)
        * 2.0 ** torch.randint(-126, 120, (n, inner), generator=random)
        for n in (rows, columns)
    )
    a[0] *= 2.0**-60
    b[0] *= 2.0**-60
    return a, b


def ties(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Whole numbers and small fractions: sums lie on the boundaries of rounding, or a little beside
    them."""
    random = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-9, 10, (n, inner), generator=random).float() for n in (rows, columns))
    a[:, 0], b[:, 0] = 2.0**14, 2.0**14
    a[::2, -1], b[::3, -1] = 2.0**-30, 2.0**-30
    return a, b


def sparse(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Whole rows of zeros and minus zeros, and rows that have no place in common."""
    a, b = draw(3, rows, inner, dtype=torch.float32), draw(4, columns, inner, dtype=torch.float32)
    a[:, ::2], b[::2, 1::2] = -0.0, 0.0
    a[0], b[1] = 0.0, -0.0
    return a, b


DATA: dict[str, Callable[[int, int, int], tuple[Tensor, Tensor]]] = {
    "cancelling": cancelling,
    "wide": wide,
    "ties": ties,
    "sparse": sparse,
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("inner", [2, 3, 64, 100, 1024])
def test_a_plain_product_is_the_tree_rounded_once(data: str, inner: int) -> None:
    for cast in (torch.float32, torch.bfloat16):
        a, b = (x.to(cast) for x in DATA[data](7, 9, inner))
        tree = tree_sum(a.double().unsqueeze(1) * b.double())
        for out in DTYPES:
            assert same(REFERENCE.product(a, b, None, out), round_once(tree, out))
            for bias in (draw(5, 9, dtype=cast), torch.full((9,), -0.0)):
                assert same(
                    REFERENCE.product(a, b, bias, out), round_once(tree + bias.double() + 0.0, out)
                )


def test_cancellation_alone_in_batches_permuted_and_on_two_threads() -> None:
    """The case of the issue: 16 rows of 1024, and 500 columns."""
    a, b = cancelling(16, 500, 1024)
    whole = REFERENCE.product(a, b, None, torch.float32)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    for count in (1, 2):
        with threads(count):
            assert same(REFERENCE.product(a[order], b, None, torch.float32), whole[order])
            for size in (1, 3, 8):
                parts = [REFERENCE.product(part, b, None, torch.float32) for part in a.split(size)]
                assert same(torch.cat(parts), whole)
            columns = [REFERENCE.product(a, part, None, torch.float32) for part in b.split(77)]
            assert same(torch.cat(columns, 1), whole)
    alone = torch.cat(
        [REFERENCE.gradient_product(a[i : i + 1], b, torch.float32) for i in range(16)]
    )
    assert not same(alone, REFERENCE.gradient_product(a, b, torch.float32)), (
        "the control: in the order of the BLAS"
    )


def test_the_error_is_that_of_ten_additions() -> None:
    """An element-wise bound: ⌈log2 K⌉ · 2^-53 · Σ|a·b|, and one rounding."""
    for make in (cancelling, wide):
        a, b = make(3, 4, 1000)
        a[0], b[0] = a[0] * 2.0**-40, b[0] * 2.0**-40
        found = tree_sum(a.double().unsqueeze(1) * b.double())
        for i, left in enumerate(a.tolist()):
            for j, right in enumerate(b.tolist()):
                products = [Fraction(x) * Fraction(y) for x, y in zip(left, right)]
                bound = 10 * 2.0**-53 * float(sum(map(abs, products))) * (1 + 2.0**-40)
                assert abs(Fraction(found[i, j].item()) - sum(products)) <= bound


def test_one_column_has_no_minus_zero() -> None:
    """K = 1: a BLAS answers -0 to a row alone or to a row in a batch, depending on which routine it
    takes."""
    a, b = torch.tensor([[-0.0], [0.0], [-1e-30]]), torch.tensor([[1.0], [-1.0], [0.0]])
    for out in DTYPES:
        whole = REFERENCE.product(a, b, None, out)
        assert same(whole[:2], torch.zeros(2, 3, dtype=out))
        assert same(whole[2, 2], torch.zeros((), dtype=out))
        assert same(torch.cat([REFERENCE.product(row, b, None, out) for row in a.split(1)]), whole)


def test_what_is_not_finite_stays_in_the_rows_that_it_touches() -> None:
    a, b = draw(6, 6, 40, dtype=torch.float32), draw(7, 5, 40, dtype=torch.float32)
    clean = REFERENCE.product(a, b, None, torch.float32)
    a[1, 3], a[2, 4], b[3, 5] = math.nan, math.inf, math.inf
    found = REFERENCE.product(a, b, None, torch.float32)
    assert bool(found[1].isnan().all())
    assert not bool(torch.isfinite(found[2]).any())
    assert not bool(torch.isfinite(found[:, 3]).any())
    others = torch.tensor([0, 3, 4, 5]).unsqueeze(1), torch.tensor([0, 1, 2, 4])
    assert same(found[others], clean[others])


def test_most_bf16_products_are_exact_and_need_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = draw(8, 40, 128), draw(9, 30, 128)
    with monkeypatch.context() as patched:
        patched.delattr(sums, "tree_sum")
        for out in DTYPES:
            assert same(
                REFERENCE.product(a, b, None, out), round_once(a.double() @ b.double().t(), out)
            )
        with pytest.raises(NameError):
            REFERENCE.product(*cancelling(2, 3, 64), None, torch.float32)


def last_place(x: float) -> Fraction:
    """The largest power of two of which a number is a multiple."""
    number = Fraction(x)
    return Fraction(number.numerator & -number.numerator, number.denominator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_sum_is_taken_for_exact_that_needs_more_than_53_bits(dtype: torch.dtype) -> None:
    """Where the bound of the difference is 0, in rational arithmetic; from few bits to far too
    many."""
    random = torch.Generator().manual_seed(11)
    found = []
    for spread in range(0, 34, 3):
        a, b = (
            (
                torch.randn(6, 24, generator=random)
                * 2.0 ** torch.randint(-spread, 1, (6, 24), generator=random)
            ).to(dtype)
            for _ in range(2)
        )
        a = a.bfloat16().to(dtype) if spread % 2 else a
        a[0], b[0] = 0.0, 1.0
        errors = sums._errors(a.double(), a, b.double(), b)
        for i, left in enumerate(a.tolist()):
            for j, right in enumerate(b.tolist()):
                products = [abs(Fraction(x) * Fraction(y)) for x, y in zip(left, right)]
                fits = sum(products) <= 2**53 * min(
                    (last_place(x) for x in left if x), default=Fraction(1)
                ) * min(last_place(y) for y in right if y)
                claimed = float(errors[0][i] * errors[1][j]) == 0
                assert fits or not claimed
                found.append((claimed, fits))
    assert (False, False) in found
    if dtype == torch.bfloat16:
        assert sum(claimed for claimed, _ in found) > 100


@pytest.mark.slow
@given(
    st.floats(-3e38, 3e38, allow_nan=False),
    st.integers(-60, -8),
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, -1, 5, -5, 100]),
)
@settings(max_examples=600, deadline=None)
def test_no_boundary_is_missed(value: float, power: int, dtype: torch.dtype, nudge: int) -> None:
    """Numbers on a boundary and a few last places beside it, against roundings in rational
    arithmetic."""
    number = Fraction(rounded(Fraction(value), dtype))
    unit = Fraction(2) ** (_exponent(number) - {torch.bfloat16: 8, torch.float32: 24}[dtype])
    x = float(number + unit)  # halfway to the next number
    x += nudge * math.ulp(x)
    error = max(abs(x) * 2.0**power, 2.0**-132)
    ends = [rounded(Fraction(x) + sign * Fraction(error), dtype) for sign in (-1, 1)]
    if ends[0] != ends[1]:
        at = torch.tensor([x], dtype=torch.float64)
        assert undecided(at, torch.tensor([error], dtype=torch.float64), dtype).shape == (1, 1)


def _exponent(number: Fraction) -> int:
    """Of the power of two that is not above the magnitude, as far as float32 has it."""
    return -126 if number == 0 else max(math.frexp(abs(float(number)))[1] - 1, -126)


def test_few_numbers_are_undecided() -> None:
    x = draw(10, 100_000, dtype=torch.float32).double() * 1.234567890123
    error = x.abs().amax() * 2.0**-45
    assert 0 < undecided(x, error, torch.float32).shape[0] < 100
    assert undecided(x, error, torch.bfloat16).shape[0] == 0
    assert undecided(x, torch.zeros(()).double(), torch.float32).shape[0] == 0

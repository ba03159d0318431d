"""Intervals against closed forms and simulation."""

import itertools
import math

import numpy as np
import pytest

from isobit.monitor.report.intervals import (
    bootstrap_mean,
    mean_interval,
    pass_at_k,
    proportion,
    student_quantile,
)


def test_wilson_known_values() -> None:
    estimate = proportion(8, 10)
    assert (estimate.value, estimate.prompts) == (0.8, 10)
    assert estimate.low == pytest.approx(0.490162, abs=1e-6)
    assert estimate.high == pytest.approx(0.943318, abs=1e-6)


def test_wilson_at_the_ends() -> None:
    assert proportion(0, 20).low == 0
    assert proportion(0, 20).high > 0.1
    assert proportion(20, 20).high == 1
    assert proportion(20, 20).low < 0.9


def test_wilson_covers_about_95_percent() -> None:
    generator = np.random.default_rng(0)
    covered = [proportion(int(c), 50) for c in generator.binomial(50, 0.3, 4000)]
    assert 0.93 < np.mean([e.low <= 0.3 <= e.high for e in covered]) < 0.975


@pytest.mark.parametrize(
    ("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (8, 1, 4), (8, 0, 8), (6, 6, 2), (6, 4, 3)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(
        sum(any(s) for s in subsets) / len(subsets), abs=1e-12
    )


def test_the_bootstrap_repeats_and_has_the_standard_errors_width() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400).tolist()
    estimate = bootstrap_mean(values)
    assert estimate == bootstrap_mean(values)
    assert (estimate.value, estimate.prompts) == (pytest.approx(np.mean(values)), 400)
    half = 1.96 * np.std(values) / 20
    assert estimate.low == pytest.approx(np.mean(values) - half, abs=0.1 * half)
    assert estimate.high == pytest.approx(np.mean(values) + half, abs=0.1 * half)


def test_the_bootstrap_of_many_prompts_is_drawn_in_parts() -> None:
    estimate = bootstrap_mean([0.0, 1.0] * 200_000, resamples=60)
    assert estimate.value == 0.5
    assert 0.49 < estimate.low < 0.5 < estimate.high < 0.51


def student_within(bound: float, degrees: int) -> float:
    """P(|t| <= bound), by integrating Student's density numerically."""
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(
        degrees * math.pi
    )
    nodes, weights = np.polynomial.legendre.leggauss(400)
    points = bound / 2 * (nodes + 1)
    return float(
        bound * constant * np.sum(weights * (1 + points**2 / degrees) ** (-(degrees + 1) / 2))
    )


@pytest.mark.slow
def test_95_percent_of_students_t_is_within_the_quantile_at_every_number_of_degrees() -> None:
    for degrees in [*range(1, 33), 100, 200, 201, 300, 1000]:
        assert student_within(student_quantile(degrees), degrees) == pytest.approx(
            0.95, abs=1e-10
        ), degrees


def test_other_shares_of_students_t() -> None:
    for degrees, level in itertools.product((1, 4, 29, 200, 300), (0.5, 0.9, 0.99, 0.999)):
        bound = student_quantile(degrees, level)
        if degrees > 1:  # the tail of one degree is too long for the numerical integral
            assert student_within(bound, degrees) == pytest.approx(level, abs=1e-8), (
                degrees,
                level,
            )
    assert round(student_quantile(29, 0.99), 3) == 2.756  # of any table
    assert round(student_quantile(1, 0.9), 3) == 6.314


def test_students_quantiles_fall_to_the_normal_one_without_reaching_it() -> None:
    quantiles = [student_quantile(degrees) for degrees in range(1, 1000)]
    assert all(before > after for before, after in itertools.pairwise(quantiles))
    assert quantiles[-1] > 1.959963984540054
    assert student_quantile(10**9) == pytest.approx(1.959963984540054, abs=1e-8)


def test_students_quantiles_of_the_printed_tables() -> None:
    """To the three digits of any table; 16 degrees are those of 17 values."""
    printed = {
        1: 12.706,
        2: 4.303,
        5: 2.571,
        10: 2.228,
        16: 2.120,
        17: 2.110,
        20: 2.086,
        30: 2.042,
        60: 2.000,
        120: 1.980,
    }
    assert {degrees: round(student_quantile(degrees), 3) for degrees in printed} == printed


def test_the_interval_of_17_values_is_students() -> None:
    values = np.random.default_rng(0).normal(3, 2, 17).tolist()
    mean, low, high = mean_interval(values)
    half = 2.1199 * np.std(values, ddof=1) / math.sqrt(17)
    assert (mean - low, high - mean) == (
        pytest.approx(half, rel=1e-4),
        pytest.approx(half, rel=1e-4),
    )

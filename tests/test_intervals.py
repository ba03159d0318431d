"""Intervals against closed forms and simulation."""

import itertools

import numpy as np
import pytest

from isobit.intervals import bootstrap_mean, pass_at_k, proportion


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


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (8, 1, 4), (8, 0, 8), (6, 6, 2), (6, 4, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets), abs=1e-12)


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

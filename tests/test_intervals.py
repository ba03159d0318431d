"""Intervals against closed forms and simulation."""

import itertools

import numpy as np
import pytest

from isobit.intervals import pass_at_k, pass_at_k_estimate, proportion


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


def test_pass_at_k_estimate_repeats_and_brackets() -> None:
    first = pass_at_k_estimate([0, 4, 8, 2] * 10, 8, 2)
    assert first == pass_at_k_estimate([0, 4, 8, 2] * 10, 8, 2)
    assert first.low < first.value < first.high

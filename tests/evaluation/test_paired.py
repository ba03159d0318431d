"""Paired tests against closed forms, a textbook's table, enumeration, and their error rate where
there is no difference."""

import itertools
import math

import numpy as np
import pytest

from isobit.evaluation.paired import DRAWS, EXACT_PAIRS, mcnemar, sign_flip
from isobit.monitor.report.intervals import bootstrap_mean


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 6, 2 / 2**6),
        (1, 9, 2 * (1 + 10) / 2**10),
        (2, 8, 2 * (1 + 10 + 45) / 2**10),
        (6, 16, 2 * sum(math.comb(22, i) for i in range(7)) / 2**22),
        (
            150,
            86,
            3.716e-05,
        ),  # Agresti, Categorical Data Analysis: approval of the Prime Minister; chi-squared 17.36
    ],
)
def test_mcnemar_known_values(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p, rel=1e-3)
    assert mcnemar(only_second, only_first) == mcnemar(only_first, only_second)


def test_mcnemar_approaches_its_chi_squared() -> None:
    """erfc(sqrt(x / 2)) is the chi-squared tail of one degree of freedom; with the continuity
    correction."""
    for first, second in ((120, 80), (1050, 950), (5200, 4800)):
        statistic = (abs(first - second) - 1) ** 2 / (first + second)
        assert mcnemar(first, second) == pytest.approx(
            math.erfc(math.sqrt(statistic / 2)), rel=0.03
        )


def test_sign_flip_enumerates_small_samples() -> None:
    differences = [0.5, -0.25, 0.125, 0.0, 0.75, 0.3]
    flipped = [
        sum(s * d for s, d in zip(signs, differences))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    as_far = sum(abs(total) >= abs(sum(differences)) - 1e-12 for total in flipped)
    assert sign_flip(differences) == as_far / len(flipped)


def test_sign_flip_of_wins_and_losses_is_mcnemar() -> None:
    """With differences of 1 and -1 the two tests are one: exactly where signs are enumerated,
    nearly where drawn."""
    assert sign_flip([1.0] * 8 + [-1.0] * 2 + [0.0] * 30) == mcnemar(8, 2)
    drawn = sign_flip([1.0] * 26 + [-1.0] * 14)
    exact = mcnemar(26, 14)
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / DRAWS))
    assert drawn == sign_flip([1.0] * 26 + [-1.0] * 14)


def test_sign_flip_at_its_ends() -> None:
    assert sign_flip([0.0] * 5) == 1.0
    assert sign_flip([]) == 1.0
    assert sign_flip([1.0] * EXACT_PAIRS) == 2 / 2**EXACT_PAIRS
    assert sign_flip([1.0] * 200) == 1 / (DRAWS + 1)


def test_under_the_null_few_p_values_are_small() -> None:
    """Two models of the same chances: p <= 0.05 in at most 5 % of 2,000 experiments (and the tests
    are not asleep)."""
    generator = np.random.default_rng(1)
    hardness = generator.random(60)
    found: dict[str, list[float]] = {"mcnemar": [], "sign_flip": []}
    for _ in range(2000):
        first, second = (generator.random(60) < hardness for _ in range(2))
        found["mcnemar"].append(mcnemar(int((first & ~second).sum()), int((~first & second).sum())))
    for _ in range(400):
        first, second = (generator.binomial(4, hardness[:20]) / 4 for _ in range(2))
        found["sign_flip"].append(sign_flip((first - second).tolist()))
    assert 0.005 < np.mean(np.array(found["mcnemar"]) <= 0.05) <= 0.05
    assert (
        0.01
        < np.mean(np.array(found["sign_flip"]) <= 0.05)
        <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)
    )


def test_a_real_difference_is_found() -> None:
    generator = np.random.default_rng(2)
    better, worse = generator.random((50, 400)) < 0.6, generator.random((50, 400)) < 0.5
    found = [mcnemar(int((b & ~w).sum()), int((~b & w).sum())) for b, w in zip(better, worse)]
    assert np.mean(np.array(found) <= 0.05) > 0.7


def test_the_paired_bootstrap_covers_about_95_percent() -> None:
    generator = np.random.default_rng(3)
    covered = []
    for _ in range(300):
        shared = generator.random(80)
        first, second = (generator.random(80) < 0.8 * shared + shift for shift in (0.2, 0.1))
        estimate = bootstrap_mean((first.astype(float) - second).tolist(), resamples=500)
        covered.append(estimate.low <= 0.1 <= estimate.high)
    assert 0.91 < np.mean(covered) < 0.985

"""maj@k against enumeration of every ordered choice, closed forms, and simulation of fresh
samples."""

import itertools
from collections import Counter

import numpy as np
import pytest

from isobit.evaluation.majority import LARGEST_GROUP, majority_at_k


def vote(answers: tuple[str | None, ...], correct: tuple[bool, ...]) -> bool:
    """The definition: the most frequent answer, the first one given where several are; right as its
    first completion."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return False
    winner = max(counts, key=lambda answer: (counts[answer], -answers.index(answer)))
    return correct[answers.index(winner)]


@pytest.mark.parametrize(
    ("answers", "correct"),
    [
        ("aabbc", "11000"),
        ("aabbc", "00110"),
        ("abcde", "10000"),
        ("aaaaa", "11111"),
        ("ab???", "10000"),
        ("?????", "00000"),
        ("aaabbc", "101000"),  # one answer, two rewards
        ("aabbcc", "110011"),
    ],
)
def test_the_mean_over_every_ordered_choice(answers: str, correct: str) -> None:
    given = [None if a == "?" else a for a in answers]
    passed = [c == "1" for c in correct]
    ks = list(range(1, len(answers) + 1))
    found = majority_at_k(given, passed, ks)
    for k in ks:
        orders = [
            vote(tuple(given[i] for i in order), tuple(passed[i] for i in order))
            for order in itertools.permutations(range(len(answers)), k)
        ]
        assert found[k] == pytest.approx(sum(orders) / len(orders), abs=1e-12)


def test_one_sample_is_its_own_majority() -> None:
    assert majority_at_k(["a", "b", "b", "c"], [False, True, True, False], [1]) == {1: 0.5}


def test_the_order_of_the_samples_does_not_matter() -> None:
    first = majority_at_k(["a", "b", "b", "c"], [True, False, False, False], [2, 3, 4])
    assert first == majority_at_k(["c", "b", "a", "b"], [False, False, True, False], [2, 3, 4])


def test_it_is_unbiased_for_fresh_samples() -> None:
    """The mean of maj@3 from groups of 7 is the probability that 3 fresh samples vote right: 0.6
    right, two wrong answers of 0.2. Votes of 3 that are right: 3 of 3, 2 of 3, and a third of the
    ties of three."""
    generator = np.random.default_rng(0)
    groups = generator.choice(3, (3000, 7), p=[0.6, 0.2, 0.2])
    found = [
        majority_at_k([str(a) for a in group], [a == 0 for a in group], [3])[3] for group in groups
    ]
    exact = 0.6**3 + 3 * 0.6**2 * 0.4 + 6 * 0.6 * 0.2 * 0.2 / 3
    assert np.mean(found) == pytest.approx(exact, abs=4 * np.std(found) / len(found) ** 0.5)


def test_large_groups_stay_finite() -> None:
    half = LARGEST_GROUP // 2
    answers = ["a"] * half + [None] * half
    found = majority_at_k(answers, [True] * half + [False] * half, [4, 16])
    missed = 1.0
    for i in range(4):
        missed *= (half - i) / (LARGEST_GROUP - i)
    assert found[4] == pytest.approx(1 - missed)
    assert found[16] > 0.9999

"""Advantages against their textbook values, and the cases that other implementations got wrong."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.rl.algorithm.advantages import has_spread, overlong_penalty
from tests.rl.helpers import group_advantages

GROUP_KINDS = ("grpo", "dr_grpo", "rloo")

_REWARDS = st.lists(st.none() | st.floats(-100, 100), max_size=12)


def close(left: list[float | None], right: list[float | None]) -> bool:
    return all(
        a is b if a is None or b is None else math.isclose(a, b, rel_tol=1e-4)
        for a, b in zip(left, right)
    )


@pytest.mark.parametrize(
    ("kind", "lone", "others"),
    [
        # the sample's deviation is sqrt(16 p (1 - p) / 15) = 1/4 at p = 1/16
        ("grpo", 3.75, -0.25),
        ("dr_grpo", 15 / 16, -1 / 16),
        ("rloo", 1.0, -1 / 15),
    ],
)
def test_lone_success_and_lone_failure_of_sixteen(kind: str, lone: float, others: float) -> None:
    """A leave-one-out deviation would give the lone success +1.0; GRPO's is 3.75."""
    success = group_advantages([0.0] * 5 + [1.0] + [0.0] * 10, kind)
    assert close(success, [others] * 5 + [lone] + [others] * 10)
    failure = group_advantages([1.0] * 5 + [0.0] + [1.0] * 10, kind)
    assert close(failure, [-others] * 5 + [-lone] + [-others] * 10)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [d / math.sqrt(5 / 3) for d in (-1.5, -0.5, 0.5, 1.5)]),
        ("dr_grpo", [-1.5, -0.5, 0.5, 1.5]),
        ("rloo", [0 - 2, 1 - 5 / 3, 2 - 4 / 3, 3 - 1]),
    ],
)
def test_four_rewards_by_hand(kind: str, expected: list[float]) -> None:
    assert close(group_advantages([0.0, 1.0, 2.0, 3.0], kind), list(expected))


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize(
    "rewards", [[0.1] * 7, [0.0, 0.0], [1e30] * 3, [0.3], [-2.5, None, -2.5], []]
)
def test_equal_rewards_have_exactly_no_advantage(kind: str, rewards: list[float | None]) -> None:
    """0.1 summed seven times and divided by 7 is not 0.1, so that subtracting the mean is not
    enough."""
    assert group_advantages(rewards, kind) == [None if r is None else 0.0 for r in rewards]


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_unscored_samples_are_outside_the_baseline(kind: str) -> None:
    with_gaps = group_advantages([None, 1.0, None, 0.0, 3.0], kind)
    without = group_advantages([1.0, 0.0, 3.0], kind)
    assert with_gaps == [None, without[0], None, without[1], without[2]]
    assert (
        group_advantages([0.0, 1.0, 0.0, 0.0, 3.0], kind)[1] != without[0]
    )  # scored 0, they would be inside
    assert group_advantages([None, None], kind) == [None, None]
    assert group_advantages([None, 5.0], kind) == [None, 0.0]


@pytest.mark.parametrize("kind", GROUP_KINDS)
@given(rewards=_REWARDS)
def test_advantages_are_finite_centred_and_ordered(kind: str, rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards, kind)
    scored = [(r, a) for r, a in zip(rewards, advantages) if r is not None and a is not None]
    assert [a is None for a in advantages] == [r is None for r in rewards]
    assert all(math.isfinite(a) for _, a in scored)
    assert abs(sum(a for _, a in scored)) < 1e-9 * (
        1 + max((abs(a) for _, a in scored), default=0) * 1e3
    )
    assert all(a <= b for (r, a) in scored for (s, b) in scored if r <= s)


def test_noise_in_the_last_bit_is_not_made_large() -> None:
    advantages = group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], "grpo")
    assert all(a is not None and abs(a) < 1e-9 for a in advantages)


def test_spread_is_a_property_of_the_group() -> None:
    assert has_spread([0.0] * 15 + [1.0])  # the lone success is kept
    assert has_spread([1.0] * 15 + [0.0])
    assert has_spread([None, 0.0, 1.0])
    assert not has_spread([1.0, 1.0, None])
    assert not has_spread([None, 1.0])
    assert not has_spread([None])
    assert not has_spread([])


def test_overlong_penalty_falls_linearly_over_the_buffer() -> None:
    penalties = [overlong_penalty(length, 100, 20) for length in (0, 79, 80, 81, 90, 99, 100, 120)]
    assert penalties == pytest.approx([0, 0, 0, -0.05, -0.5, -0.95, -1, -1])
    assert overlong_penalty(90, 100, 20, penalty=0.4) == pytest.approx(-0.2)
    assert overlong_penalty(100, 100, 0) == 0

"""Advantages against their textbook values, and the cases that other implementations got wrong."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.errors import IsobitError
from isobit.rl import ResolvedObjective
from isobit.rl.algorithm.advantages import AdvantageInputs, has_spread, overlong_penalty
from isobit.rl.algorithm.functions import ADVANTAGES
from tests.rl.helpers import group_advantages

GROUP_KINDS = ("grpo", "grpo_batch", "dr_grpo", "rloo")

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


Rewards = Sequence[Sequence[float | None]]


def advantages_of(
    kind: str, rewards: Rewards, lengths: Sequence[Sequence[int]] | None = None
) -> list[list[float | None]]:
    """Of groups; `lengths` in tokens, 1 where it says nothing, without penalties."""
    sizes = lengths or [[1] * len(row) for row in rewards]
    penalties = [[(0.0,) * n for n in row] for row in sizes]
    found = ADVANTAGES[kind](AdvantageInputs(rewards, penalties, [], ResolvedObjective()))
    return [list(row) for row in found]  # type: ignore[arg-type]


def as_table(rows: Rewards) -> torch.Tensor:
    """With NaN for None, float64."""
    return torch.tensor(
        [[math.nan if x is None else x for x in row] for row in rows], dtype=torch.float64
    )


def test_the_deviation_of_a_batch_is_trls() -> None:
    """trl/trainer/grpo_trainer.py, `scale_rewards="batch"`: nanstd over all rewards, with n - 1; an
    unscored completion is in neither; 1e-6 in place of its 1e-4, as for `grpo`. The control is the
    deviation of each group."""
    rewards = [[0.0, 1.0, 0.5, None], [2.0, 2.0, 9.0, -1.0], [3.0, 3.0, 3.0, 3.0], [None] * 4]
    table = as_table(rewards)
    centred = table - table.nanmean(dim=1, keepdim=True)
    theirs = centred / (table[~table.isnan()].std() + 1e-6)
    found, grouped = (as_table(advantages_of(kind, rewards)) for kind in ("grpo_batch", "grpo"))
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-15, equal_nan=True)
    assert not any(torch.allclose(found[i, :3], grouped[i, :3], rtol=1e-2) for i in (0, 1))
    assert found[2].tolist() == [0.0] * 4
    assert advantages_of("grpo_batch", [[1.0, 1.0], [1.0, 1.0]]) == [[0.0, 0.0]] * 2


def test_opo_is_verls() -> None:
    """verl/trainer/ppo/core_algos.py, `compute_opo_outcome_advantage`: the reward less the sum of
    reward times length over the sum of lengths. The controls are the plain mean and lengths that
    are all one."""
    draw = random.Random(0)
    rewards = [[draw.uniform(-1, 2) for _ in range(5)] for _ in range(4)]
    lengths = [[draw.randint(1, 30) for _ in range(5)] for _ in range(4)]
    found = advantages_of("opo", rewards, lengths)
    for row, values, sizes in zip(found, rewards, lengths, strict=True):
        scores, tokens = torch.tensor(values).double(), torch.tensor(sizes).double()
        baseline = (tokens * scores).sum() / tokens.sum()
        assert row == pytest.approx((scores - baseline).tolist(), rel=1e-6)
        # what makes it the best one: over tokens the advantages add to 0
        assert sum(n * a for n, a in zip(sizes, row, strict=True) if a is not None) == (
            pytest.approx(0, abs=1e-9)
        )
    assert found != advantages_of("dr_grpo", rewards, lengths)
    same = advantages_of("opo", rewards, [[7] * 5] * 4)
    for row, other in zip(same, advantages_of("dr_grpo", rewards), strict=True):
        assert row == pytest.approx(other, rel=1e-9)
    gaps = advantages_of("opo", [[None, 1.0, 0.0]], [[100, 3, 1]])
    assert gaps == [[None, 0.25, -0.75]]
    assert advantages_of("opo", [[0.1] * 7, [0.0, 1.0]], [[2] * 7, [0, 0]]) == [
        [0.0] * 7,
        [0.0, 0.0],
    ]


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
def test_the_mean_of_maxrls_gradient_is_its_theorems(chance: float, count: int) -> None:
    """arXiv 2602.02710, of groups of n completions that succeed with chance p: by summing over all
    outcomes, the mean of advantage times score is Σ_{k < n - 1} (1 - p)^k times the gradient of p,
    the first n - 1 terms of the gradient of log p. Dr. GRPO's is (1 - 1/n) times that of p, the
    control."""
    slope = chance * (1 - chance)  # of p by the logit
    means = {}
    for kind in ("maxrl", "dr_grpo"):
        total = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=count):
            successes = int(sum(outcome))
            likely = chance**successes * (1 - chance) ** (count - successes)
            (row,) = advantages_of(kind, [outcome])
            gradient = sum(a * (r - chance) for a, r in zip(row, outcome, strict=True) if a)
            total += likely * gradient / count
        means[kind] = total
    terms = sum((1 - chance) ** k for k in range(count - 1))
    assert means["maxrl"] == pytest.approx(terms * slope, rel=1e-9)
    assert means["dr_grpo"] == pytest.approx((1 - 1 / count) * slope, rel=1e-9)


def test_maxrl_by_hand_and_what_it_refuses() -> None:
    assert advantages_of("maxrl", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]) == [
        pytest.approx([3.0, -1.0, -1.0, -1.0]),
        pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0]),
    ]
    assert advantages_of("maxrl", [[0.0, 0.0], [1.0, 1.0], [None, 2.0]]) == [
        [0.0, 0.0],
        [0.0, 0.0],
        [None, 0.0],
    ]
    with pytest.raises(IsobitError, match=r"expected rewards of 0 and more, got -0\.5$"):
        advantages_of("maxrl", [[1.0, 0.0], [-0.5, None]])

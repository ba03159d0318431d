"""REINFORCE++ against the formulas of verl and NeMo RL, restated here on padded batches; and what
they leave out."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.rl import Objective
from isobit.rl.algorithm.advantages import AdvantageInputs
from isobit.rl.algorithm.functions import ADVANTAGES
from isobit.rl.algorithm.token_advantages import _rewards_to_go

TOKEN_KINDS = ("reinforce_pp", "reinforce_pp_baseline")

GROUPS = [[(1.0, 5), (0.0, 2), (0.5, 7)], [(0.0, 3), (0.0, 4), (2.0, 1)], [(0.7, 2)]]
"""Outcome and tokens of each completion; the last group has one."""


@dataclass(frozen=True)
class TokenRewards:
    """Of one completion: its outcome, and the penalty of each token."""

    outcome: float
    penalties: tuple[float, ...]

    @property
    def total(self) -> float:
        return self.outcome - math.fsum(self.penalties)


def token_advantages(
    groups: list[list[TokenRewards | None]], kind: str, discount: float = 1.0
) -> Any:
    inputs = AdvantageInputs(
        rewards=[[None if r is None else r.outcome for r in group] for group in groups],
        penalties=[[() if r is None else r.penalties for r in group] for group in groups],
        groups=[],
        settings=Objective(discount=discount),
    )
    return ADVANTAGES[kind](inputs)


def rewards(beta: float = 0.3) -> list[list[TokenRewards | None]]:
    generator = torch.Generator().manual_seed(0)

    def penalties(length: int) -> tuple[float, ...]:
        return tuple(
            (beta * torch.randn(length, generator=generator, dtype=torch.float64)).tolist()
        )

    return [
        [TokenRewards(outcome, penalties(length)) for outcome, length in group] for group in GROUPS
    ]


def padded(groups: list[list[TokenRewards | None]]) -> tuple[Tensor, Tensor]:
    """Token-level rewards [samples, longest] as verl has them, after `apply_kl_penalty`, and the
    mask."""
    samples = [r for group in groups for r in group if r is not None]
    longest = max(len(r.penalties) for r in samples)
    token_rewards, mask = torch.zeros(2, len(samples), longest, dtype=torch.float64)
    for i, sample in enumerate(samples):
        length = len(sample.penalties)
        mask[i, :length] = 1
        token_rewards[i, :length] = -torch.tensor(sample.penalties, dtype=torch.float64)
        token_rewards[i, length - 1] += sample.outcome
    return token_rewards, mask


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """verl/utils/torch_functional.py, `masked_whiten`."""
    count = mask.sum()
    mean = (values * mask).sum() / (count + 1e-8)
    variance = ((values - mean) ** 2 * mask).sum() / (count + 1e-8) * count / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def verl(groups: list[list[TokenRewards | None]], kind: str, gamma: float) -> Tensor:
    """verl/trainer/ppo/core_algos.py, `compute_reinforce_plus_plus_outcome_advantage` and
    `compute_reinforce_plus_plus_baseline_outcome_advantage`."""
    token_rewards, mask = padded(groups)
    if kind == "reinforce_pp":
        returns = torch.zeros_like(token_rewards)
        running = torch.zeros(len(mask), dtype=torch.float64)
        for t in reversed(range(mask.shape[1])):
            new = token_rewards[:, t] + gamma * running
            returns[:, t] = new * mask[:, t]
            running = new * mask[:, t] + running * (1 - mask[:, t])
        return whitened(returns, mask)
    scores, begin = token_rewards.sum(-1), 0
    for group in groups:
        end = begin + len(group)
        scores[begin:end] -= scores[begin:end].mean() if len(group) > 1 else 0.0
        begin = end
    return whitened(scores.unsqueeze(-1) * mask, mask)


def flat(found: list[list[tuple[float, ...] | None]]) -> list[float]:
    return [value for group in found for row in group if row is not None for value in row]


def close(found: list[float], theirs: Tensor, mask: Tensor) -> bool:
    return found == pytest.approx(theirs[mask.bool()].tolist(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_advantages_are_verls(kind: str, gamma: float) -> None:
    """With a KL in the reward and without; the controls normalize over samples, and charge each
    token the whole KL."""
    for beta in (0.0, 0.3):
        groups = rewards(beta)
        _, mask = padded(groups)
        found = flat(token_advantages(groups, kind, gamma))
        assert close(found, verl(groups, kind, gamma), mask)
        totals = torch.tensor(
            [r.total for group in groups for r in group if r is not None], dtype=torch.float64
        )
        of_samples = ((totals - totals.mean()) / totals.std()).unsqueeze(-1) * mask
        assert not close(found, of_samples, mask)
        summed = whitened(totals.unsqueeze(-1) * mask, mask)
        assert close(found, summed, mask) is (kind == "reinforce_pp" and gamma == 1 and beta == 0)


def test_the_baseline_is_nemo_rls_without_a_kl_in_the_reward() -> None:
    """nemo_rl/algorithms/advantage_estimator.py, `ReinforcePlusPlusAdvantageEstimator` with
    `minus_baseline`: its variance is over n. With a KL in the reward it charges each token its own,
    and differs (docs/from-nemo-rl.md)."""

    def theirs(groups: list[list[TokenRewards | None]]) -> tuple[Tensor, Tensor]:
        token_rewards, mask = padded(groups)
        outcomes = [
            torch.tensor([r.outcome for r in group if r is not None], dtype=torch.float64)
            for group in groups
        ]
        own = torch.cat([row - row.mean() for row in outcomes]).unsqueeze(-1).expand(mask.shape)
        charged = torch.zeros_like(token_rewards)
        for i, r in enumerate(r for group in groups for r in group if r is not None):
            charged[i, : len(r.penalties)] = torch.tensor(r.penalties, dtype=torch.float64)
        advantages = own - charged
        mean = (advantages * mask).sum() / mask.sum()
        variance = ((advantages - mean) ** 2 * mask).sum() / mask.sum()
        return (advantages - mean) * variance.clamp(min=1e-8).rsqrt(), mask

    count = sum(length for group in GROUPS[:2] for _, length in group)
    for beta, equal in ((0.0, True), (0.3, False)):
        groups = rewards(beta)[:2]  # a group of one is without effect there
        expected, mask = theirs(groups)
        found = flat(token_advantages(groups, "reinforce_pp_baseline"))
        assert close(found, expected * math.sqrt((count - 1) / count), mask) is equal


def test_by_hand() -> None:
    """Returns 1 and 1, and 0: over three tokens their mean is 2/3 and their deviation sqrt(1/3)."""
    groups: list[list[TokenRewards | None]] = [
        [TokenRewards(1.0, (0.0, 0.0)), None],
        [TokenRewards(0.0, (0.0,))],
    ]
    found = token_advantages(groups, "reinforce_pp")
    up, down = (1 / 3) / math.sqrt(1 / 3), (-2 / 3) / math.sqrt(1 / 3)
    assert found[0][0] == pytest.approx((up, up))
    assert found[0][1] is None
    assert found[1][0] == pytest.approx((down,))
    assert _rewards_to_go(1.0, (0.25, 0.5), 0.5) == [-0.25 + 0.5 * 0.5, 0.5]


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_lone_success_and_lone_failure(kind: str) -> None:
    """Of 16 completions of one token, in one group: the deviation is 1/4."""
    for lone, others in ((1.0, 0.0), (0.0, 1.0)):
        group: list[TokenRewards | None] = [
            TokenRewards(lone if i == 5 else others, (0.0,)) for i in range(16)
        ]
        found, sign = flat(token_advantages([group], kind)), 1 if lone else -1
        assert found[5] == pytest.approx(sign * 3.75, rel=1e-5)
        assert found[:5] + found[6:] == pytest.approx([-sign * 0.25] * 15, rel=1e-5)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_what_cannot_be_normalized_is_exactly_zero(kind: str) -> None:
    """Equal rewards, one token, none; an empty completion has no token, and its place."""
    equal: list[list[TokenRewards | None]] = [
        [TokenRewards(0.1, (0.0,) * 3), TokenRewards(0.1, (0.0,))]
    ]
    assert token_advantages(equal, kind) == [[(0.0,) * 3, (0.0,)]]
    assert token_advantages([[TokenRewards(3.0, (0.5,))]], kind) == [[(0.0,)]]
    assert token_advantages([[TokenRewards(1.0, ()), None], []], kind) == [[(), None], []]


def test_credit_of_equal_groups_is_the_difference_between_the_two() -> None:
    """Groups of equal rewards have credit without a baseline, and none with it."""
    groups: list[list[TokenRewards | None]] = [[TokenRewards(r, (0.0,))] * 2 for r in (0.0, 1.0)]
    assert flat(token_advantages(groups, "reinforce_pp")) != [0.0] * 4
    assert flat(token_advantages(groups, "reinforce_pp_baseline")) == [0.0] * 4

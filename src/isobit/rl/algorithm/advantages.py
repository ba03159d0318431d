"""Advantages of completions from the rewards of their group (GRPO, Dr. GRPO, RLOO, OPO, MaxRL);
which groups teach anything.

An advantage is a function of `AdvantageInputs`: those here, those of tokens
(`token_advantages.py`), and a user's own (`functions.py`). An unscored completion (reward None) has
no advantage and no part in its group's baseline. Equal rewards give exactly 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isobit.errors import IsobitError
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.samples import Group

_EPS = 1e-6

Advantage = float | Sequence[float]
"""Of a completion: one number for all of its tokens, or one for each trained token."""
Advantages = Sequence[Sequence[Advantage | None]]
"""Of groups and their completions; None where the reward is None."""


@dataclass(frozen=True)
class AdvantageInputs:
    """The groups of a step, from which advantages are computed.

    rewards: [groups][completions], None where a completion was not scored: the sum of the reward
    functions by weight, with the penalty of overlong completions; under `decoupled_rewards` of one
    reward function after another. penalties: [groups][completions][trained tokens], what the KL to
    the reference takes from each, else 0. groups: the samples of these completions, with their
    tokens and the reward of each function. settings: the objective. logit_norms: as penalties, of
    each trained token its `token_advantages.squared_norms`, where the advantage weighs places.
    """

    rewards: Sequence[Sequence[float | None]]
    penalties: Sequence[Sequence[Sequence[float]]]
    groups: Sequence[Group]
    settings: ResolvedObjective
    logit_norms: Sequence[Sequence[Sequence[float]]] | None = None

    def totals(self) -> list[list[float | None]]:
        """Return the rewards less the penalties of all tokens."""
        return [
            [
                None if reward is None else reward - math.fsum(taken)
                for reward, taken in zip(row, penalties, strict=True)
            ]
            for row, penalties in zip(self.rewards, self.penalties, strict=True)
        ]


AdvantageFunction = Callable[[AdvantageInputs], Advantages]


def grpo(inputs: AdvantageInputs) -> Advantages:
    """Compute (r - mean) / (std + 1e-6) (Shao et al. 2024, arXiv 2402.03300, section 4.1.2), with
    the sample's standard deviation (n - 1), as the field's trainers take it."""

    def factor(scored: Sequence[float], mean: float) -> float:
        return 1.0 / (_deviation(scored, mean) + _EPS)

    return [_centred(row, factor) for row in inputs.totals()]


def grpo_batch(inputs: AdvantageInputs) -> Advantages:
    """Compute (r - mean of the group) / (std over all groups of the step + 1e-6): easy and hard
    prompts weigh alike (TRL's `scale_rewards="batch"`; Liu et al. 2025, arXiv 2508.08221)."""
    totals = inputs.totals()
    scored = [reward for row in totals for reward in row if reward is not None]
    if not has_spread(scored):
        return [[None if reward is None else 0.0 for reward in row] for row in totals]
    scale = 1.0 / (_deviation(scored, math.fsum(scored) / len(scored)) + _EPS)
    return [_centred(row, lambda of_group, mean: scale) for row in totals]


def dr_grpo(inputs: AdvantageInputs) -> Advantages:
    """Compute r - mean (Liu et al. 2025, arXiv 2503.20783)."""
    return [_centred(row, lambda scored, mean: 1.0) for row in inputs.totals()]


def rloo(inputs: AdvantageInputs) -> Advantages:
    """Compute r - mean of the others (Ahmadian et al. 2024, arXiv 2402.14740), which is (r - mean
    of all) · n / (n - 1)."""
    return [
        _centred(row, lambda scored, mean: len(scored) / (len(scored) - 1))
        for row in inputs.totals()
    ]


def opo(inputs: AdvantageInputs) -> Advantages:
    """Compute r - Σ l·r / Σ l, l the number of trained tokens: the baseline of least variance where
    the squared gradient of a completion grows with its length (Hao et al. 2025, arXiv
    2505.23585)."""
    advantages: list[list[float | None]] = []
    for row, penalties in zip(inputs.totals(), inputs.penalties, strict=True):
        lengths = [len(taken) for taken in penalties]
        scored = [(n, r) for n, r in zip(lengths, row, strict=True) if r is not None]
        tokens = sum(n for n, _ in scored)
        if not has_spread(row) or not tokens:
            advantages.append([None if reward is None else 0.0 for reward in row])
            continue
        baseline = math.fsum(n * r for n, r in scored) / tokens
        advantages.append([None if reward is None else reward - baseline for reward in row])
    return advantages


def maxrl(inputs: AdvantageInputs) -> Advantages:
    """Compute (r - mean) / mean, 0 in a group without a success (Tajwar et al. 2026, arXiv
    2602.02710): of a group of n rewards 0 and 1 the gradient is, in the mean, that of the
    log-likelihood of a success to order n - 1 in the chance of failure. Raises IsobitError for a
    reward below 0."""
    totals = inputs.totals()
    least = min((r for row in totals for r in row if r is not None), default=0.0)
    if least < 0:
        raise IsobitError(
            f"algorithm.advantage: maxrl divides by the mean reward of a group: expected rewards "
            f"of 0 and more, got {least:.6g}"
        )
    return [_centred(row, lambda scored, mean: 1.0 / mean) for row in totals]


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((r - mean) ** 2 for r in values) / (len(values) - 1))


def _centred(
    rewards: Sequence[float | None], factor: Callable[[Sequence[float], float], float]
) -> list[float | None]:
    """Compute (r - mean) · factor(scored rewards, mean); 0 in a group of one scored completion, or
    of equal rewards."""
    if not has_spread(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    scored = [reward for reward in rewards if reward is not None]
    mean = math.fsum(scored) / len(scored)
    scale = factor(scored, mean)
    return [None if reward is None else (reward - mean) * scale for reward in rewards]


def has_spread(rewards: Sequence[float | None]) -> bool:
    """Return whether the scored rewards of a group differ: if not, no sample of it has a gradient.

    Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) keeps a group if this
    holds; it decides on the group, never on a sample.
    """
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) > 1 and min(scored) != max(scored)


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """Compute DAPO's soft penalty (section 3.4, eq. 13), added to the reward.

    0 up to `limit - buffer` tokens, falling linearly to -penalty at `limit`.
    """
    if buffer == 0:
        return 0.0
    excess = length - (limit - buffer)
    return -penalty * min(max(excess / buffer, 0.0), 1.0)

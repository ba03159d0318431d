"""Advantages of tokens, normalized over all tokens of a batch: REINFORCE++ with and without a baseline.

A completion is paid its outcome at the last token, and charged a penalty (a KL to the reference) at each. Formulas: Hu
et al. 2025, arXiv 2501.03262, as verl's `compute_reinforce_plus_plus_outcome_advantage` and
`compute_reinforce_plus_plus_baseline_outcome_advantage` write them (tests/rl/test_token_advantages.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

TOKEN_KINDS = ("reinforce_pp", "reinforce_pp_baseline")
_EPS = 1e-8


@dataclass(frozen=True)
class TokenRewards:
    """Of one completion: its `outcome`, and the `penalties` of its tokens, one for each."""

    outcome: float
    penalties: Sequence[float]

    def to_go(self, discount: float) -> list[float]:
        """Per token, the discounted sum of what is paid from it on."""
        paid = [-penalty for penalty in self.penalties]
        if paid:
            paid[-1] += self.outcome
        return list(accumulate(reversed(paid), lambda later, now: now + discount * later))[::-1]

    @property
    def total(self) -> float:
        return self.outcome - math.fsum(self.penalties)


def token_advantages(
    groups: Sequence[Sequence[TokenRewards | None]], kind: str, discount: float = 1.0
) -> list[list[tuple[float, ...] | None]]:
    """Per completion of each group, the advantages of its tokens; None for one that is not scored.

    reinforce_pp: the discounted rewards to go of each token. reinforce_pp_baseline: for all tokens the total, less the
    mean of the scored totals of its group (a group of one keeps its total). Then (x - mean) / sqrt(variance + 1e-8),
    both over the tokens of the whole batch, the variance over n - 1; where all are equal, exactly 0.
    """
    assert kind in TOKEN_KINDS
    values: list[list[float] | None] = []
    for group in groups:
        totals = [rewards.total for rewards in group if rewards is not None]
        baseline = math.fsum(totals) / len(totals) if len(totals) > 1 else 0.0
        for rewards in group:
            if rewards is None:
                values.append(None)
            elif kind == "reinforce_pp":
                values.append(rewards.to_go(discount))
            else:
                values.append([rewards.total - baseline] * len(rewards.penalties))
    flat = iter(_whitened([value for row in values if row is not None for value in row]))
    rows = iter([None if row is None else tuple(next(flat) for _ in row) for row in values])
    return [[next(rows) for _ in group] for group in groups]


def _whitened(values: Sequence[float]) -> list[float]:
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    wide = torch.tensor(values, dtype=torch.float64)
    centred = wide - wide.mean()
    found: list[float] = (centred / torch.sqrt(wide.var() + _EPS)).tolist()
    return found

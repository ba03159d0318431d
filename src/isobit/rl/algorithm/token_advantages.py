"""Advantages of tokens: REINFORCE++ with and without a baseline, normalized over all tokens of a
batch; and on-policy distillation.

The reward of a completion is paid at its last token; the penalty of each token (a KL to the
reference) is charged there. Formulas: Hu et al. 2025, arXiv 2501.03262, as verl's
`compute_reinforce_plus_plus_outcome_advantage` and
`compute_reinforce_plus_plus_baseline_outcome_advantage` write them
(tests/rl/test_token_advantages.py).
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from isobit.rl.algorithm.advantages import AdvantageInputs, Advantages

_EPS = 1e-8
_Rows = list[list[list[float] | None]]


def reinforce_pp(inputs: AdvantageInputs) -> Advantages:
    """The discounted sum of what is paid from each token on, normalized over the tokens of the
    batch."""
    return _whitened(
        [
            [
                None if reward is None else _rewards_to_go(reward, taken, inputs.settings.discount)
                for reward, taken in zip(row, penalties, strict=True)
            ]
            for row, penalties in zip(inputs.rewards, inputs.penalties, strict=True)
        ]
    )


def reinforce_pp_baseline(inputs: AdvantageInputs) -> Advantages:
    """For all tokens the total reward, less the mean of the scored totals of its group (a group of
    one keeps its total), normalized over the tokens of the batch."""
    values: _Rows = []
    for row, penalties in zip(inputs.totals(), inputs.penalties, strict=True):
        scored = [total for total in row if total is not None]
        baseline = math.fsum(scored) / len(scored) if len(scored) > 1 else 0.0
        values.append(
            [
                None if total is None else [total - baseline] * len(taken)
                for total, taken in zip(row, penalties)
            ]
        )
    return _whitened(values)


def distillation(inputs: AdvantageInputs) -> Advantages:
    """What the KL to the reference takes from each token, and nothing else: -c·(log policy - log
    teacher) under `kl_estimator` k1, where the reference is a teacher. Its mean over tokens that the
    policy samples is -c·KL(policy ‖ teacher), the reverse KL of each token, with no discount
    (Thinking Machines Lab 2025, "On-Policy Distillation"; the reverse KL of MiniLLM, Gu et al. 2023,
    arXiv 2306.08543, and GKD, Agarwal et al. 2023, arXiv 2306.13649). No reward has a part in it.
    The teacher of a self-distillation is shown more (`shown.py`); None where it was shown nothing:
    such a completion counts in no average, as SDPO masks it."""
    rows = zip(inputs.rewards, inputs.penalties, inputs.groups, strict=True)
    return [
        [
            None
            if reward is None or sample.reference_kl is None
            else tuple(-penalty for penalty in taken)
            for reward, taken, sample in zip(row, penalties, group, strict=True)
        ]
        for row, penalties, group in rows
    ]


def _rewards_to_go(reward: float, penalties: Sequence[float], discount: float) -> list[float]:
    paid = [-penalty for penalty in penalties]
    if paid:
        paid[-1] += reward
    return list(accumulate(reversed(paid), lambda later, now: now + discount * later))[::-1]


def _whitened(rows: _Rows) -> Advantages:
    """(x - mean) / sqrt(variance + 1e-8), both over the tokens of the whole batch, the variance
    over n - 1; where all are equal, exactly 0."""
    values = [value for row in rows for tokens in row if tokens is not None for value in tokens]
    if not values or min(values) == max(values):
        normalized = [0.0] * len(values)
    else:
        wide = torch.tensor(values, dtype=torch.float64)
        centred = wide - wide.mean()
        normalized = (centred / torch.sqrt(wide.var() + _EPS)).tolist()
    flat = iter(normalized)
    return [
        [None if tokens is None else tuple(next(flat) for _ in tokens) for tokens in row]
        for row in rows
    ]

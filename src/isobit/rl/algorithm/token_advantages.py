"""Advantages of tokens: REINFORCE++ with and without a baseline, normalized over all tokens of a
batch; the optimal token baseline; and on-policy distillation.

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
from torch import Tensor

from isobit.kernels.reference.sums import mean, total
from isobit.rl.algorithm.advantages import AdvantageInputs, Advantages

_EPS = 1e-8
_Rows = list[list[list[float] | None]]


def reinforce_pp(inputs: AdvantageInputs) -> Advantages:
    """Compute the discounted sum of what is paid from each token on, normalized over the tokens of
    the batch."""
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
    """Compute, for all tokens of a completion, its total reward less the mean of the scored totals
    of its group (a group of one keeps its total), normalized over the tokens of the batch."""
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


def squared_norms(logprobs: Tensor, halved: Tensor) -> Tensor:
    """Compute the squared norm of the gradient of each token's log-probability by the logits (over
    the temperature), [T] float64: 1 - 2·p + Σ p², where p is the token's probability and the sum is
    over the vocabulary.

    logprobs, halved: [T], log-probabilities at the temperature and at half of it. Half the
    temperature squares all odds, so that Σ p² = exp(2·logprobs - halved), and backends do not need
    an operator for it (tests/rl/test_optimal_baseline.py).
    """
    first, second = logprobs.double(), halved.double()
    return (1 - 2 * first.exp() + (2 * first - second).exp()).clamp(min=0)


def otb(inputs: AdvantageInputs) -> Advantages:
    """Compute what is paid from each token on, less the optimal token baseline (OTB; Li et al.
    2026, arXiv 2602.07078, as verl's `compute_optimal_token_baseline_advantage` has it; for several
    turns its `compute_multi_turn_optimal_token_baseline_advantage`, where places are counted over
    the tokens that are trained).

    At place t the baseline is Σ G·W / (Σ W + 1e-8) over the completions of a group that have such a
    token: G is what is paid from it on, W the sum of its `logit_norms` and of those before it. A
    group of one completion has no baseline, nor have places that only the longest completion
    reaches, so there the advantage is G itself. Where all G at a place are equal the advantage is
    exactly 0, which verl has up to its 1e-8. Tokens before and after the place have no other part
    in it.
    """
    assert inputs.logit_norms is not None
    rows = zip(inputs.rewards, inputs.penalties, inputs.logit_norms, strict=True)
    return [_less_baseline(*group) for group in rows]


def _less_baseline(
    rewards: Sequence[float | None],
    penalties: Sequence[Sequence[float]],
    norms: Sequence[Sequence[float]],
) -> list[tuple[float, ...] | None]:
    """Compute `otb` for one group. Completions are added one by one, so that no sum depends on
    threads."""
    wide = torch.float64
    returns = [
        None if paid is None else torch.tensor(_rewards_to_go(paid, taken, 1.0), dtype=wide)
        for paid, taken in zip(rewards, penalties, strict=True)
    ]
    lengths = sorted((len(row) for row in returns if row is not None), reverse=True)
    shared = lengths[1] if len(lengths) > 1 else 0
    paid, weight = torch.zeros(2, shared, dtype=wide)
    least, most = paid + math.inf, paid - math.inf
    for row, row_norms in zip(returns, norms, strict=True):
        if row is not None:
            energy = torch.tensor(list(row_norms), dtype=wide).cumsum(0)[:shared]
            span = slice(len(energy))
            paid[span] += row[span] * energy
            weight[span] += energy
            least[span] = torch.minimum(least[span], row[span])
            most[span] = torch.maximum(most[span], row[span])
    baseline = torch.where(least == most, least, paid / (weight + _EPS))
    return [
        None
        if row is None
        else (*(row[:shared] - baseline[: len(row)]).tolist(), *row[shared:].tolist())
        for row in returns
    ]


def distillation(inputs: AdvantageInputs) -> Advantages:
    """Return what the KL to the reference takes from each token, and nothing else: -c·(log policy -
    log teacher) under `kl_estimator` k1, where the reference is a teacher. Its mean over tokens
    that the policy samples is -c·KL(policy ‖ teacher), the reverse KL of each token, without a
    discount (Thinking Machines Lab 2025, "On-Policy Distillation"; the reverse KL of MiniLLM, Gu et
    al. 2023, arXiv 2306.08543, and GKD, Agarwal et al. 2023, arXiv 2306.13649). No reward has a
    part in it. The teacher of a self-distillation is shown more (`shown.py`); None where it was
    shown nothing: such a completion counts in no average, as SDPO masks it."""
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
    """Compute (x - mean) / sqrt(variance + 1e-8), both over the tokens of the whole batch, the
    variance over n - 1; where all are equal, exactly 0."""
    values = [value for row in rows for tokens in row if tokens is not None for value in tokens]
    if not values or min(values) == max(values):
        normalized = [0.0] * len(values)
    else:
        wide = torch.tensor(values, dtype=torch.float64)
        centred = wide - mean(wide)
        variance = total(centred * centred) / (len(values) - 1)
        normalized = (centred / math.sqrt(variance + _EPS)).tolist()
    flat = iter(normalized)
    return [
        [None if tokens is None else tuple(next(flat) for _ in tokens) for tokens in row]
        for row in rows
    ]

"""Importance weights and rejection where the policy that sampled differs from the learner's.

Weights and rejections of a rule (`correction_rule.py`) multiply the loss of each token and carry no
gradient. Rejected tokens stay in the denominator of the loss, unless the rule says otherwise. Under
a unified precision the two policies are one and there is nothing to correct. Left out: the metrics
of the mismatch (`mismatch.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.reference.sums import mean, total
from isobit.rl.algorithm.correction_rule import CorrectionRule, Rejection

LEAST_STEP = 0.5
"""A run warns when less than this is left of the step, or of its completions."""
_LOG_RATIO_LIMIT = 20.0
_LEAST_PROBABILITY = 1e-8  # of a token and of its complement, in binary_kl


@dataclass(frozen=True)
class Correction:
    """The result of a correction, per token [tokens]: the `weights`, float32, that multiply the
    loss (0 where rejected); `untruncated`, the ratios before truncation, whose tails say more;
    `clipped`, which of them were truncated; `accepted`, which tokens were not rejected."""

    weights: Tensor
    untruncated: Tensor
    clipped: Tensor
    accepted: Tensor


def correct(
    rule: CorrectionRule, old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Sequence[int]
) -> Correction:
    """Apply a rule to the log-probabilities [tokens], float32, of sequences of `lengths`; an empty
    sequence changes nothing."""
    assert old_logprobs.shape == rollout_logprobs.shape == (sum(lengths),)
    lr = (old_logprobs - rollout_logprobs).double()
    counts = torch.tensor(list(lengths), dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, sequence, lr)
    if rule.weight == "sequence":
        untruncated = _exp(sums)[sequence]
    else:
        untruncated = _exp(lr)
    weights = (
        torch.ones_like(lr) if rule.weight == "none" else untruncated.clamp(rule.floor, rule.cap)
    )
    clipped = (
        torch.zeros_like(lr, dtype=torch.bool) if rule.weight == "none" else weights != untruncated
    )
    accepted = _kept(rule, old_logprobs, rollout_logprobs, counts, sequence)
    if rule.normalize:
        weights = weights / _mean_weight(weights, rule.weight, counts)
    weights = torch.where(accepted, weights, 0.0)
    return Correction(weights.float(), untruncated.float(), clipped, accepted)


def correction_metrics(correction: Correction) -> dict[str, float]:
    """Compute the mean weight, the fractions of tokens truncated and rejected, the largest ratio,
    and the effective sample size 1 / mean((w / mean w)²) by the weights and by the untruncated
    ratios; that by the weights is 0 for an entirely rejected batch."""
    weights = correction.weights.double()
    ratio = correction.untruncated.double()
    accepted = correction.accepted
    return {
        "correction/mean_weight": mean(weights),
        "correction/clipped_fraction": mean(correction.clipped),
        "correction/rejected_fraction": mean(~accepted),
        "correction/largest_ratio": float(ratio.max()),
        "correction/effective_sample_size": _effective_sample_size(weights),
        "correction/effective_sample_size_untruncated": _effective_sample_size(ratio),
    }


def step_metrics(
    correction: Correction,
    advantages: Tensor,
    lengths: Sequence[int],
    before: Sequence[float],
    after: Sequence[float],
) -> dict[str, float]:
    """Measure how much of a step a correction leaves: the fraction of completions with a token that
    it kept; and, summed over the tokens, Σ w·s·|A| / Σ s'·|A|, where w are the correction's
    weights, A the `advantages` [tokens], and s' and s the weights in the loss of each sequence's
    tokens, `before` and `after` the correction. Empty if every advantage is 0."""
    sizes = advantages.double().abs()
    if not bool(sizes.any()):
        return {}
    counts = torch.tensor(list(lengths))
    old, new = (
        torch.tensor(list(s), dtype=torch.float64).repeat_interleave(counts) * sizes
        for s in (before, after)
    )
    some = [bool(m.any()) for m in correction.accepted.split(list(lengths)) if m.numel()]
    left = total(correction.weights.double() * new) / (total(old) or math.nan)
    return {"correction/kept_fraction": sum(some) / len(some), "correction/effective_step": left}


def small_step(rule: CorrectionRule, metrics: Mapping[str, float]) -> str | None:
    """Return one line that warns of a correction that leaves little of the step, or None where it
    leaves enough."""
    left, fraction = (
        metrics.get(f"correction/{name}", 1.0) for name in ("effective_step", "kept_fraction")
    )
    if min(left, fraction) >= LEAST_STEP:
        return None
    return (
        f"algorithm.correction ({rule}) keeps {fraction:.0%} of the completions and {left:.0%} of the "
        "step's size: widen its bounds, or take token_tis, or precision: fp8, which needs none "
        "(said once; the metrics have correction/effective_step)"
    )


def _mean_weight(weights: Tensor, kind: str, counts: Tensor) -> float:
    """Return the mean weight over tokens, or over sequences; 1 where it is at most 1e-8 (verl's
    bound), too small to divide by."""
    if kind == "sequence":
        filled = counts[counts > 0]
        weights = weights[
            filled.cumsum(0) - 1
        ]  # one of each sequence, whose tokens have it in common
    mean_weight = mean(weights)
    return mean_weight if mean_weight > 1e-8 else 1.0


def _kept(
    rule: CorrectionRule, old: Tensor, rollout: Tensor, counts: Tensor, sequence: Tensor
) -> Tensor:
    lr = (old - rollout).double()
    accepted = torch.ones(lr.shape, dtype=torch.bool)
    if rule.rejection is not None:
        if rule.rejection.measure == "binary_kl":
            # the larger of the two divergences between the Bernoulli distributions of
            # each token; [tokens] float64.
            p, q = (
                torch.exp(logprobs.double()).clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
                for logprobs in (old, rollout)
            )
            tokens, rest = torch.log(p / q), torch.log((1 - p) / (1 - q))
            divergence = torch.maximum(p * tokens + (1 - p) * rest, -q * tokens - (1 - q) * rest)
            value = _of_level(rule.rejection.level, divergence, counts, sequence)
        else:
            value = _measured(rule.rejection, lr, counts, sequence)
        low, high = rule.rejection.low, rule.rejection.high
        accepted &= (value >= (-math.inf if low is None else low)) & (
            value <= (math.inf if high is None else high)
        )
    if rule.veto > 0:
        vetoed = torch.zeros(len(counts), dtype=torch.bool)
        vetoed[sequence[lr < math.log(rule.veto)]] = True
        accepted &= ~vetoed[sequence]
    return accepted


def _measured(rejection: Rejection, lr: Tensor, counts: Tensor, sequence: Tensor) -> Tensor:
    """Return the value of each token by a measure that is a function of lr."""
    measure, level = rejection.measure, rejection.level
    if measure in ("ratio", "inverse_ratio"):
        signed = lr if measure == "ratio" else -lr
        if level == "sequence_max":
            return _of_level(level, _exp(signed), counts, sequence)
        return _exp(_of_level(level, signed, counts, sequence))
    bounded = lr.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    values = {
        "k1": lambda: -bounded,
        "k2": lambda: 0.5 * bounded * bounded,
        "k3": lambda: torch.expm1(bounded) - bounded,
    }[measure]()
    return _of_level(level, values, counts, sequence)


def _of_level(level: str, values: Tensor, counts: Tensor, sequence: Tensor) -> Tensor:
    """Return, for each token, its own value or that of its sequence, by `level`."""
    return (
        values if level == "token" else _over_sequences(values, level, counts, sequence)[sequence]
    )


def _over_sequences(values: Tensor, level: str, counts: Tensor, sequence: Tensor) -> Tensor:
    if level == "sequence_max":
        lowest = torch.full(counts.shape, -math.inf, dtype=values.dtype)
        return lowest.scatter_reduce(0, sequence, values, "amax")
    sums = torch.zeros(counts.shape, dtype=values.dtype).index_add_(0, sequence, values)
    return sums / counts.clamp(min=1) if level == "sequence_mean" else sums


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def _effective_sample_size(weights: Tensor) -> float:
    square = mean(weights * weights)
    return mean(weights) ** 2 / square if square > 0 else 0.0

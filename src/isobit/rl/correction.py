"""Importance weights between the policy that sampled and the learner's, for recipes in which the two differ.

Weights multiply the per-token loss and carry no gradient. Under a unified precision there is nothing to correct.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Correction:
    """Per-token `weights`, and the untruncated ones, whose tails say more."""

    weights: Tensor
    untruncated: Tensor


def token_tis(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Correction:
    """Truncated importance sampling per token: min(exp(log old - log rollout), cap), [tokens] float32.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    ratio = torch.exp((old_logprobs - rollout_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    return Correction(ratio.clamp(max=cap), ratio)


def correction_metrics(correction: Correction) -> dict[str, float]:
    """Mean weight, fraction truncated, and the effective sample size 1 / mean((w / mean w)²) of both kinds of
    weight."""
    weights, ratio = correction.weights.double(), correction.untruncated.double()
    return {
        "correction/mean_weight": float(weights.mean()),
        "correction/clipped_fraction": float((ratio > weights).double().mean()),
        "correction/effective_sample_size": _effective_sample_size(weights),
        "correction/effective_sample_size_untruncated": _effective_sample_size(ratio),
    }


def _effective_sample_size(weights: Tensor) -> float:
    return float(weights.mean() ** 2 / (weights * weights).mean())

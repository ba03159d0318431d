"""Policy losses and KL penalties per token, and how tokens are averaged.

Every function is elementwise or a weighted sum, so that a batch split into micro-batches has the gradient of the whole
batch: the weights come from the whole. Left out: where log-probabilities come from (`learner.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
SURROGATES = ("clip", "cispo", "reinforce")
RATIOS = ("token", "sequence", "sequence_sum")
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
_LOG_RATIO_LIMIT = 20.0  # exp of it is still finite in float32; a ratio beyond is clipped by any objective anyway
_SEQUENCE_LIMIT = 10.0  # veRL's, of the mean log ratio of a sequence
_LOW_VARIANCE_LIMIT = 10.0  # veRL's and NeMo RL's, of a token's KL


@dataclass(frozen=True)
class PolicyLoss:
    """Per token: the loss (with gradient), whether the clip was active, and the ratio policy/old."""

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def policy_loss(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
    surrogate: str = "clip",
    dual_clip: float = math.inf,
    ratio: str = "token",
    sequence: Tensor | None = None,
) -> PolicyLoss:
    """The loss per token, all tensors [tokens]; ratio = exp(log policy - log old).

    clip: -min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7; with
    clip_high > clip_low DAPO's clip-higher), for A < 0 at most dual_clip·|A| (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    cispo: -clip(ratio)·A·log policy, no gradient through the clipped ratio (MiniMax 2025, arXiv 2506.13585, eq. 4).
    reinforce: -A·log policy, no ratio and no clip (NeMo RL's `disable_ppo_ratio`).

    `ratio`: of each token; or one for its whole sequence, whose number `sequence` gives, from 0 on. sequence: exp of
    the mean over its tokens (GSPO: Zheng et al. 2025, arXiv 2507.18071, eq. 7), of which each token carries its own
    part of the gradient (GSPO-token, eq. 13 and 14; veRL's form): the sum over a sequence is the same, and a weight or
    an advantage of one token reaches that token. sequence_sum: exp of the sum over its tokens (TRL's RLOOTrainer).

    `weights` (importance weights of the rollout, no gradient) multiply the result. The log of the ratio is bounded to
    ±20 before exp, its mean over a sequence to 10 above; beyond, the clipped surrogate has no gradient.
    """
    assert surrogate in SURROGATES
    log_ratio = _log_ratio(policy_logprobs, old_logprobs, ratio, sequence)
    ratios = torch.exp(log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    bounded_ratio = ratios.clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "reinforce":
        loss, clipped = -advantages * policy_logprobs, torch.zeros_like(ratios, dtype=torch.bool)
    elif surrogate == "cispo":
        loss = -bounded_ratio.detach() * advantages * policy_logprobs
        clipped = bounded_ratio != ratios
    else:
        unclipped, bounded = ratios * advantages, bounded_ratio * advantages
        loss, clipped = -torch.minimum(unclipped, bounded), bounded < unclipped
        if dual_clip < math.inf:
            most = torch.where(advantages < 0, -dual_clip * advantages, math.inf)
            loss, clipped = torch.minimum(loss, most), clipped | (loss > most)
    if weights is not None:
        loss = loss * weights.detach()
    return PolicyLoss(loss, clipped.detach(), ratios.detach())


def _log_ratio(policy: Tensor, old: Tensor, ratio: str, sequence: Tensor | None) -> Tensor:
    assert ratio in RATIOS
    if ratio == "token":
        return policy - old
    assert sequence is not None
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    none = torch.zeros(count, dtype=policy.dtype)
    if ratio == "sequence_sum":
        return none.index_add(0, sequence, policy - old)[sequence]
    tokens = torch.bincount(sequence, minlength=count).clamp(min=1)
    mean = (none.index_add(0, sequence, (policy - old).detach()) / tokens)[sequence]
    return (policy - policy.detach() + mean).clamp(max=_SEQUENCE_LIMIT)


def kl_penalty(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy ‖ reference) per token, from tokens of the policy (Schulman 2020, "Approximating KL").

    With d = log reference - log policy: k1 = -d, k2 = d²/2, k3 = e^d - d - 1 (constant above d = 20, where e^d would
    drown the batch). As a term of the loss the gradients by log policy are 1, -d and 1 - e^d: that of k2 estimates the
    gradient of KL(policy ‖ reference), that of k3 the gradient of KL(reference ‖ policy), and that of k1 is 0 in the
    mean: k1 is for the reward. low_var_kl is k3 as veRL and NeMo RL bound it: d within ±20, the value at most 10, and
    beyond either no gradient.
    """
    difference = reference_logprobs - policy_logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference * difference
    if estimator == "low_var_kl":
        difference = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        return (torch.exp(difference) - difference - 1.0).clamp(max=_LOW_VARIANCE_LIMIT)
    assert estimator == "k3"
    difference = difference.clamp(max=_LOG_RATIO_LIMIT)
    return torch.exp(difference) - difference - 1.0


def token_weights(lengths: Sequence[int], aggregation: str, max_new_tokens: int) -> list[float]:
    """The weight of each sequence's tokens in the loss of a whole optimizer batch; `lengths` are of its completions.

    token_mean: 1 / all tokens (DAPO). sequence_mean: the mean over a sequence, then over sequences (GRPO).
    constant: 1 / (sequences · max_new_tokens) (Dr. GRPO). An empty completion has no tokens, but counts as a
    sequence.
    """
    assert aggregation in AGGREGATIONS
    if aggregation == "token_mean":
        return [1.0 / max(sum(lengths), 1)] * len(lengths)
    if aggregation == "constant":
        return [1.0 / (max(len(lengths), 1) * max_new_tokens)] * len(lengths)
    return [1.0 / (len(lengths) * max(length, 1)) for length in lengths]

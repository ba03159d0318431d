"""The distance between rollout and learner for the same weights and tokens, as the field measures
it.

lr = log π_learner - log π_rollout of the sampled token; means are over all trained tokens, or over
sequences. Formulas: NeMo RL's and verl's, see docs/metrics.md.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.kernels.reference.sums import mean

_LOG_RATIO_LIMIT = 20.0  # verl's safety bound


def mismatch_metrics(policy_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, float]:
    """Compute all mismatch metrics per token from float32 log-probabilities [tokens], of at least
    one token."""
    assert policy_logprobs.dtype == rollout_logprobs.dtype == torch.float32
    assert policy_logprobs.shape == rollout_logprobs.shape
    assert policy_logprobs.numel() > 0
    learner, rollout = policy_logprobs.double(), rollout_logprobs.double()
    ratio = (learner - rollout).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return {
        "mismatch/token_mult_prob_error": mean(torch.exp(ratio.abs())),
        "mismatch/kl_k3": mean(_k3(ratio)),
        "mismatch/kl_k3_reverse": mean(_k3(-ratio)),
        "mismatch/kl_k1": mean(0.0 - ratio),  # of equal ones 0, not -0
        "mismatch/importance_ratio": mean(torch.exp(ratio)),
        "mismatch/chi2": mean(torch.exp(2 * ratio)) - 1,
        "mismatch/js_divergence": mean(_jensen_shannon(learner, rollout)),
        "mismatch/max_abs_logprob_diff": float((learner - rollout).abs().max()),
        "mismatch/differing_tokens": float(differing(policy_logprobs, rollout_logprobs)),
        "mismatch/compared_tokens": float(policy_logprobs.numel()),
    }


def sequence_metrics(
    policy_logprobs: Sequence[Tensor], rollout_logprobs: Sequence[Tensor]
) -> dict[str, float]:
    """Compute verl's metrics per sequence from the float32 log-probabilities [tokens] of each
    sequence; there is at least one sequence, and none is empty."""
    counts = torch.tensor([len(row) for row in policy_logprobs])
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    both = torch.stack(
        [torch.cat(list(policy_logprobs)), torch.cat(list(rollout_logprobs))], 1
    ).double()
    sums = torch.zeros(len(counts), 2, dtype=torch.float64).index_add_(0, sequence, both)
    means = (sums / counts.unsqueeze(1)).clamp(-_LOG_RATIO_LIMIT, 0)
    learner_mean, rollout_mean = means.unbind(1)
    difference = rollout_mean - learner_mean
    total = (sums[:, 0] - sums[:, 1]).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return {
        "mismatch/learner_ppl": mean(torch.exp(-learner_mean)),
        "mismatch/rollout_ppl": mean(torch.exp(-rollout_mean)),
        "mismatch/log_ppl_diff": mean(difference),
        "mismatch/ppl_ratio": mean(torch.exp(difference)),
        "mismatch/chi2_sequence": mean(torch.exp(2 * total)) - 1,
    }


def position_metrics(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, positions: Tensor
) -> dict[str, float]:
    """Compute the k3 of tokens by their positions [tokens] in the completion, counted from 0: for
    each power of two n, the mean over the tokens n to 2n - 1, counted from 1, if there are any.
    Empty where all tokens have the same bits."""
    if not differing(policy_logprobs, rollout_logprobs):
        return {}
    ratio = (policy_logprobs.double() - rollout_logprobs.double()).clamp(
        -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT
    )
    power = torch.frexp((positions + 1).double()).exponent.long() - 1
    sums, counts = torch.zeros(2, int(power.max()) + 1, dtype=torch.float64)
    sums.index_add_(0, power, _k3(ratio))
    counts.index_add_(0, power, torch.ones_like(ratio))
    means = zip((sums / counts).tolist(), counts.tolist())
    return {f"mismatch/kl_k3_from_{2**n}": mean for n, (mean, count) in enumerate(means) if count}


def _k3(ratio: Tensor) -> Tensor:
    """Compute Schulman's estimate of a KL divergence for each token."""
    return torch.exp(ratio) - ratio - 1


def differing(left: Tensor, right: Tensor) -> int:
    """Count the elements of two float32 tensors that differ in any bit."""
    return int(differing_places(left, right).sum())


def differing_places(left: Tensor, right: Tensor) -> Tensor:
    """Return a bool tensor that is true where two float32 tensors of one shape differ in any
    bit."""
    return left.contiguous().view(torch.int32) != right.contiguous().view(torch.int32)


def _jensen_shannon(left: Tensor, right: Tensor) -> Tensor:
    """Compute NeMo RL's estimate of the Jensen-Shannon divergence for each token, with m the log of
    the mean probability."""
    # no `logaddexp`, whose bits at the ends of a thread's share are others
    both = torch.maximum(left, right) + torch.log1p(torch.exp(-(left - right).abs()))
    middle = both - math.log(2.0)
    halves = [torch.exp(side - middle) - (side - middle) - 1 for side in (left, right)]
    return 0.5 * (halves[0] + halves[1])

"""The divergence of a policy from its teacher over the whole vocabulary, or over the policy's
likeliest tokens.

With p the policy, q the teacher and β `divergence_beta`, of each token

    β = 0: KL(q ‖ p), the forward KL        β = 1: KL(p ‖ q), the reverse KL
    else:  β·KL(q ‖ m) + (1 - β)·KL(p ‖ m),  m = (1 - β)·p + β·q

(generalized Jensen-Shannon: Agarwal et al. 2023, arXiv 2306.13649, eq. 1, as TRL's GKDTrainer and
DistillationTrainer have it). With a `top_k` both are of the policy's k likeliest tokens and of one
more, all others together, as TRL's SDPO takes them with `distillation_add_tail`. Left out: logits,
of which a few rows are held at a time (`model/forward/head_divergence.py`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_OF_TOP = -1e-7  # TRL's, of the log of what the top k have together


@dataclass(frozen=True)
class Divergence:
    """Which one: `beta` from 0 to 1, and the tokens that are told apart, 0 for all."""

    beta: float
    top_k: int = 0

    def of(self, policy: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """[T] of logits [T, V] of both, by whose dtype it is computed; its gradient is by the
        policy's logits. The policy's likeliest tokens are a constant of it."""
        mine, theirs = (torch.log_softmax(x / temperature, -1) for x in (policy, teacher))
        if 0 < self.top_k < mine.shape[-1]:
            chosen = mine.detach().topk(self.top_k, dim=-1).indices
            mine, theirs = (_with_rest(x.gather(-1, chosen)) for x in (mine, theirs))
        if self.beta == 0:
            return _kl(theirs, mine)
        if self.beta == 1:
            return _kl(mine, theirs)
        parts = mine + math.log1p(-self.beta), theirs + math.log(self.beta)
        mixed = torch.logaddexp(*parts)
        return self.beta * _kl(theirs, mixed) + (1 - self.beta) * _kl(mine, mixed)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first ‖ second) of log-probabilities [T, N]."""
    return (first.exp() * (first - second)).sum(-1)


def _with_rest(top: Tensor) -> Tensor:
    """Log-probabilities [T, k] and that of all other tokens, [T, k + 1]."""
    together = torch.logsumexp(top, -1, keepdim=True).clamp(max=_MOST_OF_TOP)
    return torch.cat([top, torch.log(-torch.expm1(together))], -1)

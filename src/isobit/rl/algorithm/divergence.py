"""The divergence of a policy from its teacher over the whole vocabulary, or over the policy's
likeliest tokens.

With p the policy, q the teacher and β `divergence_beta`, of each token

    β = 0: KL(q ‖ p), the forward KL        β = 1: KL(p ‖ q), the reverse KL
    else:  β·KL(q ‖ m) + (1 - β)·KL(p ‖ m),  m = (1 - β)·p + β·q

(generalized Jensen-Shannon: Agarwal et al. 2023, arXiv 2306.13649, eq. 1, as TRL's GKDTrainer and
DistillationTrainer have it). With a `top_k` both are of the policy's k likeliest tokens and of one
more, all others together, as TRL's SDPO takes them with `distillation_add_tail`: in float32 too,
where 1 minus the sum of the top k, as TRL has it, is noise once the rest is below 1e-6.

A policy that is sure of a token has the others' probabilities for its gradient, and these may be
1e-30. So nothing here is a difference of numbers near 1: the others are added up themselves
(`_Distance`; tests/rl/test_divergence_edges.py). Left out: logits, of which a few rows are held at
a time (`model/forward/head_divergence.py`).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from isobit.kernels.sampling.definition import row_sum


@dataclass(frozen=True)
class Divergence:
    """A divergence of a policy from its teacher: `beta` from 0 to 1, and `top_k`, the number of
    tokens that are told apart, 0 for all."""

    beta: float
    top_k: int = 0

    def of(self, policy: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the divergence [T] of the distributions of two logits [T, V], computed in the
        dtype of the logits. Its gradient is by the policy's logits. The choice of the policy's
        likeliest tokens is a constant, without a gradient."""
        mine, theirs = policy / temperature, teacher / temperature
        if 0 < self.top_k < mine.shape[-1]:
            chosen = mine.detach().topk(self.top_k, dim=-1).indices
            mine, theirs = (_with_rest(x, chosen) for x in (mine, theirs))
        divergence: Tensor = _Distance.apply(mine, theirs, self.beta)
        return divergence


class _Distance(Function):
    """The divergence [T] of the distributions of logits [T, N]. The gradient by the policy's logits
    is p·(c - Σ p·c), with c the derivative by each probability: log p/q, or (1 - β)·log p/m; under
    the forward KL it is p - q. It adds up to 0, so that of the likeliest token is what the others
    leave."""

    @staticmethod
    def forward(ctx: Any, policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
        ctx.save_for_backward(policy, teacher)
        ctx.beta = beta
        mine, theirs = _logprobs(policy), _logprobs(teacher)
        if beta == 0:
            return row_sum(theirs.exp() * (theirs - mine))
        if beta == 1:
            return row_sum(mine.exp() * (mine - theirs))
        difference = theirs - mine
        of_mine, of_theirs = (
            row_sum(_log_mixed(change, math.log(of) - math.log1p(-of)).mul_(first.exp())).neg()
            for first, change, of in ((mine, difference, beta), (theirs, -difference, 1 - beta))
        )
        return beta * of_theirs + (1 - beta) * of_mine

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (policy, teacher), beta = ctx.saved_tensors, ctx.beta
        mine, likeliest = _logprobs(policy), policy.argmax(-1, keepdim=True)
        gradient, difference = mine.exp(), _logprobs(teacher).sub_(mine)
        if beta == 0:
            gradient = gradient - difference.add_(mine).exp_()
        else:  # c - c of the likeliest: what they have in common leaves the gradient as it is
            at_likeliest = difference.gather(-1, likeliest)
            relative = difference.sub_(at_likeliest)
            if beta < 1:
                odds = at_likeliest + (math.log(beta) - math.log1p(-beta))
                relative = _log_mixed(relative, odds).mul_(1 - beta)
            relative = relative.neg_()
            gradient.mul_(relative - row_sum(gradient * relative).unsqueeze(-1))
        gradient.scatter_(-1, likeliest, 0.0)
        gradient.scatter_(-1, likeliest, -row_sum(gradient).unsqueeze(-1))
        return gradient.mul_(slope.unsqueeze(-1)), None, None


def _logprobs(logits: Tensor) -> Tensor:
    """Return the log-probabilities [T, N] of logits. That of the likeliest token is -log(1 + the
    sum of the other tokens' probabilities over its own)."""
    likeliest = logits.argmax(-1, keepdim=True)
    shifted = logits - logits.gather(-1, likeliest)
    rest = row_sum(shifted.exp().scatter_(-1, likeliest, 0.0)).unsqueeze(-1)
    return shifted.sub_(torch.log1p(rest))


def _log_mixed(difference: Tensor, odds: Tensor | float) -> Tensor:
    """Return log(1 - g + g·e^d) with g = sigmoid(`odds`) and d = `difference`, precise also where
    it is nearly 0."""
    odds = torch.as_tensor(odds, dtype=difference.dtype, device=difference.device)
    log_g, log_rest = logsigmoid(odds), logsigmoid(-odds)
    small, second = torch.expm1(difference).mul_(log_g.exp()), difference + log_g
    # `logaddexp`, whose bits at the ends of a thread's share are others
    large = torch.maximum(log_rest, second)
    large.add_(second.sub_(log_rest).abs_().neg_().exp_().log1p_())
    near = small.abs() < 0.5
    return torch.where(near, small.log1p_(), large)


def _with_rest(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return [T, k + 1]: the logits [T, k] of the chosen tokens, and the log of the sum of exp of
    all other logits."""
    unchosen = logits.scatter(-1, chosen, -torch.inf)
    most = unchosen.detach().amax(-1, keepdim=True)
    rest = most + row_sum(torch.exp(unchosen - most)).log().unsqueeze(-1)
    return torch.cat([logits.gather(-1, chosen), rest], -1)

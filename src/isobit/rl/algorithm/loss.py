"""The loss of each token, the KL penalty, and how tokens are averaged.

A `Loss` is a function of `LossInputs` that returns `LossOutputs`, and what it needs of the learner:
those named here, and a user's own (`functions.py`). Each token's loss may depend on its own
sequence and on nothing else of the micro-batch, since the step's loss is the weighted sum of all
tokens, however they are split into micro-batches. Left out: where log-probabilities come from (`learner/learner.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isobit.rl.algorithm.objective import ResolvedObjective

_LOG_RATIO_LIMIT = (
    20.0  # exp of it is still finite in float32; a ratio beyond is clipped by any objective anyway
)
_SEQUENCE_LIMIT = 10.0  # verl's, of the mean log ratio of a sequence
_LEAST_OTHERS = 1e-8  # verl's, of the probability of all other tokens, under dppo_kl
_LEAST_RATIO = 1e-8  # TRL's, of a whole sequence, under vespo
_LOW_VARIANCE_LIMIT = 10.0  # verl's and NeMo RL's, of a token's KL


@dataclass(frozen=True, eq=False)
class LossInputs:
    """A micro-batch of whole sequences, as a loss sees it: T trained tokens, one after the other,
    on the CPU.

    All tensors are [T] float32, unless it says otherwise; `policy_logprobs` and `entropy` have a
    gradient.

    policy_logprobs: log-probabilities under the weights that are trained, at the sampling
    temperature. old_logprobs: under the weights that the step began with. rollout_logprobs: as the
    engine recorded them; under a unified precision they are the old ones. reference_logprobs: of
    the frozen reference, where `kl_coefficient` adds its penalty to the loss, else None.
    advantages: of the token, or of its completion. importance_weights: of the correction, 0 where
    it rejects a token, 1 without one. token_weights: the share of a token in the step's loss, by
    `loss_aggregation`. The learner multiplies the loss by both. entropy: of the policy's
    distribution at the token, in nats; where it only chooses or weighs tokens, `detach` it.
    sequence, int64: the number of the token's sequence in the micro-batch, from 0 on. clip_low,
    clip_high: bounds of the ratio, [1 - clip_low, 1 + clip_high]. settings: the objective.
    divergence: of the whole distribution from a teacher's, with a gradient, under loss: divergence,
    else None.
    """

    policy_logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    importance_weights: Tensor
    token_weights: Tensor
    entropy: Tensor
    sequence: Tensor
    clip_low: float
    clip_high: float
    settings: ResolvedObjective
    reference_logprobs: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """`loss` [T], with its gradient. `clipped` [T] bool: where a clip cuts the gradient off, for
    the metric clip_fraction. `metrics`: further numbers of each token [T], whose means over the
    tokens of a step are logged as `loss/NAME`."""

    loss: Tensor
    clipped: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[[LossInputs], LossOutputs]
_Inputs = TypeVar("_Inputs")
_Outputs = TypeVar("_Outputs")


@dataclass(frozen=True)
class Loss(Generic[_Inputs, _Outputs]):
    """A loss: a function `of` the tokens of a micro-batch, and what it `needs` of the learner besides
    the policy's forward.

    A learner of rollouts provides, by name: `reference`, its log-probabilities; `divergence`, that
    of the policy's distribution from the reference's; `kl_baseline`, an estimate of their KL for
    the step; `pairs`, two consecutive sequences in one micro-batch. `factor`: the input of which 0
    makes the gradient of a token 0, so that no backward of it is needed; None: there is none.
    """

    of: Callable[[_Inputs], _Outputs]
    needs: tuple[str, ...] = ()
    factor: str | None = None

    def __call__(self, inputs: _Inputs) -> _Outputs:
        return self.of(inputs)


PolicyLoss = Loss[LossInputs, LossOutputs]


def needs_of(loss: PolicyLoss, objective: ResolvedObjective) -> frozenset[str]:
    """Return what a loss and the other terms of an objective need of the learner; of these terms
    the `reference`, `old` log-probabilities by the weights that the step begins with, `entropies`
    of all tokens."""
    terms = {
        "reference": objective.kl_coefficient > 0 and not objective.kl_in_reward,
        "old": objective.recompute_old,
        "entropies": objective.top_entropy_quantile < 1,
    }
    return frozenset((*loss.needs, *(name for name, needed in terms.items() if needed)))


def clip(inputs: LossInputs) -> LossOutputs:
    """Compute -min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A) (Schulman et al. 2017,
    arXiv 1707.06347, eq. 7; with clip_high > clip_low DAPO's clip-higher), for A < 0 at most
    dual_clip·|A| (Ye et al. 2020, arXiv 1912.09729, eq. 5)."""
    ratio, dual_clip = ratios(inputs), inputs.settings.dual_clip
    unclipped, bounded = ratio * inputs.advantages, _bounded(ratio, inputs) * inputs.advantages
    loss, clipped = -torch.minimum(unclipped, bounded), bounded < unclipped
    if dual_clip is not None:
        most = torch.where(inputs.advantages < 0, -dual_clip * inputs.advantages, math.inf)
        loss, clipped = torch.minimum(loss, most), clipped | (loss > most)
    return LossOutputs(loss, clipped)


def cispo(inputs: LossInputs) -> LossOutputs:
    """Compute -clip(ratio)·A·log policy, without a gradient through the clipped ratio (MiniMax
    2025, arXiv 2506.13585, eq. 4). A token whose advantage is 0 does not count as clipped, whatever
    its ratio."""
    ratio = ratios(inputs)
    bounded = _bounded(ratio, inputs)
    clipped = (bounded != ratio) & (inputs.advantages != 0)
    return LossOutputs(-bounded.detach() * inputs.advantages * inputs.policy_logprobs, clipped)


def reinforce(inputs: LossInputs) -> LossOutputs:
    """Compute -A·log policy, without a ratio or a clip (NeMo RL's `disable_ppo_ratio`)."""
    return LossOutputs(-inputs.advantages * inputs.policy_logprobs)


def sapo(inputs: LossInputs) -> LossOutputs:
    """Compute -(4/τ)·sigmoid(τ·(ratio - 1))·A, with τ one of `sapo_temperatures` by the sign of A:
    a soft gate in place of a clip, whose gradient is A at ratio 1 and fades on both sides (SAPO:
    Gao et al. 2025, arXiv 2511.20347)."""
    positive, negative = map(inputs.advantages.new_tensor, inputs.settings.sapo_temperatures)
    temperature = torch.where(inputs.advantages > 0, positive, negative)
    # as exp(logsigmoid): the gradient of `sigmoid`, s·(1 - s), is nothing where s is near 1
    gate = torch.exp(logsigmoid(temperature * (ratios(inputs) - 1.0))) * (4.0 / temperature)
    return LossOutputs(-gate * inputs.advantages)


def gmpo(inputs: LossInputs) -> LossOutputs:
    """Compute -A·the geometric mean of a sequence's ratios, each clipped before the mean, on the
    side where its token's A would drive it on, to [exp(-clip_low), exp(clip_high)] (GMPO: Zhao et
    al. 2025, arXiv 2507.20673, as TRL's GMPOTrainer and verl's `geo_mean` have it).

    Each token carries its own part of the gradient, as under `ratio: sequence`; a clipped token has
    none. The mean of the logs is at most 10.
    """
    log_ratio = _token_log_ratio(inputs)
    bounded = log_ratio.clamp(-inputs.clip_low, inputs.clip_high)
    logs = torch.where(
        inputs.advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded)
    )
    mean = (logs - logs.detach() + _over_sequence(logs.detach(), inputs)).clamp(max=_SEQUENCE_LIMIT)
    clipped = (logs != log_ratio) & (inputs.advantages != 0)
    return LossOutputs(-torch.exp(mean) * inputs.advantages, clipped)


def dppo_tv(inputs: LossInputs) -> LossOutputs:
    """Compute -ratio·A, without a gradient for a token whose probability π has left the old one, μ,
    too far and still moves away: upwards by more than clip_high where A > 0, downwards by more than
    clip_low where A < 0. |π - μ| is the total variation of the token against all others (DPPO,
    Binary-TV: Qi et al. 2026, arXiv 2602.04879)."""
    policy, old = _probabilities(inputs)
    return _within(inputs, policy - old, (policy - old).abs())


def dppo_kl(inputs: LossInputs) -> LossOutputs:
    """Compute -ratio·A as `dppo_tv` does, with the distance measured by the KL divergence of the
    token against all others, μ·log(μ/π) + (1 - μ)·log((1 - μ)/(1 - π)) (DPPO, Binary-KL).
    Probabilities are at most 1 - 1e-8, as verl's."""
    policy, old = (p.clamp(max=1 - _LEAST_OTHERS) for p in _probabilities(inputs))
    difference = inputs.old_logprobs - inputs.policy_logprobs.detach()
    rest = torch.log1p(-old) - torch.log1p(-policy)
    return _within(inputs, policy - old, old * difference + (1 - old) * rest)


def _probabilities(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the tokens' probabilities under the policy and under the old one, without a gradient;
    float64."""
    return inputs.policy_logprobs.detach().double().exp(), inputs.old_logprobs.double().exp()


def _within(inputs: LossInputs, moved: Tensor, divergence: Tensor) -> LossOutputs:
    """Compute DPPO's loss: -ratio·A, without a gradient for tokens that move further out of the
    trust region."""
    out = torch.where(
        inputs.advantages > 0,
        (moved > 0) & (divergence > inputs.clip_high),
        (moved < 0) & (divergence > inputs.clip_low),
    )
    ratio = torch.exp(_token_log_ratio(inputs))
    clipped = out & (inputs.advantages != 0)
    return LossOutputs(-torch.where(clipped, 0.0, ratio) * inputs.advantages, clipped)


def vespo(inputs: LossInputs) -> LossOutputs:
    """Compute -φ(w)·A·log policy, without a gradient through φ(w) = w^k·exp(λ·(1 - w)), where w is
    the ratio of the whole sequence, the product over its tokens: a soft weight, 1 at w = 1, by
    `vespo_k` and `vespo_lambda` (VESPO, 2026, arXiv 2602.10693; with TRL's bounds: the log of a
    token's ratio within ±20, w from 1e-8 to exp(20))."""
    (k_rise, k_fall), (l_rise, l_fall) = (
        map(inputs.advantages.new_tensor, pair)
        for pair in (inputs.settings.vespo_k, inputs.settings.vespo_lambda)
    )
    up = inputs.advantages >= 0
    k, rate = torch.where(up, k_rise, k_fall), torch.where(up, l_rise, l_fall)
    total = _sum_over_sequence(_token_log_ratio(inputs).detach(), inputs)
    log_ratio = total.clamp(math.log(_LEAST_RATIO), _LOG_RATIO_LIMIT)
    weight = torch.exp(rate + k * log_ratio - rate * torch.exp(log_ratio))
    return LossOutputs(-weight * inputs.advantages * inputs.policy_logprobs)


def divergence(inputs: LossInputs) -> LossOutputs:
    """Return the divergence of the policy's distribution at each token from its teacher's
    (`divergence.py`); neither an advantage nor a ratio is used."""
    assert inputs.divergence is not None, "there is no teacher"
    return LossOutputs(inputs.divergence)


LOSSES: dict[str, PolicyLoss] = {
    loss.__name__: Loss(loss, factor="advantages")
    for loss in (clip, cispo, reinforce, sapo, gmpo, dppo_tv, dppo_kl, vespo)
} | {"divergence": Loss(divergence, needs=("divergence",))}


def ratios(inputs: LossInputs) -> Tensor:
    """Compute π_policy / π_old of each token [T], with its gradient, as `settings.ratio` defines
    it.

    token: of the token itself. sequence: one for its whole sequence, exp of the mean over its
    tokens (GSPO: Zheng et al. 2025, arXiv 2507.18071, eq. 7), of which each token carries its own
    part of the gradient (GSPO-token, eq. 13 and 14; verl's form): the sum over a sequence is the
    same, and a weight or an advantage of one token reaches that token. sequence_sum: exp of the sum
    over its tokens (TRL's RLOOTrainer). The log of the ratio is bounded to ±20 before exp, its mean
    over a sequence to 10 above; beyond, the clipped loss has no gradient.
    """
    log_ratio = _log_ratio(inputs)
    return torch.exp(log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def without_off_policy(outputs: LossOutputs, inputs: LossInputs) -> LossOutputs:
    """Remove the loss of tokens with a negative advantage whose sequence the policy has left: the
    mean over the sequence of log rollout - log policy is above `off_policy_mask_threshold`, if
    there is one (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence masking, as
    TRL's `off_policy_mask_threshold`). These tokens count as clipped; a KL penalty stays."""
    threshold = inputs.settings.off_policy_mask_threshold
    if threshold is None:
        return outputs
    left = _over_sequence(inputs.rollout_logprobs - inputs.policy_logprobs.detach(), inputs)
    out = (inputs.advantages < 0) & (left > threshold)
    clipped = out if outputs.clipped is None else outputs.clipped | out
    return replace(outputs, loss=torch.where(out, 0.0, outputs.loss), clipped=clipped)


def _bounded(ratio: Tensor, inputs: LossInputs) -> Tensor:
    return ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)


def _token_log_ratio(inputs: LossInputs) -> Tensor:
    difference = inputs.policy_logprobs - inputs.old_logprobs
    return difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def _sum_over_sequence(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return, for each token, the sum of the values over its sequence, [T]."""
    sequence = inputs.sequence
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    sums = torch.zeros(count, dtype=values.dtype).index_add(0, sequence, values)
    # the gradient of an index adds in the order in which threads come; that of `index_select` not
    return sums.index_select(0, sequence)


def _over_sequence(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return, for each token, the mean of the values over its sequence, [T]."""
    return _sum_over_sequence(values, inputs) / torch.bincount(inputs.sequence)[inputs.sequence]


def _log_ratio(inputs: LossInputs, *, own_gradient: bool = True) -> Tensor:
    """Compute the log of the ratio of each token [T], by `settings.ratio`. `own_gradient`: under
    `ratio: sequence` each token carries its own part of the gradient; else the gradient is the
    mean's."""
    policy = inputs.policy_logprobs
    difference = policy - inputs.old_logprobs
    if inputs.settings.ratio == "token":
        return difference
    if inputs.settings.ratio == "sequence_sum":
        return _sum_over_sequence(difference, inputs)
    assert inputs.settings.ratio == "sequence"
    if not own_gradient:
        return _over_sequence(difference, inputs)
    mean = _over_sequence(difference.detach(), inputs)
    return (policy - policy.detach() + mean).clamp(max=_SEQUENCE_LIMIT)


def kl_penalty(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy ‖ reference) per token, from tokens of the policy (Schulman 2020,
    "Approximating KL").

    With d = log reference - log policy: k1 = -d, k2 = d²/2, k3 = e^d - d - 1 (constant above d =
    20, where e^d would drown the batch). As a term of the loss the gradients by log policy are 1,
    -d and 1 - e^d: that of k2 estimates the gradient of KL(policy ‖ reference), that of k3 the
    gradient of KL(reference ‖ policy), and that of k1 is 0 in the mean: k1 is for the reward.
    low_var_kl is k3 as verl and NeMo RL bound it: d within ±20, the value at most 10, and beyond
    either no gradient. k3-unbiased is k3, which `kl_in_loss` multiplies by the ratio.

    Values of k3 are rounded once, since e^d - d - 1 cancels near d = 0; its gradient does not.
    """
    difference = reference_logprobs - policy_logprobs
    if estimator == "k1":
        return policy_logprobs - reference_logprobs  # of equal ones 0, not -0
    if estimator == "k2":
        return 0.5 * difference * difference
    if estimator == "low_var_kl":
        difference = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        return _k3(difference).clamp(max=_LOW_VARIANCE_LIMIT)
    assert estimator in ("k3", "k3-unbiased")
    return _k3(difference.clamp(max=_LOG_RATIO_LIMIT))


def _k3(difference: Tensor) -> Tensor:
    """Compute e^d - d - 1: the value in float64, the gradient e^d - 1 in the dtype of d."""
    wide, narrow = difference.detach().double(), torch.exp(difference) - difference - 1.0
    exact = (torch.expm1(wide) - wide).to(difference.dtype)
    return exact + (narrow - narrow.detach())


def kl_in_loss(inputs: LossInputs) -> Tensor:
    """Compute the KL penalty of each token as a term of the loss [T], by `settings.estimator`.

    k3-unbiased is k3 times π_policy / π_old, with the ratio's gradient (DeepSeek-AI 2025,
    DeepSeek-V3.2, arXiv 2512.02556, eq. 7; TRL's `use_bias_correction_kl`): where both policies are
    one its gradient is k2's, that of KL(policy ‖ reference), and where they differ its mean over
    tokens of the old policy still is. As in TRL the ratio is the loss's: under `ratio: sequence` it
    is that of the whole sequence, with the gradient of the mean.

    With x = log reference - log policy a token's gradient through its own ratio r is r·(k3 + 1 -
    e^x) = -r·x, a small difference of large numbers: it is taken in closed form, in float64, so
    that it is also right where k3 and the ratio are bounded.
    """
    assert inputs.reference_logprobs is not None
    estimator = inputs.settings.estimator
    if estimator != "k3-unbiased":
        return kl_penalty(inputs.policy_logprobs, inputs.reference_logprobs, estimator)
    policy = inputs.policy_logprobs.double()
    wide = replace(inputs, policy_logprobs=policy, old_logprobs=inputs.old_logprobs.double())
    log_ratio = _log_ratio(wide, own_gradient=False)
    ratio = torch.exp(log_ratio.detach().clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    difference = inputs.reference_logprobs.double() - policy.detach()
    k3 = kl_penalty(policy.detach(), inputs.reference_logprobs.double(), estimator)
    # 0 both, with the gradients of the token's own log-probability and of its ratio's log
    zero, moved = policy - policy.detach(), log_ratio - log_ratio.detach()
    penalty = ratio * (k3 + k3 * moved - (k3 + difference) * zero)
    return penalty.to(inputs.policy_logprobs.dtype)


def token_weights(lengths: Sequence[int], aggregation: str, max_new_tokens: int) -> list[float]:
    """Return the weight of each sequence's tokens in the loss of a whole optimizer batch; `lengths`
    are the numbers of trained tokens of each sequence.

    token_mean: 1 / all tokens (DAPO). sequence_mean: the mean over a sequence, then over sequences
    (GRPO). sequence_sum: 1 / sequences, the sum over a sequence, then the mean over sequences
    (LUSPO, 2026, arXiv 2602.05261: GSPO's loss of a sequence times its length). constant: 1 /
    (sequences · max_new_tokens) (Dr. GRPO). An empty completion has no tokens, but counts as a
    sequence.
    """
    if aggregation == "token_mean":
        return [1.0 / max(sum(lengths), 1)] * len(lengths)
    if aggregation == "constant":
        return [1.0 / (max(len(lengths), 1) * max_new_tokens)] * len(lengths)
    if aggregation == "sequence_sum":
        return [1.0 / max(len(lengths), 1)] * len(lengths)
    assert aggregation == "sequence_mean"
    return [1.0 / (len(lengths) * max(length, 1)) for length in lengths]

"""Losses by name against their sources, off policy, value and gradient: their formula restated on
padded batches in float64, and TRL 1.16's own code where trl is installed."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.rl import OBJECTIVES, ResolvedObjective
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.loss import LOSSES, token_weights, without_off_policy
from tests.models import tiny_model
from tests.rl.helpers import (
    alternating,
    distance,
    gradients,
    loss_inputs,
    make_learner,
    roll_out,
)
from tests.rl.test_sources import LENGTHS, generator, padded
from tests.rl.trl_loss import needs_trl, trl_loss

COUNTS = torch.tensor(LENGTHS)
Case = tuple[Tensor, Tensor, Tensor]
Found = tuple[Tensor, Tensor]


def case(spread: float = 0.6) -> Case:
    """Policy (with a gradient) and old log-probabilities of each token, advantages of each
    sequence; both signs, and ratios far outside any clip."""
    count = sum(LENGTHS)
    old = -torch.rand(count, generator=generator(1), dtype=torch.float64) * 3 - 0.02
    moved = spread * torch.randn(count, generator=generator(2), dtype=torch.float64)
    policy = (old + moved).clamp(max=-0.01).requires_grad_()
    return policy, old, torch.randn(len(LENGTHS), generator=generator(4), dtype=torch.float64)


def rollout(old: Tensor) -> Tensor:
    """Of an engine that is not the learner."""
    return old + 0.3 * torch.randn(len(old), generator=generator(5), dtype=torch.float64)


def ours(preset: str, sampled: Callable[[Tensor], Tensor] = rollout, **changed: Any) -> Found:
    """Loss and gradient of a preset, some of its parts `changed`; `sampled`: the rollout's
    log-probabilities by the old ones."""
    policy, old, advantages = case()
    objective = ResolvedObjective.of(OBJECTIVES[preset], **changed)
    weights = torch.tensor(
        token_weights(LENGTHS, objective.loss_aggregation, 10), dtype=torch.float64
    )
    inputs = loss_inputs(
        policy,
        old,
        advantages.repeat_interleave(COUNTS),
        objective,
        rollout_logprobs=sampled(old),
        token_weights=weights.repeat_interleave(COUNTS),
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(COUNTS),
    )
    total = weighted_sum(without_off_policy(LOSSES[objective.loss](inputs), inputs), inputs)
    (gradient,) = torch.autograd.grad(total, policy)
    return total.detach(), gradient


def restated(formula: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Found:
    """A formula of (policy, old [sequences, longest], advantages [sequences, 1], mask) in place of
    a loss; no token is where a mask is 0."""
    policy, old, advantages = case()
    rows, mask = padded(policy)
    total = formula(rows, padded(old)[0], advantages.unsqueeze(1), mask.double())
    (gradient,) = torch.autograd.grad(total, policy)
    return total.detach(), gradient


def equal(found: Found, expected: Found) -> bool:
    return all(
        torch.allclose(mine, other, rtol=1e-9, atol=1e-12)
        for mine, other in zip(found, expected, strict=True)
    )


def mean_of_means(losses: Tensor, mask: Tensor) -> Tensor:
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def sapo(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """arXiv 2511.20347: the mean over sequences of the mean over tokens of f(ratio)·A, f(x) =
    σ(τ(x - 1))·4/τ."""
    tau = torch.where(advantages > 0, 1.0, 1.05 + torch.zeros_like(advantages))
    gate = 4 / tau / (1 + torch.exp(-tau * (torch.exp(policy - old) - 1)))
    return mean_of_means(-gate * advantages, mask)


@needs_trl
def test_sapo_is_trls() -> None:
    positive, negative = torch.tensor([1.0, 1.05], dtype=torch.float64)
    temperatures = {"sapo_temperature_pos": positive, "sapo_temperature_neg": negative}
    assert equal(ours("sapo"), trl_loss(*case(), loss_type="sapo", args=temperatures))


def test_sapo_is_its_formula() -> None:
    """The controls: one temperature for both signs, and the clip. At ratio 1 its gradient is
    that of the advantage alone."""
    assert equal(ours("sapo"), restated(sapo))
    assert not equal(ours("sapo", sapo_temperatures=(1.0, 1.0)), restated(sapo))
    assert not equal(ours("grpo"), restated(sapo))
    policy = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.7, -1.3], dtype=torch.float64)
    inputs = loss_inputs(policy, policy.detach(), advantages, OBJECTIVES["sapo"])
    (gradient,) = torch.autograd.grad(LOSSES["sapo"](inputs).loss.sum(), policy)
    torch.testing.assert_close(gradient, -advantages)


def gmpo(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """arXiv 2507.20673: the mean over sequences of A·(Π_t min or max of ratio and its clip)^(1/n),
    the clip in [e^-0.4, e^0.4]; here the product itself, a token after the other."""
    losses = []
    for row, before, advantage, there in zip(policy, old, advantages, mask, strict=True):
        product, length = torch.ones((), dtype=torch.float64), int(there.sum())
        for t in range(length):
            ratio = torch.exp(row[t] - before[t])
            bounded = ratio.clamp(torch.e**-0.4, torch.e**0.4)
            product = product * (min(ratio, bounded) if advantage > 0 else max(ratio, bounded))
        losses.append(-advantage * product ** (1 / max(length, 1)) * (length > 0))
    return torch.stack(losses).mean()


@needs_trl
def test_gmpo_is_trls() -> None:
    """A sequence without tokens has no gradient; TRL counts -A as its loss."""
    policy, old, advantages = case()
    advantages[COUNTS == 0] = 0
    theirs = trl_loss(policy, old, advantages, trainer="gmpo", epsilon_low=0.4, epsilon_high=0.4)
    assert equal(ours("gmpo"), theirs)


def test_gmpo_is_its_formula() -> None:
    """The controls: another bound, the clip of GSPO's mean of all ratios, and a clip without
    regard to the sign of the advantage."""
    expected = restated(gmpo)
    assert equal(ours("gmpo"), expected)
    assert not equal(ours("gmpo", clip_low=0.3), expected)
    assert not equal(ours("gspo", clip_low=0.4, clip_high=0.4), expected)

    def both_sides(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logs = ((policy - old).clamp(-0.4, 0.4) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        return -(torch.exp(logs) * advantages.squeeze(1) * (mask.sum(-1) > 0)).mean()

    assert not equal(ours("gmpo"), restated(both_sides))


def test_gmpo_says_which_tokens_are_clipped_and_gives_them_no_gradient() -> None:
    policy, old, advantages = case()
    per_token = advantages.repeat_interleave(COUNTS)
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(COUNTS)
    found = LOSSES["gmpo"](
        loss_inputs(policy, old, per_token, OBJECTIVES["gmpo"], sequence=sequence)
    )
    (gradient,) = torch.autograd.grad(found.loss.sum(), policy)
    log_ratio = (policy - old).detach()
    expected = torch.where(per_token > 0, log_ratio > 0.4, log_ratio < -0.4)
    assert found.clipped is not None
    assert 0 < int(expected.sum()) < len(expected)
    assert torch.equal(found.clipped, expected)
    assert torch.equal(gradient == 0, expected)


def luspo(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """arXiv 2602.05261: GSPO's clipped loss of a sequence times its length, the mean over
    sequences; the ratio as the root of a product, a token after the other."""
    losses = []
    for row, before, advantage, there in zip(policy, old, advantages, mask, strict=True):
        product, length = torch.ones((), dtype=torch.float64), int(there.sum())
        for t in range(length):
            product = product * torch.exp(row[t] - before[t])
        ratio = product ** (1 / max(length, 1))
        bounded = ratio.clamp(1 - 2e-3, 1 + 2.5e-3)
        losses.append(-length * torch.minimum(ratio * advantage, bounded * advantage).sum())
    return torch.stack(losses).mean()


@needs_trl
def test_luspo_is_trls() -> None:
    given = {"importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
    assert equal(ours("luspo"), trl_loss(*case(), loss_type="luspo", **given))


def test_luspo_is_its_formula() -> None:
    """The controls: GSPO, which does not count the length, and ratios of tokens."""
    expected = restated(luspo)
    assert equal(ours("luspo"), expected)
    assert not equal(ours("luspo", loss_aggregation="sequence_mean"), expected)
    assert not equal(ours("luspo", ratio="token"), expected)


def dppo(kind: str, low: float, high: float) -> Callable[..., Tensor]:
    """arXiv 2602.04879: the sum of M·ratio·A over tokens, here divided as Dr. GRPO does; M is 0
    where A > 0, ratio > 1 and D > high, and where A < 0, ratio < 1 and D > low; a token after the
    other."""

    def formula(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        losses = []
        for row, before, advantage, there in zip(policy, old, advantages, mask, strict=True):
            for t in range(int(there.sum())):
                pi, mu = row[t].exp(), before[t].exp()
                divergence = abs(pi - mu)
                if kind == "dppo_kl":
                    divergence = mu * torch.log(mu / pi) + (1 - mu) * torch.log((1 - mu) / (1 - pi))
                up = advantage > 0 and pi > mu and divergence > high
                down = advantage < 0 and pi < mu and divergence > low
                losses.append((-pi / mu * advantage).sum() * (0 if up or down else 1))
        return torch.stack(losses).sum() / len(policy) / 10

    return formula


def verl_dppo(kind: str, bound: float) -> Callable[..., Tensor]:
    """verl/trainer/ppo/core_algos.py, `compute_policy_loss_dppo_tv` and `_kl`, without their
    truncation of the ratio; the loss is another one with the same gradient."""

    def formula(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        prob, old_prob = policy.exp(), old.exp()
        divergence = (prob - old_prob).abs()
        if kind == "dppo_kl":
            others = torch.log((1.0 - old_prob + 1e-8) / (1.0 - prob + 1e-8))
            divergence = old_prob * (old - policy) + (1 - old_prob) * others
        rises = (divergence <= bound) | (prob <= old_prob)
        falls = (divergence <= bound) | (prob >= old_prob)
        valid = torch.where(advantages > 0, rises, falls).detach()
        ratio = torch.exp(policy - old).detach()
        return (-advantages * ratio * policy * valid * mask).sum() / len(policy) / 10

    return formula


@pytest.mark.parametrize(("kind", "bound"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_is_its_formula_and_verls(kind: str, bound: float) -> None:
    """The controls: the other divergence, another bound on either side, and the clip of the ratio
    at the same bounds."""
    found, expected = ours(kind), restated(dppo(kind, bound, bound))
    assert equal(found, expected)
    torch.testing.assert_close(found[1], restated(verl_dppo(kind, bound))[1], rtol=1e-9, atol=1e-12)
    assert 0 < int((found[1] == 0).sum()) < sum(LENGTHS)
    other = "dppo_kl" if kind == "dppo_tv" else "dppo_tv"
    assert not equal(found, restated(dppo(other, bound, bound)))
    for low, high in ((bound / 8, bound), (bound, bound / 8)):
        sided = restated(dppo(kind, low, high))
        assert equal(ours(kind, clip_low=low, clip_high=high), sided)
        assert not equal(found, sided)
    assert not equal(found, ours(kind, loss="clip"))


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_dppo_bounds_what_a_token_moves_and_not_its_ratio(kind: str) -> None:
    """A rare token may become 90 times as likely; a likely one may not fall from 0.99 to 0.6, which
    is within the clip's 0.5. A token that comes back is never cut off, and a certain one is
    finite."""
    chances = torch.tensor([[9e-3, 1e-4], [0.6, 0.99], [0.99, 0.6], [1.0, 0.2], [1.0, 1.0]])
    policy, old = chances.log().T
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    inputs = loss_inputs(policy.clone().requires_grad_(), old, advantages, OBJECTIVES[kind])
    found = LOSSES[kind](inputs)
    assert found.clipped is not None
    assert found.clipped.tolist() == [False, True, False, True, False]
    (gradient,) = torch.autograd.grad(found.loss.sum(), inputs.policy_logprobs)
    expected = torch.where(found.clipped, 0.0, -torch.exp(policy - old) * advantages)
    torch.testing.assert_close(gradient, expected)
    clipped = LOSSES["clip"](inputs)
    assert clipped.clipped is not None
    assert clipped.clipped.tolist()[:1] == [True]


def vespo(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """arXiv 2602.10693: φ(W)·A·log π, no gradient through φ(W) = W^k·exp(λ·(1 - W)), W the product
    of the ratios, a token after the other; the mean over tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for row, before, advantage, there in zip(policy, old, advantages, mask, strict=True):
        ratio, length = 1.0, int(there.sum())
        for t in range(length):
            ratio *= float(torch.exp(row[t].detach() - before[t]))
        k, rate = (2.0, 3.0) if float(advantage) >= 0 else (3.0, 2.0)
        weight = ratio**k * math.exp(rate * (1 - ratio))
        total = total - weight * float(advantage) * row[:length].sum()
    return total / mask.sum()


@needs_trl
def test_vespo_is_trls() -> None:
    names = ("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg")
    shape = dict(zip(names, (2.0, 3.0, 3.0, 2.0), strict=True))
    assert equal(ours("vespo"), trl_loss(*case(), loss_type="vespo", args=shape))


def test_vespo_is_its_formula() -> None:
    """The controls: one shape for both signs, and no weight at all."""
    expected = restated(vespo)
    assert equal(ours("vespo"), expected)
    assert not equal(ours("vespo", vespo_k=(2.0, 2.0)), expected)
    assert not equal(ours("vespo", vespo_lambda=(3.0, 3.0)), expected)
    assert not equal(ours("vespo", loss="reinforce"), expected)


@pytest.mark.parametrize("kind", ["sapo", "gmpo", "dppo_tv", "dppo_kl", "vespo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_ratios_leave_every_loss_finite(kind: str, advantage: float) -> None:
    policy = torch.tensor([0.0, -200.0, 0.0], requires_grad=True)
    old, advantages = torch.tensor([-200.0, 0.0, -200.0]), torch.full((3,), advantage)
    for sequence in ([0, 0, 0], [0, 1, 2]):
        given = {"sequence": torch.tensor(sequence)}
        found = LOSSES[kind](loss_inputs(policy, old, advantages, OBJECTIVES[kind], **given)).loss
        (gradient,) = torch.autograd.grad(found.sum(), policy)
        assert torch.isfinite(found).all()
        assert torch.isfinite(gradient).all()


def off_policy(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """arXiv 2512.02556, section 3.1: GRPO's loss, times 0 for a sequence with A < 0 and a mean of
    log rollout - log policy above 0.25; sequence by sequence."""
    sampled, losses = padded(rollout(case()[1]))[0], []
    for i, there in enumerate(mask):
        length = int(there.sum())
        ratio = torch.exp(policy[i] - old[i])
        surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
        left = float((sampled[i] - policy[i].detach())[:length].sum()) / max(length, 1)
        kept = 0.0 if float(advantages[i]) < 0 and left > 0.25 else 1.0
        losses.append(-kept * surrogate[:length].sum() / max(length, 1))
    return torch.stack(losses).mean()


@needs_trl
def test_the_off_policy_mask_is_trls() -> None:
    policy, old, advantages = case()
    given = {"rollout": rollout(old), "off_policy_mask_threshold": 0.25, "loss_type": "grpo"}
    theirs = trl_loss(policy, old, advantages, **given)
    assert equal(ours("grpo", off_policy_mask_threshold=0.25), theirs)


def test_the_off_policy_mask_is_its_formula() -> None:
    """The controls: no mask, another threshold, and the old policy in place of the rollout's."""
    expected = restated(off_policy)
    assert equal(ours("grpo", off_policy_mask_threshold=0.25), expected)
    assert not equal(ours("grpo"), expected)
    for threshold in (0.1, 0.4):
        assert not equal(ours("grpo", off_policy_mask_threshold=threshold), expected)
    assert not equal(ours("grpo", lambda old: old, off_policy_mask_threshold=0.25), expected)


def test_the_learner_leaves_out_the_sequences_that_the_mask_does() -> None:
    """Their gradient is that of no advantage, as if the rollout had taken their tokens for much
    likelier than the policy does; what a sequence with a positive advantage has stays. The control
    is a threshold that none reaches."""
    model = tiny_model("float32", scale=8)
    samples = [
        replace(s, rollout_logprobs=tuple(x + (0.5 if i % 3 else 0.0) for x in s.rollout_logprobs))
        for i, s in enumerate(roll_out(model))
    ]
    advantages = alternating(samples)
    left_out = [0.0 if a < 0 and i % 3 else a for i, a in enumerate(advantages)]
    assert 0 < sum(a != b for a, b in zip(advantages, left_out)) < sum(a < 0 for a in advantages)

    def gradient(threshold: float | None, given: list[float]) -> dict[str, Tensor]:
        objective = ResolvedObjective(loss="reinforce", off_policy_mask_threshold=threshold)
        return gradients(make_learner(model, objective), samples, given)

    wanted = gradient(None, left_out)
    assert distance(gradient(0.3, advantages), wanted) < 1e-6
    assert distance(gradient(0.7, advantages), wanted) > 0.05

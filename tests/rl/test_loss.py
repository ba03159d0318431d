"""Losses against closed forms, their gradients against analytic ones, and sums that do not depend
on the split."""

import math

import pytest
import torch
from torch import Tensor

from isobit.rl import Objective
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.loss import clip, kl_penalty, token_weights
from isobit.rl.algorithm.objective import AGGREGATIONS, KL_ESTIMATORS
from tests.rl.helpers import loss_inputs, policy_loss

LOW, HIGH = 0.2, 0.28


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_surrogate_and_its_gradient_case_by_case() -> None:
    """Below, inside and above the clip range, for both signs; the gradient is -ratio·A where the
    clip is not active."""
    ratios = f64(0.5, 0.9, 1.0, 1.2, 1.27, 1.3, 2.0).repeat(2)
    advantages = torch.cat([f64(*[1.5] * 7), f64(*[-2.0] * 7)])
    policy = ratios.log().requires_grad_()
    result = policy_loss(policy, torch.zeros_like(ratios), advantages, clip_low=LOW, clip_high=HIGH)
    result.loss.sum().backward()
    active = torch.where(advantages > 0, ratios > 1 + HIGH, ratios < 1 - LOW)
    bound = torch.where(advantages > 0, 1 + HIGH, 1 - LOW)
    torch.testing.assert_close(result.loss, -advantages * torch.where(active, bound, ratios))
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.where(active, 0.0, -ratios * advantages))
    assert result.clipped.tolist() == active.tolist()
    assert int(active.sum()) == 3
    torch.testing.assert_close(result.ratio, ratios)


def test_clip_higher_lets_more_through_than_a_symmetric_clip() -> None:
    policy, old, one = f64(math.log(1.25)), f64(0.0), f64(1.0)
    assert not policy_loss(policy, old, one, clip_low=0.2, clip_high=0.28).clipped.any()
    assert policy_loss(policy, old, one, clip_low=0.2, clip_high=0.2).clipped.all()


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    """At ratio 1 the loss is -A and its gradient -A·grad log p, to the bit."""
    policy = torch.tensor([-0.1, -3.0, -30.0], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3, 0.0])
    loss = policy_loss(policy, policy.detach(), advantages, clip_low=0.2, clip_high=0.2).loss
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantages)
    assert policy.grad is not None
    assert torch.equal(policy.grad, -advantages)


@pytest.mark.parametrize("log_ratio", [30.0, -30.0, 200.0, -200.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    policy = torch.tensor([log_ratio], requires_grad=True)
    result = policy_loss(
        policy, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2
    )
    result.loss.sum().backward()
    expected = -min(
        math.exp(math.copysign(20, log_ratio)) * advantage,
        min(max(log_ratio, 0.8), 1.2) * advantage,
    )
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)
    assert policy.grad is not None
    assert policy.grad.item() == 0


def test_the_step_adds_losses_by_both_weights() -> None:
    policy, weights, shares = f64(0.1, -0.1).requires_grad_(), f64(0.5, 2.0), f64(0.1, 0.3)
    inputs = loss_inputs(
        policy, f64(0, 0), f64(1, -1), Objective(), importance_weights=weights, token_weights=shares
    )
    outputs = clip(inputs)
    total = weighted_sum(outputs, inputs)
    torch.testing.assert_close(total, (outputs.loss * f64(0.05, 0.6)).sum())
    total.backward()
    torch.testing.assert_close(policy.grad, -policy.exp().detach() * f64(1, -1) * f64(0.05, 0.6))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_values_and_gradients_at_given_differences(estimator: str) -> None:
    d = f64(-30, -1, -1e-3, 0, 1e-3, 1, 5)
    policy = (-d).requires_grad_()
    value = kl_penalty(policy, torch.zeros_like(d), estimator)
    value.sum().backward()
    values = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1}
    gradients = {"k1": torch.ones_like(d), "k2": -d, "k3": 1 - torch.exp(d)}
    torch.testing.assert_close(value.detach(), values[estimator])
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, gradients[estimator])


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_of_equal_logprobs_is_exactly_zero(estimator: str) -> None:
    logprobs = torch.randn(50)
    found = kl_penalty(logprobs, logprobs.clone(), estimator)
    assert torch.equal(found.view(torch.int32), torch.zeros(50, dtype=torch.int32)), "and not -0"


def test_kl_estimators_have_the_mean_and_the_mean_gradient_that_they_claim() -> None:
    """Exactly, by summing over a whole distribution instead of sampling from it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    weight = policy.detach().exp()
    forward_kl = (policy.exp() * (policy - reference)).sum()
    reverse_kl = (reference.exp() * (reference - policy)).sum()
    for estimator, kl in (("k1", None), ("k2", forward_kl), ("k3", reverse_kl)):
        value = (weight * kl_penalty(policy, reference, estimator)).sum()
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        (expected,) = (
            (torch.zeros_like(logits),)
            if kl is None
            else torch.autograd.grad(kl, logits, retain_graph=True)
        )
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-9)
        if estimator != "k2":  # k2 is biased in value
            assert value.item() == pytest.approx(forward_kl.item(), rel=1e-12)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_stays_finite_for_extreme_differences(estimator: str) -> None:
    policy = torch.tensor([0.0, -200.0], requires_grad=True)
    value = kl_penalty(policy, torch.tensor([-200.0, 0.0]), estimator)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()


def test_token_weights_are_the_four_averages() -> None:
    lengths = [3, 1, 0, 4]
    per_token = f64(*range(1, 9))
    sequence = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])

    def loss(aggregation: str) -> float:
        weights = torch.tensor(token_weights(lengths, aggregation, 10), dtype=torch.float64)
        return float((per_token * weights[sequence]).sum())

    assert loss("token_mean") == pytest.approx(36 / 8)
    assert loss("sequence_mean") == pytest.approx((2 + 4 + 0 + 6.5) / 4)
    assert loss("sequence_sum") == pytest.approx((6 + 4 + 0 + 26) / 4)
    assert loss("constant") == pytest.approx(36 / (4 * 10))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_tokens_are_no_error(aggregation: str) -> None:
    assert token_weights([], aggregation, 10) == []
    assert all(math.isfinite(w) for w in token_weights([0, 0], aggregation, 10))


def test_averages_per_micro_batch_would_not_be_the_average_of_the_batch() -> None:
    """The negative control of split-independence: the mean of the parts' own means is another
    number."""
    whole = token_weights([4, 1], "token_mean", 10)
    parts = [token_weights([length], "token_mean", 10)[0] / 2 for length in (4, 1)]
    assert whole == pytest.approx([0.2, 0.2])
    assert parts == pytest.approx([0.125, 0.5])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    """ratio 5 with A = -2 costs 10; with c = 3 it costs 6 and has no gradient. Good tokens are as
    before."""
    policy = f64(5.0, 2.0, 5.0).log().requires_grad_()
    advantages = f64(-2.0, -2.0, 2.0)
    result = policy_loss(
        policy, f64(0, 0, 0), advantages, clip_low=LOW, clip_high=HIGH, dual_clip=3.0
    )
    torch.testing.assert_close(result.loss, f64(6.0, 4.0, -2.0 * (1 + HIGH)))
    result.loss.sum().backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, f64(0.0, 4.0, 0.0))
    assert result.clipped.tolist() == [True, False, True]


def test_cispo_keeps_a_gradient_where_the_clip_has_none() -> None:
    """-sg(clip(ratio))·A·log p: the gradient is the clipped ratio times -A, for clipped tokens
    too."""
    ratios, advantages = f64(0.5, 1.0, 3.0, 9.0), f64(1.0, -1.0, 2.0, -2.0)
    policy = ratios.log().requires_grad_()
    options = {"clip_low": 1.0, "clip_high": 4.0}
    result = policy_loss(policy, torch.zeros(4), advantages, loss="cispo", **options)
    result.loss.sum().backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, -f64(0.5, 1.0, 3.0, 5.0) * advantages)
    assert result.clipped.tolist() == [False, False, False, True]


def test_one_ratio_for_a_sequence_is_the_geometric_mean() -> None:
    """GSPO: ratios 2 and 0.5 make 1, 4 and 1 make 2; the gradient of a token is its share, ratio·A
    / tokens."""
    policy = f64(2.0, 0.5, 4.0, 1.0, 1.1).log().requires_grad_()
    advantages, sequence = f64(1.0, 1.0, -1.0, -1.0, 3.0), torch.tensor([0, 0, 2, 2, 3])
    options = {"clip_low": 0.2, "clip_high": 0.2}
    result = policy_loss(
        policy, torch.zeros(5), advantages, ratio="sequence", sequence=sequence, **options
    )
    torch.testing.assert_close(result.ratio, f64(1.0, 1.0, 2.0, 2.0, 1.1))
    torch.testing.assert_close(result.loss, f64(-1.0, -1.0, 2.0, 2.0, -3.3))
    result.loss.sum().backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, f64(-1.0, -1.0, 2.0, 2.0, -3.3))
    alone = policy_loss(policy.detach(), torch.zeros(5), advantages, **options).loss
    assert not torch.allclose(alone, result.loss)  # the control: a ratio per token


def test_one_sequence_is_a_batch_of_one() -> None:
    assert token_weights([3], "constant", 10) == [1 / 10]
    assert (
        token_weights([3], "sequence_mean", 10) == token_weights([3], "token_mean", 10) == [1 / 3]
    )
    assert token_weights([1], "token_mean", 10) == [1.0]

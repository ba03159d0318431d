"""`kl_estimator: k3-unbiased` against TRL 1.16's GRPOTrainer (`use_bias_correction_kl`, its
default): its formula restated, and where trl is installed its own code, loss and gradient, on and
off policy."""

from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.rl import Objective
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.loss import clip, kl_in_loss, kl_penalty, token_weights
from tests.rl.helpers import loss_inputs
from tests.rl.test_sources import LENGTHS, generator, padded
from tests.rl.trl_loss import needs_trl, trl_loss

BETA = 0.3


def case(level: str, off_policy: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Policy (with a gradient), old, reference and advantages of each token, in float64."""
    policy = (
        -torch.rand(sum(LENGTHS), generator=generator(3), dtype=torch.float64) * 3
    ).requires_grad_()
    old, reference = (
        policy.detach()
        + spread * torch.randn(len(policy), generator=generator(seed), dtype=torch.float64)
        for spread, seed in ((off_policy, 4), (0.8, 5))
    )
    per_sequence = torch.randn(len(LENGTHS), generator=generator(6), dtype=torch.float64)
    return policy, old, reference, per_sequence.repeat_interleave(torch.tensor(LENGTHS))


def ours(level: str, off_policy: float, estimator: str = "k3-unbiased") -> tuple[Tensor, Tensor]:
    """Loss, and its gradient by the policy's log-probabilities."""
    policy, old, reference, advantages = case(level, off_policy)
    objective = Objective(
        ratio=level, kl_coefficient=BETA, kl_estimator=estimator, loss_aggregation="token_mean"
    )
    weights = torch.tensor(token_weights(LENGTHS, "token_mean", 10), dtype=torch.float64)
    given = {
        "reference_logprobs": reference,
        "token_weights": weights.repeat_interleave(torch.tensor(LENGTHS)),
        "sequence": torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
    }
    inputs = loss_inputs(policy, old, advantages, objective, **given)
    total = (
        weighted_sum(clip(inputs), inputs)
        + BETA * (kl_in_loss(inputs) * inputs.token_weights).sum()
    )
    (gradient,) = torch.autograd.grad(total, policy)
    return total.detach(), gradient


def restated(level: str, off_policy: float) -> tuple[Tensor, Tensor]:
    """trl/trainer/grpo_trainer.py, `_compute_loss`, with `loss_type="dapo"`."""
    flat, *others, advantages = case(level, off_policy)
    policy, mask = padded(flat)
    old, reference, advantages = (padded(each)[0] for each in (*others, advantages))
    log_ratio = policy - old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    ratio = torch.exp(log_ratio)
    kl = (torch.exp(reference - policy) - (reference - policy) - 1) * ratio
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + BETA * kl
    total = (losses * mask).sum() / mask.sum()
    (gradient,) = torch.autograd.grad(total, flat)
    return total.detach(), gradient


def trls(level: str, off_policy: float) -> tuple[Tensor, Tensor]:
    """TRL's own `_compute_loss`, given log-probabilities in place of a model."""
    policy, old, reference, advantages = case(level, off_policy)
    given = {"importance_sampling_level": level, "loss_type": "dapo", "beta": BETA}
    return trl_loss(policy, old, advantages, reference=reference, **given)


INSTALLED = pytest.param(trls, marks=needs_trl, id="trl")


@pytest.mark.slow
@pytest.mark.parametrize("theirs", [pytest.param(restated, id="restated"), INSTALLED])
@pytest.mark.parametrize("off_policy", [0.0, 0.5])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_and_gradient_are_trls(level: str, off_policy: float, theirs: Any) -> None:
    """The control is k3, which has another gradient on policy, and off policy another loss too."""
    found, expected = ours(level, off_policy), theirs(level, off_policy)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    loss, gradient = ours(level, off_policy, "k3")
    assert not torch.allclose(gradient, expected[1], rtol=1e-3)
    assert torch.allclose(loss, expected[0]) == (off_policy == 0)


def test_on_policy_the_gradient_is_that_of_k2() -> None:
    torch.testing.assert_close(
        ours("token", 0.0)[1], ours("token", 0.0, "k2")[1], rtol=1e-9, atol=1e-12
    )
    assert not torch.allclose(ours("token", 0.5)[1], ours("token", 0.5, "k2")[1], rtol=1e-3)


def test_off_policy_its_mean_and_its_gradient_are_those_of_the_kl() -> None:
    """By summing over a whole distribution: tokens of an old policy, weighed by how often it draws
    them; the control is k3, which takes the old policy's tokens for the policy's."""
    logits = torch.randn(6, generator=generator(0), dtype=torch.float64).requires_grad_()
    old, reference = torch.log_softmax(
        torch.randn(2, 6, generator=generator(1), dtype=torch.float64), -1
    )
    policy = torch.log_softmax(logits, 0)
    expected = (policy.exp() * (policy - reference)).sum()
    objective = Objective(kl_coefficient=1.0, kl_estimator="k3-unbiased")
    inputs = loss_inputs(policy, old, torch.zeros(6), objective, reference_logprobs=reference)
    value, plain = (
        (old.exp() * kl).sum() for kl in (kl_in_loss(inputs), kl_penalty(policy, reference, "k3"))
    )
    wanted = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, logits, retain_graph=True), wanted)
    assert not torch.allclose(plain, expected, rtol=1e-2)
    assert not torch.allclose(torch.autograd.grad(plain, logits)[0], wanted[0], rtol=1e-2)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_sum"])
def test_extreme_ratios_leave_it_finite(level: str) -> None:
    policy = torch.tensor([0.0, -200.0], requires_grad=True)
    old, reference = torch.tensor([-200.0, 0.0]), torch.tensor([0.0, -0.0])
    objective = Objective(ratio=level, kl_coefficient=1.0, kl_estimator="k3-unbiased")
    value = kl_in_loss(
        loss_inputs(policy, old, torch.zeros(2), objective, reference_logprobs=reference)
    )
    (gradient,) = torch.autograd.grad(value.sum(), policy)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()

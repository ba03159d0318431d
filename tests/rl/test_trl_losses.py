"""Losses by name against their sources, off policy, value and gradient: their formula restated on
padded batches in float64, and TRL 1.16's own code where trl is installed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.rl import OBJECTIVES, ResolvedObjective
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.loss import LOSSES, token_weights
from tests.rl.helpers import loss_inputs
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


def ours(preset: str, **changed: Any) -> Found:
    """Loss and gradient of a preset, some of its parts `changed`."""
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
        token_weights=weights.repeat_interleave(COUNTS),
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(COUNTS),
    )
    total = weighted_sum(LOSSES[objective.loss](inputs), inputs)
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

"""A loss says what it needs of the learner: what it reads, and no more; and where a factor of 0 makes
a gradient 0."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.rl import Objective, ResolvedObjective
from isobit.rl.algorithm.given import GIVEN_LOSSES, supervised_objective
from isobit.rl.algorithm.loss import LOSSES, Loss, LossInputs, PolicyLoss
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.rl.stepwise.losses import LOSSES as STEPWISE
from isobit.rl.stepwise.losses import Rows
from tests.models import tiny_model
from tests.rl.helpers import alternating, loss_inputs, make_learner, roll_out

EVERY: dict[str, PolicyLoss] = LOSSES | GIVEN_LOSSES
COUNT = 12


def inputs(advantages: Tensor, *names: str) -> LossInputs:
    """Two sequences of random tokens, with what is named besides the policy's forward."""
    random = torch.Generator().manual_seed(2)
    policy = (-3 * torch.rand(COUNT, generator=random)).requires_grad_()
    old = policy.detach() + 0.1 * torch.randn(COUNT, generator=random)
    known = {
        "reference": ("reference_logprobs", old - 0.2),
        "divergence": ("divergence", policy**2),
    }
    more = dict(known[name] for name in names if name in known)
    sequence = torch.arange(COUNT) // (COUNT // 2)
    return loss_inputs(policy, old, advantages, ResolvedObjective(), sequence=sequence, **more)


@pytest.mark.parametrize("name", EVERY)
def test_a_loss_reads_what_it_needs(name: str) -> None:
    """With that it has a loss. The control is without."""
    loss = EVERY[name]
    advantages = torch.ones(COUNT)
    assert bool(loss(inputs(advantages, *loss.needs)).loss.isfinite().all())
    if {"reference", "divergence"} & {*loss.needs}:
        with pytest.raises(AssertionError):
            loss(inputs(advantages))


@pytest.mark.parametrize("name", EVERY)
def test_a_factor_of_0_makes_the_gradient_0(name: str) -> None:
    """The control: where no factor is declared, the gradient is not 0."""
    loss = EVERY[name]
    given = inputs(torch.zeros(COUNT), *loss.needs)
    loss(given).loss.sum().backward()  # type: ignore[no-untyped-call]
    gradient = given.policy_logprobs.grad
    teaches = gradient is not None and bool(gradient.any())
    assert teaches == (loss.factor is None and name != "kto")
    assert loss.factor in (None, "advantages")


@pytest.mark.parametrize("name", STEPWISE)
def test_so_it_is_of_the_losses_of_the_stepwise_learner(name: str) -> None:
    loss, random = STEPWISE[name], torch.Generator().manual_seed(3)
    logprobs = (-torch.rand(COUNT, generator=random)).requires_grad_()
    read = {key: torch.rand(COUNT, generator=random) for key in loss.needs}
    read |= {key: torch.full((COUNT,), value) for key, value in loss.options.items()}
    if loss.factor is not None:
        read[loss.factor] = torch.zeros(COUNT)
    sequence = torch.zeros(COUNT, dtype=torch.int64)
    loss(Rows(logprobs, read, sequence)).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert bool(logprobs.grad.any()) == (loss.factor is None)
    for key in loss.needs:
        rows = Rows(logprobs, {k: v for k, v in read.items() if k != key}, sequence)
        with pytest.raises(KeyError):
            loss(rows)


def test_a_learner_provides_what_a_loss_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that nobody knows by name: its reference, its step's KL, its pairs. The control
    declares nothing, and has none of these."""
    seen: list[LossInputs] = []

    def noted(given: LossInputs) -> object:
        seen.append(given)
        return LOSSES["reinforce"](given)

    model = tiny_model(scale=4)
    samples = roll_out(model, group_size=3)[:9]
    other = tiny_model(scale=4, seed=1)
    for needs in (("reference", "kl_baseline", "pairs"), ()):
        seen.clear()
        monkeypatch.setattr(
            "isobit.rl.learner.learner.loss_function", lambda name, needs=needs: Loss(noted, needs)
        )
        more = {"reference": other} if needs else {}
        learner = make_learner(model, Objective(loss="mine.py:loss"), micro_batch_tokens=1, **more)
        learner.learn(samples, alternating(samples), 0)
        assert {given.reference_logprobs is not None for given in seen} == {bool(needs)}
        assert {given.settings.kl_baseline > 0 for given in seen} == {bool(needs)}
        sizes = [int(given.sequence.max()) + 1 for given in seen]
        assert sizes == ([2, 2, 2, 2, 1] if needs else [1] * 9)


def test_a_reference_is_there_where_it_is_needed_alone() -> None:
    model, other = tiny_model(scale=4), tiny_model(scale=4, seed=1)
    optimizer = ShardedOptimizer.of(model, OptimizerSettings())
    for objective in (supervised_objective("dpo"), ResolvedObjective(kl_coefficient=0.1)):
        with pytest.raises(AssertionError):
            Learner(model, optimizer, objective)
        Learner(model, optimizer, objective, reference=other)
    for objective in (supervised_objective(), replace(ResolvedObjective(), loss="cispo")):
        with pytest.raises(AssertionError):
            Learner(model, optimizer, objective, reference=other)
        Learner(model, optimizer, objective)

"""The entropy in the loss: its bonus, constant and adapted, and tokens of high entropy alone; and
truncated completions, left out. Against TRL 1.16's own code where trl is installed."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.rl import OBJECTIVES, Objective, ResolvedObjective, Sample
from isobit.rl.algorithm.entropy import EntropyBonus
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.loss import LOSSES
from isobit.rl.learner.batch import training_batch
from isobit.rl.learner.forward import forward
from isobit.rl.learner.gradient import OptimizerBatch
from isobit.rl.learner.packing import pack
from isobit.rl.learner.schedule import Update
from tests.models import tiny_model
from tests.rl.helpers import alternating, gradients, make_learner, roll_out
from tests.rl.test_sources import LENGTHS, generator
from tests.rl.test_trl_losses import Found, case
from tests.rl.trl_loss import needs_trl, trl_loss

ENTROPY = (2 * torch.rand(sum(LENGTHS), generator=generator(7))).double()  # as the head has it
TRUNCATED = torch.tensor([i % 3 == 1 for i in range(len(LENGTHS))])


def ours(preset: str, **changed: object) -> Found:
    """Loss and gradient of the whole batch by its own tensors, the old log-probabilities being the
    rollout's."""
    policy, old, advantages = case()
    objective = ResolvedObjective.of(OBJECTIVES[preset], max_new_tokens=10, **changed)
    rows = old.float().split(LENGTHS)
    samples = [
        Sample(0, i, (1,), (2,) * len(row), tuple(row.tolist()), "", bool(TRUNCATED[i]), 0)
        for i, row in enumerate(rows)
    ]
    batch = training_batch(objective, samples, advantages.tolist(), 0)
    batch = replace(batch, old=old.split(LENGTHS), advantages=_each(advantages))
    if objective.top_entropy_quantile < 1:
        batch = batch.of_high_entropy(ENTROPY.split(LENGTHS))
    everything = range(len(samples))
    coefficient = EntropyBonus.of(objective).applied(objective)
    one = OptimizerBatch.of(batch, Update(everything, [everything]), coefficient)
    assert one is not None
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    inputs = one.loss_inputs(0, policy, ENTROPY, sequence)
    total = weighted_sum(LOSSES[objective.loss](inputs), inputs)
    total = total - one.entropy_coefficient * (inputs.entropy * inputs.token_weights).sum()
    (gradient,) = torch.autograd.grad(total, policy)
    return total.detach(), gradient


def _each(advantages: Tensor) -> list[Tensor]:
    return [advantages[i].expand(length) for i, length in enumerate(LENGTHS)]


def near(found: Found, expected: Found) -> bool:
    """Weights of tokens are float32 here, and float64 in `expected`."""
    return all(torch.allclose(a, b.double(), rtol=3e-6, atol=1e-9) for a, b in zip(found, expected))


@needs_trl
@pytest.mark.parametrize(("preset", "kind"), [("grpo", "grpo"), ("dapo", "dapo")])
def test_truncated_completions_are_left_out_as_trl_does(preset: str, kind: str) -> None:
    """Under grpo they still count as sequences. The control has them in."""
    policy, old, advantages = case()
    high = OBJECTIVES[preset].clip_high
    given = {"loss_type": kind, "epsilon_high": high}
    expected = trl_loss(policy, old, advantages, truncated=TRUNCATED, **given)
    assert near(ours(preset, mask_truncated=True), expected)
    assert not near(ours(preset), expected)


@needs_trl
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_tokens_of_high_entropy_alone_are_those_of_trl(share: float) -> None:
    """Truncated ones have no part in the quantile. The controls: all tokens, and another share."""
    policy, old, advantages = case()
    given = {"top_entropy_quantile": share, "entropy": ENTROPY, "truncated": TRUNCATED}
    expected = trl_loss(policy, old, advantages, loss_type="grpo", **given)
    found = ours("grpo", top_entropy_quantile=share, mask_truncated=True)
    assert near(found, expected)
    assert 0 < int((found[1] == 0).sum()) < len(found[1])
    assert not near(ours("grpo", mask_truncated=True), expected)
    assert not near(ours("grpo", top_entropy_quantile=0.35, mask_truncated=True), expected)


@needs_trl
def test_the_bonus_is_trls_where_the_loss_is_a_mean_over_tokens() -> None:
    """The control: another coefficient."""
    policy, old, advantages = case()
    expected = trl_loss(
        policy,
        old,
        advantages,
        loss_type="dapo",
        epsilon_high=0.28,
        entropy=ENTROPY,
        _entropy_bonus_enabled=True,
        entropy_coef=0.05,
        use_adaptive_entropy=False,
    )
    assert near(ours("dapo", entropy_coefficient=0.05), expected)
    assert not near(ours("dapo", entropy_coefficient=0.04), expected)


@needs_trl
def test_the_coefficient_adapts_as_trls() -> None:
    """Up at or below the target, down above, within bounds, and applied only at or below. The
    control: another target."""
    settings = {"entropy_target": 0.5, "entropy_coef_delta": 0.02}
    args = settings | {"entropy_coef_min": 0.0, "entropy_coef_max": 0.07}
    own: dict[str, object] = {"entropy_coef": 0.03, "_last_world_entropy": math.inf}
    own |= {"_entropy_window_stats": None, "current_gradient_accumulation_steps": 1}
    means = (0.9, 0.5, 0.4, 0.3, 0.2, 0.6, 0.7, 0.8, 0.9, 0.1)
    theirs = []
    for mean in means:
        policy, old, advantages = case()
        state = {k: own[k] for k in ("entropy_coef", "_last_world_entropy")}
        given = {"_entropy_bonus_enabled": True, "use_adaptive_entropy": True, "args": args}
        entropy = torch.full_like(policy.detach(), mean)
        trl_loss(
            policy,
            old,
            advantages,
            loss_type="dapo",
            entropy=entropy,
            own=own,
            _entropy_window_stats=None,
            **given,
            **state,
        )
        theirs.append(own["entropy_coef"])

    def adapted(target: float) -> list[float]:
        objective = Objective(
            entropy_coefficient=0.03,
            entropy_target=target,
            entropy_coefficient_step=0.02,
            entropy_coefficient_max=0.07,
        )
        bonus, found = EntropyBonus.of(objective), []
        assert bonus.applied(objective) == 0.0, "nothing is known before the first step"
        for mean in means:
            bonus.stepped(mean, objective)
            found.append(bonus.coefficient)
            assert bonus.applied(objective) == (bonus.coefficient if mean <= target else 0.0)
        return found

    assert adapted(0.5) == pytest.approx(theirs)
    assert adapted(0.35) != pytest.approx(theirs)


def _of_bonus(samples: Sequence[Sample], coefficient: float) -> dict[str, Tensor]:
    """The gradient of -coefficient · the mean entropy, by autograd of the forward alone."""
    model = tiny_model("fp8", scale=8)
    _, entropy = forward(model, pack(samples, True), 1.0)
    weights = torch.full_like(entropy, 1.0 / len(entropy)).detach()
    (-coefficient * (entropy * weights).sum()).backward()
    leaves = model.transformer.masters.leaves
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def test_a_bonus_alone_has_the_gradient_of_the_entropy_bit_for_bit() -> None:
    """Without an advantage no sample is left out then. The control: another coefficient."""
    objective = Objective(loss_aggregation="token_mean", entropy_coefficient=0.5)
    samples = roll_out(tiny_model("fp8", scale=8))
    learner = make_learner(tiny_model("fp8", scale=8), objective)
    found = gradients(learner, samples, [0.0] * len(samples))
    expected = _of_bonus(samples, 0.5)
    assert found.keys() == expected.keys()
    assert any(bool(g.any()) for g in found.values())
    assert all(torch.equal(found[name], expected[name]) for name in found)
    other = _of_bonus(samples, 0.25)
    assert not all(torch.equal(found[name], other[name]) for name in found)


def test_a_bonus_raises_the_entropy_of_a_policy() -> None:
    """The control: without one, and without advantages, nothing moves."""

    def after(coefficient: float) -> list[float]:
        model = tiny_model("fp8", scale=8)
        learner = make_learner(model, Objective(entropy_coefficient=coefficient), rate=1e-3)
        samples, found = roll_out(model), []
        for step in range(4):
            found.append(learner.learn(samples, [0.0] * len(samples), step).metrics["entropy"])
            model.sync()
        return found

    rising = after(1.0)
    assert rising == sorted(rising)
    assert rising[-1] > rising[0] + 1e-3
    assert len({value for value in after(0.0) if not math.isnan(value)}) <= 1


def test_a_batch_of_truncated_completions_alone_changes_nothing() -> None:
    samples = [replace(s, truncated=True) for s in roll_out(tiny_model("fp8", scale=8))]
    learner = make_learner(tiny_model("fp8", scale=8), Objective(mask_truncated=True))
    before = {name: p.clone() for name, p in learner.model.named_parameters().items()}
    metrics = learner.learn(samples, alternating(samples), 0).metrics
    assert metrics["steps/skipped"] == 1
    assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters().items())


def test_truncated_completions_are_computed_no_more_than_those_without_an_advantage() -> None:
    """In micro-batches of their own they have no backward, and the gradient is that of the batch in
    which they are computed and weigh nothing."""
    samples = [replace(s, truncated=i % 2 == 0) for i, s in enumerate(roll_out(tiny_model("bf16")))]
    advantages = alternating(samples)
    found = {}
    for budget in (40, 4096):
        learner = make_learner(
            tiny_model("bf16"), Objective(mask_truncated=True), micro_batch_tokens=budget
        )
        found[budget] = gradients(learner, samples, advantages)
    for name, gradient in found[40].items():
        torch.testing.assert_close(gradient, found[4096][name], rtol=2e-2, atol=1e-3)

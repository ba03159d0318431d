"""What must not change the weights: losses and gradients that are not finite, and batches with
nothing to learn."""

import math
from dataclasses import replace

import pytest
import torch

from isobit.rl import OBJECTIVES, Objective, for_precision
from isobit.rl.algorithm.correction_rule import CorrectionRule, Rejection
from isobit.run import metrics
from tests.models import tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out, same_bits, snapshot
from tests.rl.supervised import supervised_update


@pytest.mark.parametrize("precision", ["fp8", "bf16", "float32"])
@pytest.mark.parametrize("injection", ["advantage", "logprob", "gradient"])
def test_a_step_that_is_not_finite_changes_no_bit(precision: str, injection: str) -> None:
    """NaN in the loss; and a finite loss whose gradient is not. The control is the good step
    before."""
    model = tiny_model(precision)
    samples, learner = roll_out(model), make_learner(model)
    start = snapshot(learner)
    assert learner.learn(samples, alternating(samples), 0).metrics["steps/skipped"] == 0
    before = snapshot(learner)
    assert not same_bits(start, before)
    advantages = alternating(samples)
    if injection == "advantage":
        advantages[3] = math.nan
    elif injection == "logprob":
        samples[3] = replace(
            samples[3], rollout_logprobs=(math.nan,) * len(samples[3].completion_ids)
        )
    else:
        hook = next(iter(model.parameters())).register_hook(lambda gradient: gradient * math.inf)
    model.sync()
    for count in (1, 2):
        result = learner.learn(samples, advantages, count).metrics
        assert result["steps/skipped"] == 1
        assert learner.bad_steps_in_a_row == count
        assert same_bits(snapshot(learner), before)
        assert all(p.grad is None for p in model.parameters())
        assert all(
            math.isnan(result[name]) for name in ("loss/policy", "loss/kl", "grad_norm", "entropy")
        )
        metrics.check(result)
    if injection == "gradient":
        hook.remove()
    samples = roll_out(model)
    assert learner.learn(samples, alternating(samples), 3).metrics["steps/skipped"] == 0
    assert learner.bad_steps_in_a_row == 0


def test_only_the_bad_one_of_several_updates_is_skipped() -> None:
    model = tiny_model()
    samples = roll_out(model)
    advantages = alternating(samples)
    advantages[0] = math.nan
    learner = make_learner(model, Objective(updates_per_batch=4))
    result = learner.learn(samples, advantages, 0).metrics
    assert result["steps/skipped"] == 1
    assert {float(v) for n, v in learner.optimizer.state().items() if n.endswith(".step")} == {3.0}
    assert all(
        math.isfinite(result[name])
        for name in ("loss/policy", "grad_norm", "entropy", "clip_fraction")
    )
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_old_logprobs_that_cannot_be_computed_are_a_bad_step() -> None:
    """Infinite weights in the learner's own flow: found in the pass before any update."""
    model = tiny_model("fp8-unified")
    samples = roll_out(model)
    learner = make_learner(
        model, for_precision(Objective(recompute_old_logprobs="always"), model.precision)
    )
    norm = model.transformer._working["learner"].layers[0].input_norm
    assert norm is not None
    norm.working.fill_(math.inf)
    before = snapshot(learner)
    result = learner.learn(samples, alternating(samples), 0).metrics
    assert (result["steps/skipped"], learner.bad_steps_in_a_row) == (1, 1)
    assert same_bits(snapshot(learner), before)
    assert "mismatch/differing_tokens" not in result  # nothing was compared, which is not agreement


def test_a_supervised_step_that_is_not_finite_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    samples, learner = roll_out(model), make_learner(model)
    before = snapshot(learner)
    with monkeypatch.context() as patch:
        patch.setattr(learner.optimizer, "gradient_norm", lambda: math.inf)
        assert (
            supervised_update(model, learner.optimizer, samples, 1e-3, 1000)["steps/skipped"] == 1
        )
    assert same_bits(snapshot(learner), before)
    assert supervised_update(model, learner.optimizer, samples, 1e-3, 1000)["steps/skipped"] == 0
    assert not same_bits(snapshot(learner), before)


@pytest.mark.parametrize("preset", list(OBJECTIVES))
@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_a_batch_with_nothing_to_learn_is_no_crash_and_no_update(
    preset: str, recompute: str
) -> None:
    """No sample scored; or only empty completions."""
    model = tiny_model()
    objective = for_precision(
        replace(OBJECTIVES[preset], recompute_old_logprobs=recompute), model.precision
    )
    learner = make_learner(model, replace(objective, updates_per_batch=2))
    samples = roll_out(model)
    learner.learn(samples, alternating(samples), 0)
    before = snapshot(learner)
    empty = [replace(s, completion_ids=(), rollout_logprobs=()) for s in samples]
    for batch in ([], empty):
        result = learner.learn(batch, alternating(batch), 1).metrics
        assert result["steps/skipped"] == 0
        assert learner.bad_steps_in_a_row == 0
        assert same_bits(snapshot(learner), before)
        assert "mismatch/differing_tokens" not in result
    assert supervised_update(model, learner.optimizer, empty, 1e-3, 1000)["steps/skipped"] == 0


def test_empty_completions_among_others_have_no_gradient() -> None:
    model = tiny_model("float32")
    samples = roll_out(model)
    empty = replace(samples[0], completion_ids=(), rollout_logprobs=())
    with_empty = make_learner(model, Objective(loss_aggregation="token_mean"))
    result = with_empty.learn([samples[1], empty, samples[2]], [1.0, 5.0, -1.0], 0).metrics
    without = make_learner(tiny_model("float32"), Objective(loss_aggregation="token_mean"))
    expected = without.learn([samples[1], samples[2]], [1.0, -1.0], 0).metrics
    assert result["loss/policy"] == pytest.approx(expected["loss/policy"], rel=1e-6)
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_a_batch_that_is_rejected_whole_is_a_skipped_step_and_no_crash() -> None:
    """It says nothing about the weights, so it is not a bad step either. The control rejects
    nothing."""
    model = tiny_model("fp8-rollout")
    samples = roll_out(model)
    for low, skipped in ((1e6, 2), (0.0, 0)):
        rule = CorrectionRule("token", rejection=Rejection(low=low))
        objective = for_precision(Objective(updates_per_batch=2, correction=rule), model.precision)
        learner = make_learner(model, objective)
        before = snapshot(learner)
        result = learner.learn(samples, alternating(samples), 0).metrics
        assert result["steps/skipped"] == skipped
        assert learner.bad_steps_in_a_row == 0
        assert same_bits(snapshot(learner), before) == (skipped == 2)
        assert result["correction/rejected_fraction"] == (1.0 if skipped else 0.0)
        metrics.check(result)

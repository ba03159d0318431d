"""The learner on tiny models: gradients, old log-probabilities, mismatch, KL, several updates,
resuming."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit.model import Model
from isobit.rl import OBJECTIVES, Objective, ResolvedObjective, Sample, for_precision
from isobit.rl.algorithm.correction_rule import CorrectionRule, Rejection
from isobit.rl.algorithm.objective import AGGREGATIONS
from isobit.rl.learner.forward import forward
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.packing import pack
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.run import metrics
from tests.models import tiny_model
from tests.rl.helpers import (
    alternating,
    distance,
    gradients,
    make_learner,
    roll_out,
    same_bits,
    snapshot,
)
from tests.rl.supervised import supervised_update


def written_out_loss(
    objective: ResolvedObjective, logprobs: Tensor, olds: Sequence[float], advantage: float
) -> list[Tensor]:
    """Of each token of a sequence, in the plain formulas of the papers."""
    low, high, terms = objective.clip_low, objective.clip_high, []
    log_ratios = logprobs - torch.tensor(olds)
    whole = torch.exp(log_ratios.sum() if objective.ratio == "sequence_sum" else log_ratios.mean())
    if objective.loss == "gmpo":
        most = log_ratios.clamp(max=high) if advantage > 0 else log_ratios.clamp(min=-low)
        return [-torch.exp(most.mean()) * advantage] * len(olds)
    if objective.loss == "vespo":
        w, i = float(log_ratios.detach().sum().exp()), 0 if advantage >= 0 else 1
        k, rate = objective.vespo_k[i], objective.vespo_lambda[i]
        return [-(w**k) * math.exp(rate * (1 - w)) * advantage * logprob for logprob in logprobs]
    for logprob, old in zip(logprobs, olds):
        ratio = torch.exp(logprob - old) if objective.ratio == "token" else whole
        bounded = ratio.clamp(1 - low, 1 + high)
        if objective.loss == "cispo":
            terms.append(-bounded.detach() * advantage * logprob)
        elif objective.loss == "sapo":
            tau = objective.sapo_temperatures[0 if advantage > 0 else 1]
            terms.append(-4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage)
        elif objective.loss.startswith("dppo"):
            pi, mu = (min(math.exp(x), 1 - 1e-8) for x in (float(logprob.detach()), old))
            kl = mu * (old - float(logprob.detach())) + (1 - mu) * math.log((1 - mu) / (1 - pi))
            tv = abs(math.exp(float(logprob.detach())) - math.exp(old))
            apart = tv if objective.loss == "dppo_tv" else kl
            leaves = (ratio > 1 and apart > high) if advantage > 0 else (ratio < 1 and apart > low)
            terms.append(-(ratio.detach() if leaves else ratio) * advantage)
        else:
            terms.append(-min(ratio * advantage, bounded * advantage))
    return terms


@pytest.mark.parametrize("preset", list(OBJECTIVES))
def test_the_gradient_is_that_of_the_objective_written_out(preset: str) -> None:
    """Sample by sample, token by token, in the plain formulas of the papers; off-policy, so that
    some tokens clip."""
    model = tiny_model("float32", scale=8)
    samples = [
        replace(s, rollout_logprobs=tuple(x + 0.1 * i for i, x in enumerate(s.rollout_logprobs, 1)))
        for s in roll_out(model)[1::2]
    ]
    samples += roll_out(model)[0::2]
    advantages = alternating(samples)
    objective = ResolvedObjective.of(OBJECTIVES[preset], max_new_tokens=5)
    packed_way = gradients(make_learner(model, objective), samples, advantages)

    num_tokens = sum(len(s.completion_ids) for s in samples)
    loss = torch.zeros(())
    for sample, advantage in zip(samples, advantages):
        logprobs, _ = forward(model, pack([sample]), 1.0)
        terms = written_out_loss(objective, logprobs, sample.rollout_logprobs, advantage)
        scale = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / len(samples) / len(terms),
            "sequence_sum": 1 / len(samples),
            "constant": 1 / len(samples) / 5,
        }
        loss = loss + sum(terms) * scale[objective.loss_aggregation]
    loss.backward()
    written_out = {
        n: p.grad.clone() for n, p in model.named_parameters().items() if p.grad is not None
    }
    assert len(written_out) == len(model.parameters())
    assert distance(packed_way, written_out) < 1e-5


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("fp8", 0.1)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_do_not_depend_on_the_split(
    precision: str, bound: float, aggregation: str
) -> None:
    """To the rounding of sums; under FP8 WGrad to that of its scales, which 128 tokens of a
    micro-batch share."""
    model = tiny_model(precision, scale=8)
    samples = roll_out(model)
    objective = ResolvedObjective(loss_aggregation=aggregation, max_new_tokens=5)
    whole = gradients(make_learner(model, objective), samples, alternating(samples))
    for budget in (1, 17, 60):
        learner = make_learner(model, objective, micro_batch_tokens=budget)
        assert distance(gradients(learner, samples, alternating(samples)), whole) < bound
    half = gradients(make_learner(model, objective), samples[::2], alternating(samples[::2]))
    assert distance(half, whole) > 0.2  # the control: another batch has another gradient


def test_forward_metrics_are_the_same_bits_for_any_split() -> None:
    model = tiny_model(scale=8)
    samples = roll_out(model)
    results = [
        make_learner(tiny_model(scale=8), micro_batch_tokens=budget)
        .learn(samples, alternating(samples), 0)
        .metrics
        for budget in (1, 17, 10_000)
    ]
    for name in ("mismatch/differing_tokens", "mismatch/kl_k3", "clip_fraction"):
        assert [result[name] for result in results] == [0.0] * 3
    assert len({round(result["entropy"], 10) for result in results}) == 1


@pytest.mark.parametrize("precision", ["fp8", "fp8-unified", "bf16", "float32"])
def test_rollout_logprobs_are_the_learners_under_a_unified_precision(precision: str) -> None:
    model = tiny_model(precision, scale=8)
    samples = roll_out(model, temperature=0.7)
    result = (
        make_learner(model, ResolvedObjective(temperature=0.7))
        .learn(samples, alternating(samples), 0)
        .metrics
    )
    assert result["mismatch/differing_tokens"] == 0
    assert result["mismatch/token_mult_prob_error"] == 1
    assert result["clip_fraction"] == 0
    assert not any(name.startswith("correction/") for name in result)
    metrics.check(result)


def test_what_must_differ_differs() -> None:
    """Negative controls: another temperature, weights that have moved, a learner in BF16 under FP8
    rollouts."""
    model = tiny_model(scale=8)
    samples = roll_out(model)
    count = sum(len(s.completion_ids) for s in samples)
    warm = make_learner(model, ResolvedObjective(temperature=0.7))
    assert (
        warm.learn(samples, alternating(samples), 0).metrics["mismatch/differing_tokens"]
        > 0.9 * count
    )
    model.sync()
    moved = make_learner(model).learn(samples, alternating(samples), 1).metrics
    assert moved["mismatch/differing_tokens"] > 0.9 * count
    split = tiny_model("fp8-rollout", scale=8)
    objective = for_precision(Objective(), split.precision)
    samples = roll_out(split)
    result = make_learner(split, objective).learn(samples, alternating(samples), 0).metrics
    assert result["mismatch/differing_tokens"] > 0.9 * count
    assert result["mismatch/token_mult_prob_error"] > 1


def test_recomputed_old_logprobs_and_their_correction() -> None:
    """Ratio 1 at the first update, and each token's loss times min(exp(old - rollout), cap)."""
    model = tiny_model("fp8-rollout", scale=8)
    samples = roll_out(model)
    advantages = alternating(samples)
    rule = CorrectionRule("token", cap=1.01)
    objective = for_precision(
        Objective(loss_aggregation="token_mean", correction=rule), model.precision
    )
    result = make_learner(model, objective).learn(samples, advantages, 0).metrics
    fresh = tiny_model("fp8-rollout", scale=8)
    weighted, losses = [], []
    for sample, advantage in zip(samples, advantages):
        old = fresh.logprobs([sample.prompt_ids + sample.completion_ids])[0][
            len(sample.prompt_ids) - 1 :
        ]
        ratio = torch.exp(
            old.double() - torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
        ).tolist()
        weighted += [min(w, 1.01) for w in ratio]
        losses += [-advantage * min(w, 1.01) for w in ratio]
    assert result["loss/policy"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert result["correction/mean_weight"] == pytest.approx(
        sum(weighted) / len(weighted), rel=1e-6
    )
    assert 0 < result["correction/clipped_fraction"] < 1
    assert 0 < result["correction/effective_sample_size_untruncated"] < 1
    assert result["clip_fraction"] == 0
    metrics.check(result)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_what_is_rejected_can_leave_the_denominator(aggregation: str) -> None:
    """verl's `agg_loss` over a mask that has lost the rejected tokens, policy and KL alike, for any
    split; the control is the average over all."""
    model = tiny_model("fp8-rollout", scale=8)
    reference = tiny_model("fp8-rollout", seed=1, scale=8)
    samples = roll_out(model)
    rejection = Rejection("ratio", "token", 0.8, 1.25)

    def gradient(denominator: str, budget: int = 10_000) -> dict[str, Tensor]:
        rule = CorrectionRule(rejection=rejection, denominator=denominator)
        given = {"loss_aggregation": aggregation, "kl_coefficient": 0.3, "kl_estimator": "k2"}
        objective = ResolvedObjective(max_new_tokens=5, **given)  # type: ignore[arg-type]
        resolved = for_precision(replace(objective, correction=rule), model.precision)
        learner = make_learner(model, resolved, reference=reference, micro_batch_tokens=budget)
        return gradients(learner, samples, alternating(samples))

    losses, masks = [], []
    for sample, advantage in zip(samples, alternating(samples)):
        packed = pack([sample])
        logprobs, _ = forward(model, packed, 1.0)
        with torch.no_grad():
            other, _ = forward(reference, packed, 1.0)
        ratios = torch.exp(logprobs.detach() - torch.tensor(sample.rollout_logprobs))
        masks.append(((ratios >= 0.8) & (ratios <= 1.25)).float())
        surrogate = -advantage * torch.exp(logprobs - logprobs.detach())
        losses.append((surrogate + 0.3 * 0.5 * (other - logprobs) ** 2) * masks[-1])
    kept = sum(float(mask.sum()) for mask in masks)
    assert 0 < kept < sum(len(mask) for mask in masks)
    loss = {
        "token_mean": lambda: torch.cat(losses).sum() / kept,
        "sequence_mean": lambda: torch.stack(
            [row.sum() / (m.sum() + 1e-8) for row, m in zip(losses, masks)]
        ).mean(),
        "constant": lambda: torch.cat(losses).sum() / len(losses) / 5,
    }[aggregation]()
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters().items() if p.grad is not None}
    for budget in (17, 10_000):
        assert distance(gradient("kept", budget), wanted) < 2e-2  # BF16 gradients
    assert distance(gradient("all"), wanted) > 0.05


def test_bypass_takes_the_ratio_to_the_rollout() -> None:
    model = tiny_model("fp8-rollout", scale=8)
    samples = roll_out(model)
    objective = for_precision(
        Objective(clip_low=1e-4, clip_high=1e-4, recompute_old_logprobs="never"), model.precision
    )
    result = make_learner(model, objective).learn(samples, alternating(samples), 0).metrics
    assert result["clip_fraction"] > 0.1  # before any update: the mismatch itself is what clips
    assert result["mismatch/differing_tokens"] > 0
    assert "correction/mean_weight" not in result


def test_several_updates_see_the_weights_of_the_one_before() -> None:
    model = tiny_model(scale=8)
    samples = roll_out(model)
    objective = Objective(updates_per_batch=3, epochs=2, clip_low=0.01, clip_high=0.01)
    learner = make_learner(model, objective, rate=3e-3)
    version, before = model.weights_version, snapshot(learner)
    result = learner.learn(samples, alternating(samples), 0).metrics
    assert model.weights_version == version + 5  # the sixth is the training loop's
    assert {float(v) for n, v in learner.optimizer.state().items() if n.endswith(".step")} == {6.0}
    assert result["mismatch/differing_tokens"] == 0  # measured before the first update
    assert result["clip_fraction"] > 0.1
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters().items())
    once = make_learner(tiny_model(scale=8), replace(objective, updates_per_batch=1, epochs=1))
    assert once.learn(samples, alternating(samples), 0).metrics["clip_fraction"] == 0


def test_learning_is_the_same_bits_again_and_shuffles_by_step() -> None:
    samples = roll_out(tiny_model(scale=8))

    def learned(step: int) -> dict[str, Tensor]:
        learner = make_learner(tiny_model(scale=8), Objective(updates_per_batch=3), seed=5)
        learner.learn(samples, alternating(samples), step)
        return snapshot(learner)

    assert same_bits(learned(0), learned(0))
    assert not same_bits(learned(0), learned(1))


def test_resumed_learning_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Weights and optimizer through files; the control forgets the optimizer."""
    samples = roll_out(tiny_model(scale=8))
    objective = Objective(updates_per_batch=2)

    def advance(learner: Learner, steps: range) -> Learner:
        for step in steps:
            learner.model.sync()
            learner.learn(samples, alternating(samples), step)
        return learner

    straight = advance(make_learner(tiny_model(scale=8), objective), range(4))
    half = advance(make_learner(tiny_model(scale=8), objective), range(2))
    half.model.save(tmp_path / "model")
    save_file(half.optimizer.state(), tmp_path / "optimizer.safetensors")
    resumed = make_learner(Model.load(tmp_path / "model"), objective)
    resumed.optimizer.load_state(load_file(tmp_path / "optimizer.safetensors"))
    forgetful = make_learner(Model.load(tmp_path / "model"), objective)
    assert same_bits(snapshot(advance(resumed, range(2, 4))), snapshot(straight))
    assert not same_bits(snapshot(advance(forgetful, range(2, 4))), snapshot(straight))


def test_a_reference_that_is_the_policy_has_no_kl_and_no_gradient() -> None:
    samples = roll_out(tiny_model("float32", scale=8))
    plain = make_learner(tiny_model("float32", scale=8))
    objective = Objective(kl_coefficient=0.5)
    penalized = make_learner(
        tiny_model("float32", scale=8), objective, reference=tiny_model("float32", scale=8)
    )
    first = penalized.learn(samples, alternating(samples), 0).metrics
    plain.learn(samples, alternating(samples), 0)
    assert first["loss/kl"] == 0
    assert distance(snapshot(penalized), snapshot(plain)) < 1e-6
    penalized.model.sync()
    assert penalized.learn(samples, alternating(samples), 1).metrics["loss/kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3-unbiased"])
def test_the_kl_penalty_pulls_towards_the_reference(estimator: str) -> None:
    """With no advantage it is all that is learned; the reference computes under a precision of its
    own."""
    model, reference = tiny_model("fp8", scale=8), tiny_model("bf16", seed=1, scale=8)
    objective = Objective(kl_coefficient=1.0, kl_estimator=estimator, loss_aggregation="token_mean")
    learner = make_learner(model, objective, rate=3e-3, reference=reference)
    distances = []
    for step in range(18):
        model.sync()
        samples = roll_out(model, seed=step)
        distances.append(learner.learn(samples, [0.0] * len(samples), step).metrics["loss/kl"])
    assert sum(distances[-3:]) < 0.5 * sum(distances[:3])


@pytest.mark.slow
def test_the_probability_of_a_rewarded_token_rises() -> None:
    """Rollouts, rewards and learning under fp8, with the same bits on both sides in every step."""
    model = tiny_model("fp8")
    (seven,) = model.tokenizer.encode("7", add_special=False)
    learner = make_learner(model, Objective(loss_aggregation="token_mean"), rate=1e-2)
    shares, differing = [], 0.0
    for step in range(16):
        model.sync()
        samples = roll_out(model, group_size=8, seed=step)
        rewards = [
            sum(t == seven for t in s.completion_ids) / len(s.completion_ids) for s in samples
        ]
        mean = sum(rewards) / len(rewards)
        shares.append(mean)
        differing += learner.learn(samples, [r - mean for r in rewards], step).metrics[
            "mismatch/differing_tokens"
        ]
    assert shares[0] < 0.15
    assert shares[-1] > 0.8
    assert differing == 0


def test_supervised_learning_is_the_same_gradient_as_reinforcing_the_completion() -> None:
    """At ratio 1 with advantage 1 the token-mean surrogate has the gradient of cross-entropy."""
    model = tiny_model("float32", scale=8)
    samples = roll_out(model)
    reinforced = gradients(
        make_learner(model, Objective(loss_aggregation="token_mean")), samples, [1.0] * len(samples)
    )
    optimizer = make_learner(model).optimizer
    taken: list[dict[str, Tensor]] = []
    optimizer.step = lambda rate, norm: taken.append(  # type: ignore[method-assign]
        {n: p.grad.clone() for n, p in optimizer.parameters.items() if p.grad is not None}
    )
    result = supervised_update(model, optimizer, samples, 1e-3, 10_000)
    assert distance(taken[0], reinforced) < 1e-6
    logprobs = [x for s in samples for x in s.rollout_logprobs]
    assert result["loss/cross_entropy"] == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-5)
    supervised_update(model, optimizer, samples, 1e-3, 13)
    assert distance(taken[1], taken[0]) < 1e-5


def test_supervised_learning_fits_its_data() -> None:
    model = tiny_model("fp8")
    prompt, answer = model.tokenizer.encode("1+1="), model.tokenizer.encode("2", add_special=False)
    data = [
        Sample(0, 0, tuple(prompt), (*answer, *model.tokenizer.eos_ids), (0.0, 0.0), "", False, 0)
    ]
    optimizer = ShardedOptimizer(model.named_parameters(), make_learner(model).optimizer.settings)
    losses = []
    for _ in range(25):
        losses.append(supervised_update(model, optimizer, data, 1e-2, 1000)["loss/cross_entropy"])
        model.sync()
    assert losses[0] > 2
    assert losses[-1] < 0.1

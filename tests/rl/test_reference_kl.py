"""The KL in the reward is between the learner's old log-probabilities and the reference's, whatever
engine samples; and the pass that computes them is the only one."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config import load_config
from isobit.distributed import Ranks
from isobit.model import Model
from isobit.rl import Objective, ResolvedObjective, Sample, for_precision
from isobit.rl.learner.forward import PolicyForward, values_of
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.schedule import MicroBatches
from isobit.run.completions import COMPLETIONS, read
from isobit.training.train import replay, train
from tests.models import tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out
from tests.runs import fingerprint, write_config


def objective(model: Model, estimator: str = "k1") -> ResolvedObjective:
    charged = Objective(kl_coefficient=0.1, kl_in_reward=True, kl_estimator=estimator)
    return for_precision(charged, model.precision)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("preset", ["fp8-rollout", "fp8-e2e", "fp8"])
def test_a_reference_that_is_the_policy_costs_exactly_nothing(preset: str, estimator: str) -> None:
    """With two engines too; the control is rollout minus reference, which there is noise and here
    is 0."""
    model, reference = tiny_model(preset, scale=8), tiny_model(preset, scale=8)
    samples = roll_out(model)
    learner = make_learner(model, objective(model, estimator), reference=reference)
    found = learner.reference_kl(samples)
    assert [len(row) for row in found] == [len(s.completion_ids) for s in samples]
    assert {value for row in found for value in row or ()} == {0.0}
    completions = [s.prompt_ids + s.completion_ids for s in samples]
    wholes = reference.logprobs(completions)
    noise = [
        sum(s.rollout_logprobs) - float(row[len(s.prompt_ids) - 1 :].double().sum())
        for s, row in zip(samples, wholes, strict=True)
    ]
    if preset == "fp8":
        assert max(map(abs, noise)) < 1e-12
    else:
        assert sum(map(abs, noise)) / len(noise) > 1e-3


def test_the_distance_is_by_hand_once_the_policy_has_moved() -> None:
    """verl, ray_trainer.py, `apply_kl_penalty`: old minus reference, token by token."""
    model, reference = tiny_model("fp8-rollout", scale=8), tiny_model("fp8-rollout", scale=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    model.sync()
    samples = roll_out(model)
    found = make_learner(model, objective(model), reference=reference).reference_kl(samples)
    for sample, row in zip(samples, found, strict=True):
        text, begin = sample.prompt_ids + sample.completion_ids, len(sample.prompt_ids) - 1
        old, other = (m.logprobs([text])[0][begin:].double() for m in (model, reference))
        assert row == tuple((old - other).tolist())
    assert all(any(row) for row in found)


def count_passes(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples of each pass over the policy that computes log-probabilities without a
    gradient."""
    passes: list[int] = []

    def counted(
        policy: PolicyForward, samples: list[Sample], parts: MicroBatches, ranks: Ranks, *read: Any
    ) -> object:
        if policy.model is learner.model:
            passes.append(sum(map(len, parts)))
        return values_of(policy, samples, parts, ranks, *read)

    monkeypatch.setattr("isobit.rl.learner.learner.values_of", counted)
    return passes


def test_old_logprobs_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before scoring, and not again while learning, whose result is that of a learner that computes
    them itself; other weights have others."""
    model = tiny_model("fp8-rollout", scale=8)
    samples = roll_out(model)
    learner = make_learner(model, objective(model), reference=tiny_model("fp8-rollout", scale=8))
    passes = count_passes(learner, monkeypatch)
    learner.reference_kl(samples[:7])
    learner.reference_kl(samples[7:])
    assert passes == [7, len(samples) - 7]
    result = learner.learn(samples, alternating(samples), 0).metrics
    assert [count for count in passes[2:] if count] == []
    again = tiny_model("fp8-rollout", scale=8)
    alone = make_learner(again, objective(again), reference=tiny_model("fp8-rollout", scale=8))
    assert alone.learn(samples, alternating(samples), 0).metrics == result
    model.sync()
    learner.learn(samples, alternating(samples), 1)
    assert passes[-1] == len(samples)


@pytest.mark.parametrize("preset", ["fp8-rollout", "fp8-rollout-kv", "fp8-e2e"])
def test_a_run_with_two_engines_begins_at_no_distance(
    tmp_path: Path, base_model: Path, preset: str
) -> None:
    """0 in the first step, something later, and the learning repeated from the recorded
    rollouts."""
    algorithm = "algorithm={preset: reinforce_pp, kl_coefficient: 0.5, kl_in_reward: true}"
    config = load_config(
        write_config(tmp_path, base_model), [f"precision={preset}", algorithm, "steps=2"]
    )
    result = train(config)
    assert result.metrics[0]["reward/reference_kl"] == 0
    assert result.metrics[0]["mismatch/differing_tokens"] > 0
    assert result.metrics[1]["reward/reference_kl"] != 0
    rows = [row for row in read(result.run_dir / COMPLETIONS) if row["step"] == 2]
    assert all(len(row["reference_kl"]) == len(row["completion_ids"]) for row in rows)
    charged = [math.fsum(row["reference_kl"]) for row in rows]
    assert sum(charged) / len(charged) == pytest.approx(
        result.metrics[1]["reward/reference_kl"], rel=1e-6
    )
    again = replay(result.run_dir, tmp_path / "again")
    assert (
        fingerprint(again.run_dir)["model.safetensors"]
        == fingerprint(result.run_dir)["model.safetensors"]
    )

"""Completions with tokens that a tool or a user gave: context for the learner, never targets."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.model import Model
from isobit.rl import ResolvedObjective, Sample
from isobit.rl.algorithm.credit import assign_credit
from isobit.rl.learner.agreement import Disagreement, require_agreement
from isobit.rl.learner.batch import rollout_logprobs
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from tests.models import tiny_model
from tests.rl.helpers import alternating, distance, gradients, make_learner
from tests.rl.supervised import supervised_update

GIVEN = "=7+"


def two_turns(model: Model) -> list[Sample]:
    """A first answer, three given tokens, and a second answer, as one sample each."""
    engine = Engine(model, kv_pages=64, page_size=4)
    given = tuple(model.tokenizer.encode(GIVEN, add_special=False))
    first = [
        c
        for g in engine.generate(["1+1=", "23*4="], Sampling(n=2, max_new_tokens=3, seed=1))
        for c in g
    ]
    prompts = [[*c.prompt_token_ids, *c.token_ids, *given] for c in first]
    second = [g[0] for g in engine.generate(prompts, Sampling(n=1, max_new_tokens=4, seed=2))]
    return [
        Sample(
            prompt_index=one.prompt_id,
            sample_index=one.sample_index,
            prompt_ids=tuple(one.prompt_token_ids),
            completion_ids=(*one.token_ids, *given, *two.token_ids),
            rollout_logprobs=(*one.logprobs, *(0.0 for _ in given), *two.logprobs),
            completion=one.text + GIVEN + two.text,
            truncated=False,
            weights_version=one.weights_version,
            completion_mask=(
                *(True for _ in one.token_ids),
                *(False for _ in given),
                *(True for _ in two.token_ids),
            ),
        )
        for one, two in zip(first, second, strict=True)
    ]


def without_masks(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(s, completion_mask=None) for s in samples]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_gradient_is_that_of_the_trained_tokens_written_out(aggregation: str) -> None:
    """On policy: -A · log p of each sampled token, each average over sampled tokens only."""
    model = tiny_model("float32", scale=8)
    samples = two_turns(model)
    advantages = alternating(samples)
    objective = ResolvedObjective(loss_aggregation=aggregation, max_new_tokens=9)
    found = gradients(make_learner(model, objective), samples, advantages)

    trained = [sum(s.completion_mask or ()) for s in samples]
    loss = torch.zeros(())
    for sample, advantage, count in zip(samples, advantages, trained, strict=True):
        logprobs, _ = forward(model, pack(without_masks([sample])), 1.0)
        own = logprobs * torch.tensor(sample.completion_mask)
        scale = {
            "token_mean": 1 / sum(trained),
            "sequence_mean": 1 / len(samples) / count,
            "constant": 1 / len(samples) / 9,
        }
        loss = loss - advantage * own.sum() * scale[aggregation]
    loss.backward()
    written_out = {
        n: p.grad.clone() for n, p in model.named_parameters().items() if p.grad is not None
    }
    assert distance(found, written_out) < 1e-5
    ignored = gradients(make_learner(model, objective), without_masks(samples), advantages)
    assert (
        distance(ignored, written_out) > 0.01
    )  # the control: a learner that takes given tokens for targets


def test_both_turns_have_the_rollouts_bits_and_given_tokens_are_not_compared() -> None:
    model = tiny_model("fp8", scale=8)
    samples = two_turns(model)
    learner = make_learner(model, on_mismatch="stop")
    metrics = learner.learn(samples, alternating(samples), 0).metrics
    assert metrics["mismatch/compared_tokens"] == sum(s.num_trained for s in samples)
    assert metrics["mismatch/differing_tokens"] == 0
    learner = make_learner(tiny_model("fp8", scale=8), on_mismatch="stop")
    with pytest.raises(
        Disagreement
    ) as caught:  # the control: the 0.0 of a given token is no log-probability
        learner.learn(without_masks(samples), alternating(samples), 0)
    assert caught.value.differing == 3 * len(samples)
    assert caught.value.first.position == 3


def test_what_is_recorded_has_a_place_for_every_token() -> None:
    model = tiny_model("fp8", scale=8)
    samples = two_turns(model)
    learner = make_learner(model)
    learned = learner.learn(samples, alternating(samples), 0)
    for sample in samples:
        assert learned.compared[sample.prompt_index, sample.sample_index] == list(
            sample.rollout_logprobs
        )


def test_a_mask_of_sampled_tokens_only_changes_no_bit() -> None:
    samples = two_turns(tiny_model("fp8", scale=8))
    plain = without_masks(samples)
    full = [replace(s, completion_mask=(True,) * len(s.completion_ids)) for s in plain]
    results = []
    for batch in (plain, full, samples):
        results.append(
            gradients(make_learner(tiny_model("fp8", scale=8)), batch, alternating(samples))
        )
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert not all(
        torch.equal(results[0][name], results[2][name]) for name in results[0]
    )  # the control


def test_the_first_differing_token_is_named_by_its_place_in_the_completion() -> None:
    sample = two_turns(tiny_model("fp8", scale=8))[0]
    (recorded,) = rollout_logprobs([sample])
    own = recorded.clone()
    require_agreement([(sample, recorded, own)], [sample])
    own[4] += 1.0
    with pytest.raises(Disagreement) as caught:
        require_agreement([(sample, recorded, own)], [sample])
    assert caught.value.first.position == 7  # the fifth trained token, after three given ones


def test_credit_is_of_trained_tokens() -> None:
    """Advantages of tokens, the penalty of long completions and the KL in the reward count sampled
    tokens."""
    samples = [
        replace(s, reward=float(i))
        for i, s in enumerate(two_turns(tiny_model("float32", scale=8))[:2])
    ]
    objective = ResolvedObjective(advantage="reinforce_pp")
    _, advantages = assign_credit([samples], objective)
    assert [len(row) for row in advantages if not isinstance(row, float)] == [
        s.num_trained for s in samples
    ]
    charged = [replace(s, reference_kl=(0.5,) * s.num_trained) for s in samples]
    assign_credit([charged], replace(objective, kl_in_reward=True, kl_coefficient=0.1))
    masked, whole = replace(samples[0], reward=1.0), replace(without_masks(samples)[0], reward=1.0)
    limited = ResolvedObjective(
        advantage="dr_grpo", max_new_tokens=masked.num_trained + 1, overlong_buffer=1
    )
    assert assign_credit([[masked, whole]], limited)[1] == [
        0.5,
        -0.5,
    ]  # only the second is too long
    assert assign_credit([[whole, whole]], limited)[1] == [0.0, 0.0]  # the control


def test_supervised_training_learns_trained_tokens_only() -> None:
    model = tiny_model("float32", scale=8)
    samples = two_turns(model)

    def loss(batch: Sequence[Sample]) -> float:
        optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSettings())
        return supervised_update(model, optimizer, batch, 0.0, 10_000)["loss/cross_entropy"]

    def written_out() -> Tensor:
        rows = [forward(model, pack(without_masks([s])), 1.0)[0][list(s.trained)] for s in samples]
        return -torch.cat(rows).mean()

    assert loss(samples) == pytest.approx(float(written_out().detach()), rel=1e-5)
    assert loss(without_masks(samples)) != pytest.approx(float(written_out().detach()), rel=1e-3)


def test_a_mask_goes_through_json_and_older_records_have_none() -> None:
    sample = two_turns(tiny_model("fp8", scale=8))[0]
    values = json.loads(json.dumps(sample.to_json()))
    assert Sample.from_json(values) == sample
    del values["completion_mask"]
    assert Sample.from_json(values).completion_mask is None


def test_a_sample_of_given_tokens_only_teaches_nothing() -> None:
    sample = two_turns(tiny_model("fp8"))[0]
    nothing = replace(sample, completion_mask=(False,) * len(sample.completion_ids))
    assert pack([nothing]).num_targets == 0
    learner = make_learner(tiny_model("fp8"))
    before = [p.detach().clone() for p in learner.model.parameters()]
    learner.learn([nothing], [1.0], 0)
    assert all(
        torch.equal(p, old) for p, old in zip(learner.model.parameters(), before, strict=True)
    )

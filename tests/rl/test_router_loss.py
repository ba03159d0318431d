"""The load-balancing loss is the whole optimizer batch's: transformers' value and gradient, however
it is split."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from isobit.model import Model
from isobit.model.hub import names
from isobit.rl import ResolvedObjective, Sample
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.routing import BatchLoad
from tests.model.helpers import directory, tokens
from tests.model.test_model import per_expert
from tests.rl.helpers import distance, gradients, make_learner

BALANCED = ResolvedObjective(router_aux_coefficient=0.5, max_new_tokens=5)


def batch() -> list[Sample]:
    """Ten completions of several lengths."""
    sizes = [(4, 5), (7, 1), (2, 9), (11, 3), (1, 6), (5, 5), (3, 2), (6, 8), (2, 2), (9, 4)]
    drawn = [
        (tokens(prompt, i), tokens(length, 100 + i)) for i, (prompt, length) in enumerate(sizes)
    ]
    return [
        Sample(i, 0, tuple(p), tuple(c), (-2.0,) * len(c), "", False, 0)
        for i, (p, c) in enumerate(drawn)
    ]


def auxiliary(learner: Learner, samples: list[Sample]) -> dict[str, Tensor]:
    """Gradients of the auxiliary loss alone: without an advantage there is no other."""
    found = gradients(learner, samples, [0.0] * len(samples))
    return {name: gradient for name, gradient in found.items() if bool(gradient.any())}


def sequences(samples: list[Sample]) -> list[list[int]]:
    """The rows that a learner computes: all tokens but the last, from which nothing is
    predicted."""
    return [[*s.prompt_ids, *s.completion_ids[:-1]] for s in samples]


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-moe-mixed", "mixtral"])
def test_value_and_gradient_are_transformers_of_the_whole_batch(
    tmp_path: Path, family: str
) -> None:
    """For a batch in one piece and in many; the controls are its halves, each with a load of its
    own."""
    theirs, path = directory(tmp_path, family)
    model = Model.load(path, "float32")
    experts = model.config.experts
    assert experts is not None
    samples = batch()
    routed = [
        theirs(torch.tensor([ids]), output_router_logits=True).router_logits
        for ids in sequences(samples)
    ]

    def loss_of(part: slice) -> Tensor:
        gates = tuple(torch.cat(layer) for layer in zip(*routed[part], strict=True))
        found = load_balancing_loss_func(gates, experts.count, experts.per_token)
        assert isinstance(found, Tensor)
        return found

    whole, halves = loss_of(slice(None)), (loss_of(slice(0, 5)) + loss_of(slice(5, None))) / 2
    result = make_learner(model, BALANCED).learn(samples, [0.0] * len(samples), 0).metrics
    assert result["router/auxiliary_loss"] == pytest.approx(whole.item(), rel=1e-5)
    assert halves.item() != pytest.approx(whole.item(), rel=1e-3)

    (0.5 * whole).backward()
    for parameter in theirs.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = per_expert(theirs, model.config.family)
    wanted = names.fuse(lambda name, lo, hi: gradients[name][lo:hi], model.config)
    model = Model.load(path, "float32")
    for budget in (1, 17, 40, 10_000):
        found = auxiliary(make_learner(model, BALANCED, micro_batch_tokens=budget), samples)
        assert found
        assert distance(found, {name: wanted[name] for name in found}) < 1e-5
    half = auxiliary(make_learner(model, BALANCED), samples[:5])
    assert distance(half, {name: wanted[name] for name in half}) > 0.1


@pytest.mark.parametrize("precision", ["float32", "fp8"])
def test_the_gradient_does_not_depend_on_the_split(precision: str, tmp_path: Path) -> None:
    """With empty completions among them, which have no part in it; the control weighs each part by
    its own load."""
    model = Model.load(directory(tmp_path, "qwen3-moe")[1], precision)
    samples = batch()
    samples[3:5] = [replace(s, completion_ids=(), rollout_logprobs=()) for s in samples[3:5]]
    whole = auxiliary(make_learner(model, BALANCED), samples)
    bound = 1e-5 if precision == "float32" else 0.1
    for budget in (1, 17, 40):
        learner = make_learner(model, BALANCED, micro_batch_tokens=budget)
        assert distance(auxiliary(learner, samples), whole) < bound
    alone = make_learner(model, BALANCED, micro_batch_tokens=17)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isobit.rl.learner.gradient.batch_load", lambda *arguments: None)
        assert distance(auxiliary(alone, samples), whole) > 2 * bound
    without = [s for s in samples if s.completion_ids]
    assert distance(auxiliary(make_learner(model, BALANCED), without), whole) < bound


def test_the_parts_of_a_batch_add_up_to_its_loss() -> None:
    """k where balanced, more where not; a sum over parts, given the load of the whole."""
    balanced = BatchLoad(torch.tensor([2, 2, 2, 2]), 4)
    assert balanced.loss(torch.full((4,), 1.0)).item() == pytest.approx(2.0)
    unbalanced = BatchLoad(torch.tensor([4, 4, 0, 0]), 4)
    assert unbalanced.loss(torch.tensor([2.8, 0.4, 0.4, 0.4])).item() == pytest.approx(
        4 * (0.7 + 0.1)
    )
    both = balanced + unbalanced
    parts = both.loss(torch.full((4,), 1.0)) + both.loss(torch.tensor([2.8, 0.4, 0.4, 0.4]))
    assert parts.item() == pytest.approx(both.loss(torch.tensor([3.8, 1.4, 1.4, 1.4])).item())
    assert parts.item() != pytest.approx(
        (2.0 + 4 * (0.7 + 0.1)) / 2
    )  # the control: each by its own load

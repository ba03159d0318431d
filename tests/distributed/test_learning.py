"""The learner on several ranks: weights, moments and metrics have the bits of one, whoever computes
what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.distributed import ALONE, Ranks
from isobit.distributed.exchange import GradientSum
from isobit.distributed.shards import Shards
from isobit.errors import IsobitError, NonFiniteError
from isobit.model import Model
from isobit.rl import Objective, OptimizerSettings, ResolvedObjective, Sample, for_precision
from isobit.rl.algorithm.objective import OBJECTIVES
from isobit.rl.learner.gradient import Differentiation
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from tests.distributed.threads import WHOLE_BLOCKS, Meeting, ThreadRanks, run
from tests.models import slow_where, tiny_model
from tests.rl.helpers import alternating, roll_out

SETTINGS = OptimizerSettings(learning_rate=2e-3, max_grad_norm=0.05, total_steps=8)
OBJECTIVE = ResolvedObjective.of(OBJECTIVES["grpo"], max_new_tokens=5, updates_per_batch=2)


def model_of(precision: str, family: str, ranks: Ranks = ALONE, masters: str = "fp32") -> Model:
    return tiny_model(
        precision, family, seed=3, scale=2.0, ranks=ranks, masters=masters, **WHOLE_BLOCKS
    )


def learned(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """This rank's rows of masters and moments, by name and `name|moment`."""
    moments = {
        f"{name}|{key}": value
        for name, each in optimizer._tensors().items()
        for key, value in each.items()
        if key != "step"
    }
    return {name: master.detach() for name, master in optimizer.parameters.items()} | moments


def whole(ranks: Ranks, shards: Shards, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of masters' shapes from the rows of all ranks, in the order of rows."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for rank, tensors in enumerate(ranks.all_gather_tensors(mine)):
        for name, tensor in tensors.items():
            found.setdefault(name, []).append(
                (shards.rows[name.partition("|")[0]][rank][0], tensor)
            )
    return {
        name: torch.cat([t for _, t in sorted(parts, key=lambda part: part[0])])
        for name, parts in found.items()
    }


def learn(
    samples: list[Sample],
    precision: str,
    family: str,
    ranks: Ranks = ALONE,
    objective: Objective = OBJECTIVE,
    settings: OptimizerSettings = SETTINGS,
    steps: int = 2,
    tokens: int = 20,
    **given: Any,
) -> tuple[dict[str, Tensor], list[Mapping[str, float]]]:
    """(masters and moments, metrics) after some steps on the samples."""
    model = model_of(precision, family, ranks, settings.masters)
    shards = model.transformer.masters.shards
    optimizer = ShardedOptimizer.of(model, settings)
    chosen = for_precision(objective, model.precision, stale=False)
    learner = Learner(model, optimizer, chosen, micro_batch_tokens=tokens, seed=7, **given)
    metrics = []
    for step in range(steps):
        metrics.append(learner.learn(samples, alternating(samples), step).metrics)
        model.sync()
        version = model.weights_version
        samples = [replace(s, weights_version=version) for s in samples]
    return whole(ranks, shards, learned(optimizer)), metrics


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


QUICK = (("bf16", "qwen3"), ("bf16", "qwen3_moe"), ("fp8-unified", "qwen3"), ("fp8", "qwen3_moe"))
FLOWS = [
    *product(("bf16", "fp8-unified", "fp8"), ("qwen3", "qwen3_moe")),
    ("fp8", "gemma3_text"),
    ("fp8", "gemma4_text"),
    ("fp8", "gemma4_text-experts"),
    ("fp8", "gemma4_text-small"),
    ("fp8", "gpt_oss"),
    ("fp8", "nemotron_h-latent"),
]


@pytest.mark.parametrize(
    ("precision", "family", "sizes"),
    [
        *slow_where(
            [(*flow, (1, 2, 3, 4) if flow[0] == "fp8-unified" else (3,)) for flow in FLOWS],
            lambda precision, family, sizes: (precision, family) not in QUICK,
        ),
        *(
            pytest.param(*flow, (1, 2, 4), marks=pytest.mark.slow)
            for flow in FLOWS
            if flow[0] != "fp8-unified"
        ),
    ],
)
def test_every_number_of_ranks_learns_the_same(
    precision: str, family: str, sizes: Sequence[int]
) -> None:
    """`make test` has every number for one flow, and for the others 3, which divides nothing
    evenly."""
    samples = roll_out(model_of(precision, family))
    state, metrics = learn(samples, precision, family)
    assert metrics[0]["steps/skipped"] == 0
    assert not math.isnan(metrics[1]["grad_norm"])
    assert (
        metrics[0]["grad_norm"] > SETTINGS.max_grad_norm
    )  # so that its last digit would be in the weights
    for size in sizes:
        for found, measured in run(size, lambda ranks: learn(samples, precision, family, ranks)):
            assert same(found, state), size
            assert repr(measured) == repr(metrics), size


class _AllReduced(GradientSum):
    """The control: every rank adds its own micro-batches, and the sums of the ranks are added, as a
    library does."""

    def begin(self) -> None:
        super().begin()
        self._mine: dict[str, Tensor] = {}

    def _take(self, bucket: Any, received: Any) -> None:
        pass

    def _message(self, bucket: Any, now: Any) -> Tensor:
        for name in bucket.names:
            if (gradient := now.gradients.get(name)) is not None:
                self._mine[name] = (
                    gradient if name not in self._mine else self._mine[name] + gradient
                )
        return super()._message(bucket, now)

    def finish(self) -> None:
        shards = self._shards
        sums = shards.ranks.all_gather_tensors(self._mine)
        for name, holder in self._holders.items():
            parts = [given[name] for given in sums if name in given]
            holder.grad = (
                sum(parts[1:], start=parts[0])[slice(*shards.own(name))].clone() if parts else None
            )


@pytest.mark.slow
def test_control_sums_of_ranks_give_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = roll_out(model_of("fp8", "qwen3"))
    state, _ = learn(samples, "fp8", "qwen3")
    monkeypatch.setattr("isobit.rl.learner.gradient.GradientSum", _AllReduced)
    found = {
        size: run(size, lambda ranks: learn(samples, "fp8", "qwen3", ranks))[0][0]
        for size in (1, 2, 3)
    }
    assert not same(found[1], state) or not same(found[2], state)
    assert not same(found[2], found[3])
    # it is a gradient all the same, up to rounding
    assert all(
        torch.allclose(found[2][name], state[name], rtol=0.05, atol=5e-3)
        for name in state
        if "|" not in name
    )


def test_control_rows_in_the_order_of_ranks_are_other_weights() -> None:
    """With one range for each rank their order happens to be right; here it is not."""
    shapes = {
        name: tuple(p.shape) for name, p in model_of("fp8", "qwen3").named_parameters().items()
    }
    for size in (2, 3, 4):
        rows = Shards.of(shapes, ThreadRanks(Meeting(size), 0)).rows
        assert any(
            [r for r in ranges if r != (0, 0)] != sorted(r for r in ranges if r != (0, 0))
            for ranges in rows.values()
        )


@pytest.mark.slow
def test_groups_of_micro_batches_are_another_sum_that_is_the_same_everywhere() -> None:
    """Of ten micro-batches in each optimizer batch; groups of all of them are no groups."""
    given: dict[str, Any] = {"precision": "fp8", "family": "qwen3", "steps": 1, "tokens": 1}
    samples = roll_out(model_of("fp8", "qwen3"))
    plain, _ = learn(samples, **given)
    assert same(
        learn(samples, settings=replace(SETTINGS, gradient_sum_group=10), **given)[0], plain
    )
    for group, sizes in {2: (1, 2, 3), 4: (2, 3)}.items():
        given["settings"] = replace(SETTINGS, gradient_sum_group=group)
        state, metrics = learn(samples, **given)
        assert not same(state, plain)
        for size in sizes:
            for found, measured in run(size, lambda ranks: learn(samples, ranks=ranks, **given)):
                assert same(found, state), (group, size)
                assert repr(measured) == repr(metrics), (group, size)


VARIANTS: dict[str, dict[str, Any]] = {
    "activation checkpointing": {"recompute": True},
    "gradients checked": {"check_gradients_every": 1},
    "8-bit moments": {"settings": replace(SETTINGS, state="8bit")},
    "BF16 masters": {"settings": replace(SETTINGS, masters="bf16")},
    "BF16 masters, 8-bit moments": {
        "settings": replace(SETTINGS, masters="bf16", state="8bit", gradient_sum_group=2)
    },
    "Muon": {"settings": replace(SETTINGS, name="muon")},
    "Muon, BF16 masters, experts": {
        "settings": replace(SETTINGS, name="muon", masters="bf16"),
        "family": "qwen3_moe",
    },
    "old log-probabilities recomputed": {
        "objective": replace(OBJECTIVE, recompute_old_logprobs="always", epochs=2)
    },
    "tensor-wise": {"precision": "fp8[weight_granularity=tensor]"},
    "nvfp4": {"precision": "nvfp4"},
    "separate engines": {"precision": "fp8-rollout"},
    "load balancing": {
        "family": "qwen3_moe",
        "objective": replace(OBJECTIVE, router_aux_coefficient=0.1),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "variant",
    slow_where(
        list(VARIANTS),
        lambda variant: (
            variant not in ("gradients checked", "BF16 masters, 8-bit moments", "separate engines")
        ),
    ),
)
def test_variants_learn_the_same_on_two_and_three_ranks(variant: str, size: int) -> None:
    given = {"precision": "fp8", "family": "qwen3"} | VARIANTS[variant]
    samples = roll_out(model_of(given["precision"], given["family"]))
    state, metrics = learn(samples, **given)
    assert not math.isnan(metrics[1]["grad_norm"])
    for found, measured in run(size, lambda ranks: learn(samples, ranks=ranks, **given)):
        assert same(found, state)
        assert repr(measured) == repr(metrics)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first micro-batch, or the second: the metrics are those of one process too."""
    samples = roll_out(model_of("fp8", "qwen3"))
    one = Differentiation._micro_batch

    def broken(self: Differentiation, batch: Any, index: int, *given: Any) -> Any:
        if index == rank:
            raise NonFiniteError("planted")
        return one(self, batch, index, *given)

    monkeypatch.setattr(Differentiation, "_micro_batch", broken)
    before = {
        name: p.detach().clone() for name, p in model_of("fp8", "qwen3").named_parameters().items()
    }
    state, metrics = learn(samples, "fp8", "qwen3", steps=1)
    assert metrics[0]["steps/skipped"] == 2
    assert same(state, before)
    for size in (2, 3):
        for found, measured in run(
            size, lambda ranks: learn(samples, "fp8", "qwen3", ranks, steps=1)
        ):
            assert same(found, before)
            assert repr(measured) == repr(metrics)


def test_an_error_of_the_loss_on_one_rank_is_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = roll_out(model_of("fp8", "qwen3"))
    one = Differentiation._micro_batch

    def broken(self: Differentiation, batch: Any, index: int, *given: Any) -> Any:
        if index == 1:
            raise IsobitError("the loss is a word")
        return one(self, batch, index, *given)

    monkeypatch.setattr(Differentiation, "_micro_batch", broken)
    raised = []

    def failing(ranks: Ranks) -> None:
        with pytest.raises(IsobitError, match="the loss is a word") as error:
            learn(samples, "fp8", "qwen3", ranks)
        raised.append(error.value.shared)

    run(3, failing)
    assert raised == [True] * 3

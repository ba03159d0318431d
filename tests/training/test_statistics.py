"""Metrics of a step against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from isobit.data.episodes import EpisodeRecord
from isobit.model.hub.names import layer_and_role
from isobit.rl import Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.training.measuring.statistics import WeightTotals, batch_metrics
from tests.models import tiny_model


def sample(reward: float | None, length: int, truncated: bool = False) -> Sample:
    return Sample(
        prompt_index=0,
        sample_index=0,
        prompt_ids=(1, 2),
        completion_ids=tuple(range(length)),
        rollout_logprobs=(-1.0,) * length,
        completion="",
        truncated=truncated,
        weights_version=0,
        reward=reward,
        rewards={"a": reward, "b": 2.0},
    )


def test_rewards_lengths_and_spread() -> None:
    batch = StepBatch(2, False, 1)
    batch.add([[sample(1.0, 2), sample(0.0, 4, True)], [sample(3.0, 6), sample(None, 8)]])
    found = batch_metrics(batch)
    assert found["reward/mean"] == pytest.approx(4 / 3)
    assert found["reward/std"] == pytest.approx(math.sqrt(7 / 3))
    assert found["groups/zero_spread_fraction"] == 0.5
    assert found["groups/unscored"] == 1
    assert found["length/mean"] == 5
    assert found["length/truncated_fraction"] == 0.25
    assert found["reward/function/a"] == pytest.approx(4 / 3)
    assert found["reward/function/b"] == 2


def test_calls_are_counted_by_tool() -> None:
    """Of three episodes; a name that no metric takes is written with underscores."""
    uses = [
        (("add", None), ("add", "no"), ("a/b c", None)),
        (("add", None), ("unknown", "Tool x not found.")),
        (),
    ]
    batch = StepBatch(1, False, 1)
    episodes = [EpisodeRecord(2, ({"role": "assistant", "content": ""},), each) for each in uses]
    batch.add([[replace(sample(1.0, 2), episode=episode) for episode in episodes]])
    found = batch_metrics(batch)
    by_tool = {name: value for name, value in found.items() if name.startswith("tools/")}
    assert by_tool == {
        "tools/call_frequency": 5 / 3,
        "tools/failure_frequency": 2 / 5,
        "tools/call_frequency/a_b_c": 1 / 3,
        "tools/failure_frequency/a_b_c": 0,
        "tools/call_frequency/add": 1,
        "tools/failure_frequency/add": 1 / 3,
        "tools/call_frequency/unknown": 1 / 3,
        "tools/failure_frequency/unknown": 1,
    }


def test_quantization_of_weights_is_that_of_the_last_sync() -> None:
    model = tiny_model("fp8")
    exact = WeightTotals(model).metrics()
    assert (
        0.005 < exact["quant/weight_relative_error"] < 0.06
    )  # E4M3: a mantissa of 3 bits, 2 ** -4 at most
    assert exact["quant/weight_saturated_fraction"] == 0
    assert WeightTotals(tiny_model("bf16")).metrics() == {}
    with torch.no_grad():
        for parameter in model.named_parameters().values():
            parameter.mul_(1.5)
    assert (
        WeightTotals(model).metrics()["quant/weight_relative_error"] > 0.3
    )  # the control: stale working weights
    model.sync()
    assert WeightTotals(model).metrics()["quant/weight_relative_error"] < 0.06


def test_weights_by_layer_and_tensor() -> None:
    """A tensor that is made worse shows in its own cell, and the sum of the cells is the metric."""
    model = tiny_model("fp8", "qwen3_moe")
    before = WeightTotals(model).by_tensor()
    assert sorted(before) == ["experts down", "experts gate_up", "o", "qkv"]
    with torch.no_grad():
        model.named_parameters()["layers.1.o"].mul_(2)
    after = WeightTotals(model).by_tensor()
    changed = [
        (role, layer)
        for role, figures in after.items()
        for layer, value in enumerate(figures["relative_error"])
        if value != before[role]["relative_error"][layer]
    ]
    assert changed == [("o", 1)]
    assert WeightTotals(tiny_model("bf16")).by_tensor() == {}
    assert layer_and_role("layers.3.experts.7.down") == (3, "experts down")


def test_when_weights_are_recorded() -> None:
    totals = WeightTotals(tiny_model("fp8"))
    assert [step for step in range(1, 24) if totals.due(step, 10)] == [1, 10, 20]
    assert not totals.due(1, 0)
    assert not WeightTotals(tiny_model("bf16")).due(1, 1)

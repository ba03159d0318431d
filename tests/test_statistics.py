"""Metrics of a step against numbers worked out by hand."""

import math

import pytest
import torch

from isobit.rl import Sample
from isobit.rl.collect import StepBatch
from isobit.statistics import batch_metrics, weight_metrics
from tests.conftest import tiny_model


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


def test_quantization_of_weights_is_that_of_the_last_sync() -> None:
    model = tiny_model("fp8")
    exact = weight_metrics(model)
    assert 0.005 < exact["quant/weight_relative_error"] < 0.06  # E4M3: a mantissa of 3 bits, 2 ** -4 at most
    assert exact["quant/weight_saturated_fraction"] == 0
    assert weight_metrics(tiny_model("bf16")) == {}
    with torch.no_grad():
        for parameter in model.named_parameters().values():
            parameter.mul_(1.5)
    assert weight_metrics(model)["quant/weight_relative_error"] > 0.3  # the control: stale working weights
    model.sync()
    assert weight_metrics(model)["quant/weight_relative_error"] < 0.06

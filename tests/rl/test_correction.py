"""Token TIS against hand-made weights."""

import math

import pytest
import torch

from isobit.rl.correction import correction_metrics, token_tis


def test_weights_are_ratios_up_to_the_cap() -> None:
    ratios = torch.tensor([0.25, 1.0, 1.9, 2.0, 2.1, 50.0])
    correction = token_tis(ratios.log(), torch.zeros(6), cap=2.0)
    torch.testing.assert_close(correction.untruncated, ratios)
    torch.testing.assert_close(correction.weights, ratios.clamp(max=2.0))


def test_metrics_by_hand() -> None:
    metrics = correction_metrics(token_tis(torch.tensor([1.0, 1.0, 1.0, 8.0]).log(), torch.zeros(4), cap=2.0))
    assert metrics["correction/mean_weight"] == pytest.approx(5 / 4)
    assert metrics["correction/clipped_fraction"] == 1 / 4
    assert metrics["correction/effective_sample_size"] == pytest.approx((5 / 4) ** 2 / (7 / 4))
    # the tail that truncation hides: (11/4)² / (67/4)
    assert metrics["correction/effective_sample_size_untruncated"] == pytest.approx((11 / 4) ** 2 / (67 / 4), rel=1e-5)


def test_equal_logprobs_weigh_exactly_one() -> None:
    logprobs = torch.randn(20)
    correction = token_tis(logprobs, logprobs.clone(), cap=2.0)
    assert torch.equal(correction.weights, torch.ones(20))
    assert correction_metrics(correction)["correction/effective_sample_size"] == 1


@pytest.mark.parametrize("log_ratio", [30.0, -30.0, 300.0, -300.0])
def test_extreme_ratios_stay_finite(log_ratio: float) -> None:
    correction = token_tis(torch.tensor([log_ratio, 0.0]), torch.zeros(2), cap=2.0)
    assert correction.untruncated[0].item() == pytest.approx(math.exp(math.copysign(20, log_ratio)), rel=1e-5)
    assert all(math.isfinite(value) for value in correction_metrics(correction).values())

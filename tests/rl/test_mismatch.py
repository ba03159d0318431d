"""Mismatch metrics against their formulas, and the comparison of bits."""

import math

import pytest
import torch

from isobit.rl.algorithm.mismatch import (
    differing,
    mismatch_metrics,
    position_metrics,
    sequence_metrics,
)
from isobit.run import metrics


def test_perfect_agreement() -> None:
    logprobs = torch.tensor([-0.1, -5.0, 0.0])
    values = mismatch_metrics(logprobs, logprobs.clone())
    ones = {"mismatch/token_mult_prob_error", "mismatch/importance_ratio"}
    assert values.pop("mismatch/compared_tokens") == 3
    assert values == {name: 1.0 if name in ones else 0.0 for name in values}


def test_of_equal_bits_no_metric_is_minus_zero() -> None:
    """Which would be printed as -0.00e+00."""
    logprobs = torch.tensor([-0.5, -2.0])
    found = mismatch_metrics(logprobs, logprobs) | sequence_metrics([logprobs], [logprobs])
    assert [name for name, value in found.items() if math.copysign(1, value) < 0] == []
    assert math.copysign(1, float(-torch.zeros(2).mean())) < 0, "the control"


def test_every_formula_on_two_tokens() -> None:
    learner, rollout = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.75])
    up, down = 0.5, -0.25  # log learner - log rollout

    def jensen_shannon(a: float, b: float) -> float:
        m = math.log((math.exp(a) + math.exp(b)) / 2)
        return ((math.exp(a - m) - (a - m) - 1) + (math.exp(b - m) - (b - m) - 1)) / 2

    expected = {
        "token_mult_prob_error": (math.exp(0.5) + math.exp(0.25)) / 2,
        "kl_k3": (math.exp(up) - up - 1 + math.exp(down) - down - 1) / 2,
        "kl_k3_reverse": (math.exp(-up) + up - 1 + math.exp(-down) + down - 1) / 2,
        "kl_k1": -(up + down) / 2,
        "importance_ratio": (math.exp(up) + math.exp(down)) / 2,
        "chi2": (math.exp(2 * up) + math.exp(2 * down)) / 2 - 1,
        "js_divergence": (jensen_shannon(-1.0, -1.5) + jensen_shannon(-2.0, -1.75)) / 2,
        "max_abs_logprob_diff": 0.5,
        "differing_tokens": 2,
        "compared_tokens": 2,
    }
    values = mismatch_metrics(learner, rollout)
    assert values == pytest.approx(
        {f"mismatch/{name}": value for name, value in expected.items()}, rel=1e-12
    )
    metrics.check(values)


def test_k1_shows_the_direction_of_a_corruption() -> None:
    rollout = torch.linspace(-3, -1, 7)
    assert mismatch_metrics(rollout - 0.1, rollout)["mismatch/kl_k1"] == pytest.approx(
        0.1, rel=1e-5
    )
    assert mismatch_metrics(rollout + 0.1, rollout)["mismatch/kl_k1"] == pytest.approx(
        -0.1, rel=1e-5
    )


def test_one_unit_in_the_last_place_is_a_difference() -> None:
    rollout = torch.tensor([-1.0, -2.0, -3.0])
    learner = rollout.clone()
    learner[1] = torch.nextafter(learner[1], torch.tensor(0.0))
    values = mismatch_metrics(learner, rollout)
    assert values["mismatch/differing_tokens"] == 1
    assert 0 < values["mismatch/max_abs_logprob_diff"] < 3e-7
    assert torch.allclose(learner, rollout)  # a tolerance would call them equal


def test_bits_are_compared_and_not_values() -> None:
    nan = torch.tensor([math.nan])
    assert differing(nan, nan.clone()) == 0
    assert differing(torch.tensor([0.0]), torch.tensor([-0.0])) == 1
    assert differing(torch.arange(6.0)[::2], torch.tensor([0.0, 2.0, 4.0])) == 0


def test_far_logprobs_stay_finite() -> None:
    values = mismatch_metrics(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))
    assert all(math.isfinite(value) for value in values.values())
    assert values["mismatch/max_abs_logprob_diff"] == 1e4


def test_nothing_compared_is_refused() -> None:
    """It must not pass for agreement."""
    with pytest.raises(AssertionError):
        mismatch_metrics(torch.empty(0), torch.empty(0))


def test_sequence_metrics_worked_out_by_hand() -> None:
    rollout = [torch.tensor([-1.0, -3.0]), torch.tensor([-0.5])]
    learner = [torch.tensor([-1.5, -3.5]), torch.tensor([-0.25])]
    values = sequence_metrics(learner, rollout)
    assert values == {
        "mismatch/learner_ppl": pytest.approx((math.exp(2.5) + math.exp(0.25)) / 2),
        "mismatch/rollout_ppl": pytest.approx((math.exp(2.0) + math.exp(0.5)) / 2),
        "mismatch/log_ppl_diff": pytest.approx((0.5 - 0.25) / 2),
        "mismatch/ppl_ratio": pytest.approx((math.exp(0.5) + math.exp(-0.25)) / 2),
        "mismatch/chi2_sequence": pytest.approx((math.exp(-2.0) + math.exp(0.5)) / 2 - 1),
    }


def test_sequence_metrics_stay_finite_at_the_extremes() -> None:
    values = sequence_metrics([torch.full((40,), -30.0)], [torch.full((40,), -1e-3)])
    assert all(math.isfinite(value) for value in values.values())
    same = sequence_metrics([torch.tensor([-2.0])], [torch.tensor([-2.0])])
    assert (
        same["mismatch/ppl_ratio"],
        same["mismatch/chi2_sequence"],
        same["mismatch/log_ppl_diff"],
    ) == (1, 0, 0)


def test_ratios_are_bounded_at_the_exponential_of_20_and_not_before() -> None:
    """verl's bound, from both sides: 15 passes as it is, 30 counts as 20."""
    for far, counted in ((15.0, 15.0), (19.5, 19.5), (30.0, 20.0)):
        up = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-1.0 - far]))
        down = mismatch_metrics(torch.tensor([-1.0 - far]), torch.tensor([-1.0]))
        assert up["mismatch/importance_ratio"] == pytest.approx(math.exp(counted))
        assert up["mismatch/token_mult_prob_error"] == pytest.approx(math.exp(counted))
        assert down["mismatch/kl_k3_reverse"] == pytest.approx(math.exp(counted) - counted - 1)
        assert (up["mismatch/kl_k1"], down["mismatch/kl_k1"]) == (-counted, counted)
        of_sequence = sequence_metrics([torch.tensor([-1.0])], [torch.tensor([-1.0 - far])])
        assert of_sequence["mismatch/chi2_sequence"] == pytest.approx(math.exp(2 * counted) - 1)
        perplexity = sequence_metrics([torch.tensor([-far])], [torch.tensor([-far])])
        assert perplexity["mismatch/learner_ppl"] == pytest.approx(math.exp(counted))


def test_a_single_token_is_enough() -> None:
    values = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert (values["mismatch/compared_tokens"], values["mismatch/differing_tokens"]) == (1, 1)


def test_by_position_each_token_counts_in_its_power_of_two() -> None:
    rollout = torch.full((7,), -2.0)
    learner = rollout + torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    positions = torch.tensor([0, 1, 2, 3, 7, 0, 2])  # of two completions, some given tokens between

    def k3(*ratios: float) -> float:
        return sum(math.exp(r) - r - 1 for r in ratios) / len(ratios)

    values = position_metrics(learner, rollout, positions)
    expected = {1: k3(0.1, 0.6), 2: k3(0.2, 0.3, 0.7), 4: k3(0.4), 8: k3(0.5)}
    assert values == {
        f"mismatch/kl_k3_from_{n}": pytest.approx(value, rel=1e-5) for n, value in expected.items()
    }
    metrics.check(values)
    moved = position_metrics(learner, rollout, positions + 8)
    assert moved.keys() == {"mismatch/kl_k3_from_8", "mismatch/kl_k3_from_16"}, (
        "the control: other positions"
    )


def test_by_position_the_ends_of_every_power_of_two() -> None:
    """Also far out, where a logarithm might round."""
    for power in range(31):
        ends = torch.tensor([2**power - 1, 2 ** (power + 1) - 2])
        found = position_metrics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.75]), ends)
        assert found.keys() == {f"mismatch/kl_k3_from_{2**power}"}


def test_by_position_there_is_nothing_where_all_bits_agree() -> None:
    logprobs, positions = torch.tensor([-0.1, -5.0]), torch.arange(2)
    assert position_metrics(logprobs, logprobs.clone(), positions) == {}
    assert position_metrics(logprobs, logprobs.clone().mul_(1.01), positions)

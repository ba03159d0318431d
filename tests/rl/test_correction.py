"""Corrections against numbers worked out by hand: weights, rejections on both sides, sequences,
extremes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isobit.rl.algorithm.correction import (
    Correction,
    correct,
    correction_metrics,
    small_step,
    step_metrics,
)
from isobit.rl.algorithm.correction_rule import (
    CORRECTIONS,
    LEVELS,
    MEASURES,
    WEIGHTS,
    CorrectionRule,
    Rejection,
)


def of_ratios(rule: CorrectionRule, *sequences: list[float]) -> Correction:
    """The correction of tokens with these ratios old/rollout, sequence by sequence."""
    ratios = torch.tensor([r for sequence in sequences for r in sequence], dtype=torch.float64)
    old, rollout = ratios.log().float() - 1.5, torch.full((len(ratios),), -1.5)
    return correct(rule, old, rollout, [len(sequence) for sequence in sequences])


def kept(rejection: Rejection, *sequences: list[float]) -> list[bool]:
    return of_ratios(CorrectionRule(rejection=rejection), *sequences).accepted.tolist()


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)


def test_token_weights_between_floor_and_cap() -> None:
    ratios = [0.25, 1.0, 1.9, 2.5, 50.0]
    close(of_ratios(CORRECTIONS["token_tis"], ratios).weights, [0.25, 1.0, 1.9, 2.0, 2.0])
    found = of_ratios(CorrectionRule("token", cap=2.0, floor=0.5), ratios)
    close(found.weights, [0.5, 1.0, 1.9, 2.0, 2.0])
    close(found.untruncated, ratios)
    assert found.clipped.tolist() == [True, False, False, True, True]


def test_a_sequence_has_one_weight_the_product_of_its_ratios() -> None:
    found = of_ratios(CorrectionRule("sequence", cap=2.0), [0.5, 0.5], [], [2.0, 3.0, 0.25], [4.0])
    close(found.weights, [0.25, 0.25, 1.5, 1.5, 1.5, 2.0])
    close(found.untruncated, [0.25, 0.25, 1.5, 1.5, 1.5, 4.0])


def test_normalized_weights_have_mean_one_before_anything_is_rejected() -> None:
    """Over tokens; of sequences, over sequences, however long they are."""
    rule = CorrectionRule("token", cap=3.0, normalize=True, rejection=Rejection(high=5.0))
    close(of_ratios(rule, [1.0, 2.0, 9.0]).weights, [1 / 2, 2 / 2, 0.0])
    sequences = CorrectionRule("sequence", cap=3.0, normalize=True)
    close(of_ratios(sequences, [1.0, 1.0, 1.0], [], [2.0]).weights, [1 / 1.5] * 3 + [2 / 1.5])


def test_token_rejection_is_asymmetric_and_keeps_its_bounds() -> None:
    ratios = [0.49, 0.5, 1.0, 5.0, 5.1]
    assert kept(Rejection(low=0.5 - 1e-6, high=5.0 + 1e-5), ratios) == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert kept(Rejection(low=0.5 - 1e-6), ratios) == [False, True, True, True, True]
    assert kept(Rejection(high=5.0 + 1e-5), ratios) == [True, True, True, True, False]
    close(of_ratios(CORRECTIONS["token_mis"], [0.49, 1.0, 4.9, 5.1]).weights, [0.0, 1.0, 4.9, 0.0])


def test_bounds_are_on_old_over_rollout_and_not_on_the_inverse() -> None:
    """verl's bounds of k1 act on the inverse: 0.6 ... 1.4 keeps 0.714 ... 1.667 there."""
    assert kept(Rejection(low=0.6, high=1.4), [0.65, 1.35, 1.5]) == [True, True, False]


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("sequence_sum", 0.9, 2.1, [True, True, False, False, False]),  # products 2, 0.25 and 4
        (
            "sequence_mean",
            0.45,
            1.9,
            [True, True, True, True, False],
        ),  # geometric means sqrt(2), 0.5 and 4
        ("sequence_max", 0.4, 2.1, [True, True, True, True, False]),  # maxima 2, 0.5 and 4
        ("sequence_max", 0.6, 2.1, [True, True, False, False, False]),
    ],
)
def test_ratios_of_sequences(level: str, low: float, high: float, expected: list[bool]) -> None:
    assert kept(Rejection("ratio", level, low, high), [1.0, 2.0], [], [0.5, 0.5], [4.0]) == expected


@pytest.mark.parametrize(
    ("measure", "values"),
    [
        ("k1", lambda lr: -lr),
        ("k2", lambda lr: lr * lr / 2),
        ("k3", lambda lr: math.exp(lr) - 1 - lr),
        ("ratio", lambda lr: math.exp(lr)),
        ("inverse_ratio", lambda lr: math.exp(-lr)),
    ],
)
def test_divergences_per_token_and_sequence(measure: str, values: object) -> None:
    ratios = [0.5, 1.25, 3.0]
    by_hand = [values(math.log(r)) for r in ratios]  # type: ignore[operator]
    for value in by_hand:
        above = kept(Rejection(measure, "token", high=value + 1e-5), ratios)
        below = kept(Rejection(measure, "token", low=value - 1e-5), ratios)
        assert above == [v <= value + 1e-5 for v in by_hand]
        assert below == [v >= value - 1e-5 for v in by_hand]
    if "ratio" in measure:
        return  # of a sequence: above, and tests/rl/test_sources.py
    for level, total in (
        ("sequence_sum", sum(by_hand)),
        ("sequence_mean", sum(by_hand) / 3),
        ("sequence_max", max(by_hand)),
    ):
        assert kept(Rejection(measure, level, total - 1e-5, total + 1e-5), ratios) == [True] * 3
        assert kept(Rejection(measure, level, low=total + 1e-4), ratios) == [False] * 3
        assert kept(Rejection(measure, level, high=total - 1e-4), ratios) == [False] * 3


def test_the_geometric_mask_takes_whole_sequences_and_keeps_weights_per_token() -> None:
    near, far = [2.0, 0.5003], [1.01, 1.01]
    found = of_ratios(CORRECTIONS["geometric_mask"], near, far)
    close(found.weights, [2.0, 0.5003, 0.0, 0.0])


def test_k3_mask_and_sequence_mis() -> None:
    assert of_ratios(CORRECTIONS["k3_mask"], [1.1, 1.0], [1.3, 1.0]).weights.tolist() == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    close(
        of_ratios(CORRECTIONS["sequence_mis"], [1.3, 1.4], [0.6, 0.6], [1.5, 1.5]).weights,
        [1.82, 1.82, 0, 0, 0, 0],
    )


def test_a_veto_takes_the_whole_sequence() -> None:
    found = of_ratios(CorrectionRule("token", veto=1e-4), [1.0, 1e-5, 1.0], [1.0, 2e-4])
    close(found.weights, [0.0, 0.0, 0.0, 1.0, 2e-4])


@pytest.mark.parametrize("log_ratio", [30.0, -30.0, 300.0, -300.0])
@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_extreme_ratios_stay_finite(name: str, log_ratio: float) -> None:
    found = correct(CORRECTIONS[name], torch.tensor([log_ratio, 0.0]), torch.zeros(2), [1, 1])
    assert bool(torch.isfinite(found.weights).all())
    assert found.untruncated[0].item() == pytest.approx(
        math.exp(math.copysign(20, log_ratio)), rel=1e-5
    )
    assert all(math.isfinite(value) for value in correction_metrics(found).values())


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_equal_logprobs_weigh_exactly_one_under_every_rule(name: str) -> None:
    logprobs = torch.randn(20)
    found = correct(CORRECTIONS[name], logprobs, logprobs.clone(), [7, 0, 13])
    assert torch.equal(found.weights, torch.ones(20))
    assert correction_metrics(found)["correction/effective_sample_size"] == 1


def test_a_batch_rejected_whole_has_weights_and_metrics() -> None:
    rule = CorrectionRule("token", normalize=True, rejection=Rejection(low=100.0))
    found = of_ratios(rule, [1.0, 2.0])
    assert not found.weights.any()
    metrics = correction_metrics(found)
    assert metrics["correction/rejected_fraction"] == 1
    assert metrics["correction/effective_sample_size"] == 0


def test_metrics_by_hand() -> None:
    metrics = correction_metrics(
        of_ratios(
            CorrectionRule("token", cap=2.0, rejection=Rejection(low=0.1)), [1, 1, 1, 8, 0.01]
        )
    )
    assert metrics["correction/mean_weight"] == pytest.approx(5 / 5)
    assert metrics["correction/clipped_fraction"] == 1 / 5
    assert metrics["correction/rejected_fraction"] == 1 / 5
    assert metrics["correction/largest_ratio"] == pytest.approx(8)
    assert metrics["correction/effective_sample_size"] == pytest.approx(1 / (7 / 5))
    # the tail that truncation hides
    mean, square = 11.01 / 5, (3 + 64 + 1e-4) / 5
    assert metrics["correction/effective_sample_size_untruncated"] == pytest.approx(
        mean**2 / square, rel=1e-5
    )


@given(
    st.lists(st.lists(st.floats(-40, 40), max_size=5), min_size=1, max_size=5),
    st.sampled_from(WEIGHTS),
    st.sampled_from(MEASURES),
    st.sampled_from(LEVELS),
)
def test_a_sequence_does_not_depend_on_the_others(
    rows: list[list[float]], weight: str, measure: str, level: str
) -> None:
    """Splitting a batch changes nothing, unless weights are normalized."""
    rule = CorrectionRule(
        weight,
        cap=None if weight == "none" else 3.0,
        rejection=Rejection(measure, level, -2.0, 2.0),
    )
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    whole = correct(rule, flat, torch.zeros_like(flat), [len(row) for row in rows]).weights
    alone = [
        correct(rule, torch.tensor(row), torch.zeros(len(row)), [len(row)]).weights for row in rows
    ]
    assert torch.equal(whole, torch.cat(alone))


def test_what_a_correction_leaves_of_the_step_is_measured_and_said() -> None:
    """Two of three completions are out, which had 2 + 2 of 5 of the advantages; the last has the
    weight 1.5."""
    rule, lengths, even = CORRECTIONS["sequence_mis"], [2, 0, 1, 2], [0.2] * 4
    found = of_ratios(rule, [3.0, 1.0], [], [0.2], [1.5, 1.0])
    advantages = torch.tensor([1.0, 1.0, -2.0, 0.5, 0.5])
    metrics = step_metrics(found, advantages, lengths, even, even)
    assert metrics["correction/kept_fraction"] == pytest.approx(1 / 3)
    assert metrics["correction/effective_step"] == pytest.approx(1.5 / 5, rel=1e-6)
    assert "keeps 33% of the completions and 30% of the step's size" in str(
        small_step(rule, metrics)
    )
    assert "sequence_mis" in str(small_step(rule, metrics))
    kept_only = step_metrics(found, advantages, lengths, even, [0.5] * 4)
    assert kept_only["correction/effective_step"] == pytest.approx(1.5 * 0.5 / (5 * 0.2), rel=1e-6)
    assert (
        small_step(rule, kept_only) is not None
    )  # a third of the completions is little, whatever they weigh
    by_sequence = step_metrics(
        found, advantages, lengths, [0.1, 0.1, 0.4, 0.1], [0.1, 0.1, 0.4, 0.1]
    )
    assert by_sequence["correction/effective_step"] == pytest.approx(
        0.15 / (0.2 + 0.8 + 0.1), rel=1e-6
    )
    whole = step_metrics(
        of_ratios(rule, [1.0, 1.0], [], [1.0], [1.0, 1.0]), advantages, lengths, even, even
    )
    assert whole == {"correction/kept_fraction": 1.0, "correction/effective_step": 1.0}
    assert small_step(rule, whole) is None
    assert small_step(rule, {}) is None  # no correction
    assert step_metrics(found, advantages * 0, lengths, even, even) == {}


def test_rules_have_readable_names() -> None:
    assert str(CORRECTIONS["token_tis"]) == "token_tis"
    assert str(CorrectionRule("sequence", cap=4.0)) == "weight=sequence, cap=4.0"


def test_bounds_belong_to_what_is_kept() -> None:
    """A ratio of exactly 1 between bounds of exactly 1; beside it the next numbers, which are
    out."""
    assert kept(Rejection(low=1.0, high=1.0), [1.0, 2.0, 0.5]) == [True, False, False]
    assert kept(Rejection("k2", "sequence_sum", 0.0, 0.0), [1.0, 1.0], [1.0, 2.0]) == [
        True,
        True,
        False,
        False,
    ]

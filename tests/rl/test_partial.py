"""What the learner makes of a completion that several versions of the weights drew: which tokens
must have its bits, and what weighs the others."""

from dataclasses import replace

import pytest
import torch

from isobit.precision import precision_from
from isobit.rl import Sample, for_precision
from isobit.rl.algorithm.objective import Objective
from isobit.rl.algorithm.samples import Segment
from isobit.rl.learner.agreement import Disagreement, require_agreement
from isobit.rl.learner.batch import by_key, training_batch

ROLLOUT = (-1.0, -2.0, -0.5, -1.5, -0.25)
POLICY = torch.tensor([-0.5, -3.0, -0.5, -1.5, -0.25])
SAMPLE = Sample(
    7, 1, (5, 6), (1, 2, 3, 4, 9), ROLLOUT, "", False, 6, reward=1.0, rollout_step=3,
    segments=(Segment(0, 2, 4, 2), Segment(2, 5, 6, 3)),
)  # fmt: skip
OBJECTIVE = for_precision(Objective(), precision_from("fp8"), stale=True)


def test_each_token_is_weighed_against_the_weights_that_drew_it() -> None:
    """Token TIS: exp(old - rollout), at most 2; exactly 1 where this version drew it."""
    batch = training_batch(OBJECTIVE, [SAMPLE], [1.0], 6)
    corrected, metrics = batch.given({0: POLICY}, None)
    assert corrected.importance is not None
    weights = corrected.importance[0]
    assert weights.tolist()[2:] == [1.0, 1.0, 1.0]
    torch.testing.assert_close(weights[:2], torch.tensor([0.5, -1.0]).exp(), rtol=1e-6, atol=0)
    assert metrics["correction/mean_weight"] == pytest.approx(float(weights.mean()))


def test_only_tokens_of_this_version_must_agree() -> None:
    batch = training_batch(OBJECTIVE, [SAMPLE], [1.0], 6)
    corrected, _ = batch.given({0: POLICY}, None)
    pairs = [*corrected.compared({0: POLICY}).values()]
    ((part, rollout, learner),) = pairs
    assert (list(part.trained), batch.comparable_tokens) == ([2, 3, 4], 3)
    assert rollout.tolist() == learner.tolist() == list(ROLLOUT[2:])
    require_agreement(pairs, [SAMPLE])
    assert by_key(pairs) == {}, "not all of it was compared"
    log_ratio = POLICY[:2].double() - torch.tensor(ROLLOUT[:2]).double()
    kl = float((log_ratio.exp() - 1 - log_ratio).mean())
    assert corrected.staleness()["staleness/kl_k3"] == pytest.approx(kl)
    wrong = POLICY.clone()
    wrong[3] = torch.nextafter(wrong[3], torch.tensor(0.0))
    with pytest.raises(Disagreement) as found:  # the control: one bit of a token of this version
        require_agreement([*corrected.compared({0: wrong}).values()], [SAMPLE])
    assert (found.value.differing, found.value.compared, found.value.first.position) == (1, 3, 3)
    whole = training_batch(OBJECTIVE, [replace(SAMPLE, segments=())], [1.0], 6)
    with pytest.raises(Disagreement):  # the control: nobody says that older weights began it
        require_agreement([*whole.given({0: POLICY}, None)[0].compared({0: POLICY}).values()], [])


@pytest.mark.parametrize("version", [5, 7])
def test_nothing_of_other_versions_is_compared(version: int) -> None:
    batch = training_batch(OBJECTIVE, [SAMPLE], [1.0], version)
    assert (batch.compared({0: POLICY}), batch.comparable_tokens) == ({}, 0)


def test_where_all_that_is_left_is_fresh_everything_is_compared() -> None:
    batch = training_batch(OBJECTIVE, [SAMPLE.trained_from(2)], [1.0], 6)
    corrected, _ = batch.given({0: POLICY[2:]}, None)
    assert corrected.importance is not None
    assert corrected.importance[0].tolist() == [1.0, 1.0, 1.0]
    assert (batch.comparable_tokens, corrected.staleness()) == (3, {})
    left = training_batch(OBJECTIVE, [SAMPLE.trained_from(5)], [1.0], 6)
    assert (left.comparable_tokens, left.zero) == (0, [True])


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(0, 2, 4, 2), Segment(3, 5, 6, 3)),
        (Segment(0, 2, 4, 2), Segment(2, 4, 6, 3)),
        (Segment(0, 2, 4, 2), Segment(2, 5, 5, 3)),
        (Segment(0, 0, 4, 2), Segment(0, 5, 6, 3)),
    ],
    ids=["gap", "short", "another version", "empty"],
)
def test_segments_that_are_none_are_refused(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(AssertionError):
        replace(SAMPLE, segments=segments)

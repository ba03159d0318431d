"""Which groups fill a step, and the credit of each sample."""

import json
from dataclasses import replace

import pytest
import torch

from isobit.rl import Group, ResolvedObjective
from isobit.rl.algorithm.advantages import Advantage
from isobit.rl.algorithm.credit import StepBatch, _sum, assign_credit
from tests.rl.helpers import group, indices


def test_without_dynamic_sampling_everything_is_kept() -> None:
    batch = StepBatch(wanted=2)
    assert batch.missing == 2
    batch.add([group(0, 1.0, 1.0), group(1, 0.0, 1.0)])
    assert (batch.missing, indices(batch.groups), batch.surplus, batch.dropped) == (
        0,
        [0, 1],
        [],
        0,
    )


def test_dynamic_sampling_drops_groups_and_keeps_the_lone_success() -> None:
    batch = StepBatch(wanted=3, dynamic=True, rounds_left=3)
    batch.add([group(0, *[0.0] * 15, 1.0), group(1, 1.0, 1.0), group(2, None, 0.0)])
    assert (batch.missing, indices(batch.groups), batch.dropped) == (2, [0], 2)
    assert len(batch.groups[0]) == 16  # all of the group, not only the sample that stands out
    batch.add([group(3, 1.0, 0.0), group(4, 0.0, 2.0), group(5, 0.0, 1.0)])
    assert (batch.missing, indices(batch.groups), indices(batch.surplus)) == (0, [0, 3, 4], [5])
    assert indices(batch.scored) == [0, 1, 2, 3, 4, 5]


def test_dynamic_sampling_gives_up_after_its_rounds() -> None:
    batch = StepBatch(wanted=2, dynamic=True, rounds_left=2)
    for _ in range(2):
        assert batch.missing == 2
        batch.add([group(0, 1.0, 1.0)])
    assert (batch.missing, batch.groups, batch.dropped) == (0, [], 2)


def test_what_a_step_leaves_over_begins_the_next() -> None:
    batch = StepBatch(wanted=2, dynamic=True, rounds_left=2)
    batch.carry_over([group(7, 0.0, 1.0), group(8, 0.0, 1.0), group(9, 0.0, 1.0)])
    assert (batch.missing, indices(batch.groups), indices(batch.surplus)) == (0, [7, 8], [9])


def test_credit_leaves_unscored_samples_out() -> None:
    samples, advantages = assign_credit(
        [group(0, 1.0, None, 0.0), group(1, None, None)], ResolvedObjective(advantage="dr_grpo")
    )
    assert [(s.prompt_index, s.sample_index) for s in samples] == [(0, 0), (0, 2)]
    assert advantages == [0.5, -0.5]


def test_the_overlong_penalty_shapes_advantages_and_not_rewards() -> None:
    objective = ResolvedObjective(advantage="dr_grpo", overlong_buffer=4, max_new_tokens=10)
    mixed = [*group(0, 1.0, length=6), *group(0, 1.0, length=9)]
    samples, advantages = assign_credit([mixed], objective)
    assert advantages == pytest.approx([0.375, -0.375])
    assert [s.reward for s in samples] == [1.0, 1.0]


def test_kl_in_the_reward_shapes_the_credit() -> None:
    """Rewards 1 and 1 with distances 2 and 4 at 0.25 are 0.5 and 0: without the penalty there is
    nothing to learn."""
    samples = [
        replace(s, reference_kl=kl)
        for s, kl in zip(group(0, 1.0, 1.0), ((0.5, 0.5, 1.0), (1.0, 0.0, 3.0)))
    ]
    objective = ResolvedObjective(advantage="dr_grpo", kl_coefficient=0.25, kl_in_reward=True)
    assert assign_credit([samples], objective)[1] == pytest.approx([0.25, -0.25])
    assert assign_credit([samples], replace(objective, kl_in_reward=False))[1] == [0.0, 0.0]
    assert [s.reward for s in assign_credit([samples], objective)[0]] == [1.0, 1.0]


@pytest.mark.parametrize("decoupled", [False, True])
def test_advantages_of_tokens_charge_the_kl_to_go(decoupled: bool) -> None:
    """Rewards 1 and 0, and the second pays at its last token: the tokens before pay with it, those
    after do not."""
    objective = ResolvedObjective(
        advantage="reinforce_pp",
        kl_coefficient=0.5,
        kl_in_reward=True,
        decoupled_rewards=decoupled,
        reward_weights=(("right", 1.0),),
    )
    samples = several(0, right=[1.0, 0.0])
    samples = [
        replace(samples[0], reference_kl=(0.0, 0.0, 0.0)),
        replace(samples[1], reference_kl=(0.0, 2.0, 0.0)),
    ]
    (good, bad) = assign_credit([samples], objective)[1]
    if decoupled:  # each normalized by itself: to go, -1, -1 and 0 of the KL
        deviation, mean = torch.tensor([0.0, 0, 0, -1, -1, 0]).std().item(), -1 / 3
        half = 0.5 / torch.tensor([1.0, 1, 1, 0, 0, 0]).std().item()
        kl = [(value - mean) / deviation for value in (0, 0, 0, -1, -1, 0)]
        expected = [half + value for value in kl[:3]] + [-half + value for value in kl[3:]]
    else:  # returns 1, 1, 1 and -1, -1, 0
        returns = torch.tensor([1.0, 1, 1, -1, -1, 0])
        expected = ((returns - returns.mean()) / returns.std()).tolist()
    assert [*good, *bad] == pytest.approx(expected, rel=1e-5)  # type: ignore[misc]


def test_a_decoupled_batch_keeps_unscored_samples_out_of_tokens_too() -> None:
    objective = ResolvedObjective(
        advantage="reinforce_pp_baseline",
        decoupled_rewards=True,
        reward_weights=(("right", 1.0), ("short", 0.5)),
    )
    mixed = [
        *several(0, right=[1.0, 0.0], short=[0.0, 1.0]),
        replace(group(0, None)[0], sample_index=2),
    ]
    samples, advantages = assign_credit([mixed], objective)
    assert len(samples) == len(advantages) == 2
    assert [len(row) for row in advantages] == [3, 3]  # type: ignore[arg-type]


def several(index: int, **rewards: list[float]) -> Group:
    """A group scored by several functions of weight 1."""
    return [
        replace(sample, rewards={name: values[i] for name, values in rewards.items()})
        for i, sample in enumerate(
            group(index, *[sum(values) for values in zip(*rewards.values())])
        )
    ]


def test_a_batch_that_waits_keeps_what_it_will_be_measured_by() -> None:
    batch = StepBatch(wanted=1, dynamic=True, rounds_left=3)
    batch.add([group(0, 1.0, 1.0), group(1, 0.0, 1.0), group(2, 1.0, 0.0)])
    again = StepBatch.from_json(json.loads(json.dumps(batch.to_json())), 1)
    assert (again.groups, again.scored, again.dropped, again.missing) == (
        batch.groups,
        batch.scored,
        1,
        0,
    )


DECOUPLED = ResolvedObjective(
    advantage="grpo", decoupled_rewards=True, reward_weights=(("right", 1.0), ("short", 0.5))
)


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([(1.0, (1.0, 2.0)), (1.0, 0.5)], (1.5, 2.5)),
        ([(2.0, 0.5), (1.0, (1.0, 2.0)), (1.0, None), (-1.0, 3)], (-1.0, 0.0)),
        ([(1.0, 0.5), (2.0, 0.25)], 1.0),
        ([(1.0, (1.0, 2.0)), (0.5, (2.0, 2.0))], (2.0, 3.0)),
        ([(1.0, ()), (1.0, 0.5)], ()),
    ],
)
def test_a_number_is_that_of_every_token(
    parts: list[tuple[float, Advantage | None]], wanted: Advantage
) -> None:
    """Where a function gives numbers for some groups and lists for others; the controls: only one
    kind."""
    assert _sum(parts) == wanted


def test_decoupled_rewards_keep_what_the_sum_confuses() -> None:
    """GDPO's case: (0, 1), (0, 2) and their like have the same advantages once only sums are
    normalized."""
    groups = [
        several(0, right=[1.0, 0.0], short=[0.0, 0.0]),
        several(1, right=[1.0, 0.0], short=[1.0, 0.0]),
    ]
    coupled = assign_credit(groups, replace(DECOUPLED, decoupled_rewards=False))[1]
    assert coupled[0] == pytest.approx(coupled[2], rel=1e-5)
    found = assign_credit(groups, DECOUPLED)[1]
    one = 0.5 / (0.5**0.5 + 1e-6)
    assert found == pytest.approx([one, -one, 1.5 * one, -1.5 * one])


def test_opposed_rewards_of_equal_sum_teach_only_when_decoupled() -> None:
    opposed = several(0, right=[1.0, 0.0], short=[0.0, 1.0])
    assert assign_credit([opposed], replace(DECOUPLED, decoupled_rewards=False))[1] == [0.0, 0.0]
    assert assign_credit([opposed], DECOUPLED)[1][0] > 0
    for decoupled, kept in ((False, 0), (True, 1)):
        batch = StepBatch(1, True, 3, replace(DECOUPLED, decoupled_rewards=decoupled))
        batch.add([opposed])
        assert len(batch.groups) == kept


def test_decoupled_rewards_leave_unscored_samples_out_and_add_the_shaping() -> None:
    mixed = [
        *several(0, right=[1.0, 0.0], short=[0.0, 0.0]),
        replace(group(0, None)[0], sample_index=2),
    ]
    assert len(assign_credit([mixed], DECOUPLED)[1]) == 2
    long = replace(mixed[0], completion_ids=(1,) * 10, rollout_logprobs=(-1.0,) * 10)
    shaped = replace(DECOUPLED, max_new_tokens=10, overlong_buffer=4)
    assert assign_credit([[long, mixed[1]]], shaped)[1] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_a_batch_that_waits_asks_for_no_more_even_if_it_is_not_full() -> None:
    again = StepBatch.from_json(StepBatch(wanted=3, groups=[group(0, 0.0, 1.0)]).to_json(), 3)
    assert (again.wanted, again.rounds_left, again.missing) == (3, 0, 0)


def test_what_is_left_over_grows_with_every_round() -> None:
    batch = StepBatch(wanted=1, dynamic=True, rounds_left=3)
    for index in (0, 2):
        batch.add([group(index, 0.0, 1.0), group(index + 1, 1.0, 0.0)])
    assert (indices(batch.groups), indices(batch.surplus)) == ([0], [1, 2, 3])


def test_parts_of_an_unscored_sample_are_in_no_baseline() -> None:
    """Its sum is unknown, so that the parts that are known do not count either, nor what shapes
    them."""
    scored = several(0, right=[1.0, 0.0], short=[0.0, 0.0])
    unscored = replace(
        group(0, None, length=10)[0], sample_index=2, rewards={"right": 9.0, "short": None}
    )
    shaped = replace(DECOUPLED, max_new_tokens=10, overlong_buffer=4)
    assert assign_credit([[*scored, unscored]], shaped) == assign_credit([scored], shaped)


def test_the_overlong_penalty_has_the_size_that_is_set() -> None:
    objective = ResolvedObjective(
        advantage="dr_grpo", overlong_buffer=4, overlong_penalty=0.5, max_new_tokens=10
    )
    mixed = [*group(0, 1.0, length=6), *group(0, 1.0, length=10)]
    assert assign_credit([mixed], objective)[1] == pytest.approx([0.25, -0.25])

"""Which groups fill a step, and the credit of each sample."""

from dataclasses import replace

import pytest

from isobit.rl import Group, Objective, Sample
from isobit.rl.collect import StepBatch, assign_credit


def group(index: int, *rewards: float | None, length: int = 3) -> Group:
    return [
        Sample(index, i, (1,), (2,) * length, (-1.0,) * length, "", False, 0, reward)
        for i, reward in enumerate(rewards)
    ]


def indices(groups: list[Group]) -> list[int]:
    return [samples[0].prompt_index for samples in groups]


def test_without_dynamic_sampling_everything_is_kept() -> None:
    batch = StepBatch(wanted=2)
    assert batch.missing == 2
    batch.add([group(0, 1.0, 1.0), group(1, 0.0, 1.0)])
    assert (batch.missing, indices(batch.groups), batch.surplus, batch.dropped) == (0, [0, 1], [], 0)


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
        [group(0, 1.0, None, 0.0), group(1, None, None)], Objective(advantage="dr_grpo")
    )
    assert [(s.prompt_index, s.sample_index) for s in samples] == [(0, 0), (0, 2)]
    assert advantages == [0.5, -0.5]


def test_the_overlong_penalty_shapes_advantages_and_not_rewards() -> None:
    objective = Objective(advantage="dr_grpo", overlong_buffer=4, max_new_tokens=10)
    mixed = [*group(0, 1.0, length=6), *group(0, 1.0, length=9)]
    samples, advantages = assign_credit([mixed], objective)
    assert advantages == pytest.approx([0.375, -0.375])
    assert [s.reward for s in samples] == [1.0, 1.0]


def test_kl_in_the_reward_shapes_the_credit() -> None:
    """Rewards 1 and 1 with distances 2 and 4 at 0.25 are 0.5 and 0: without the penalty there is nothing to learn."""
    samples = [replace(s, reference_kl=kl) for s, kl in zip(group(0, 1.0, 1.0), (2.0, 4.0))]
    objective = Objective(advantage="dr_grpo", kl_coefficient=0.25, kl_in_reward=True)
    assert assign_credit([samples], objective)[1] == pytest.approx([0.25, -0.25])
    assert assign_credit([samples], replace(objective, kl_in_reward=False))[1] == [0.0, 0.0]
    assert [s.reward for s in assign_credit([samples], objective)[0]] == [1.0, 1.0]

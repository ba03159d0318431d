"""The replay buffer: what it keeps, what it draws, and that draws repeat."""

from collections import Counter

import pytest

from isobit.rl.algorithm.replay import ReplayBuffer, ReplaySettings
from tests.rl.helpers import group, indices


def test_the_oldest_make_room_and_what_teaches_nothing_is_not_kept() -> None:
    buffer = ReplayBuffer(ReplaySettings(capacity=3, groups_per_step=1), 0)
    buffer.add([group(0, 0.0, 1.0), group(1, 1.0, 1.0), group(2, 0.0, None, 1.0)])
    buffer.add([group(3, 0.0, 1.0, step=1), group(4, 0.0, 1.0, step=1)])
    assert indices(buffer.groups) == [2, 3, 4]


def test_too_old_groups_are_forgotten() -> None:
    buffer = ReplayBuffer(ReplaySettings(capacity=9, groups_per_step=9, max_staleness=2), 0)
    buffer.add([group(step, 0.0, 1.0, step=step) for step in range(5)])
    assert indices(buffer.draw(5)) == [3, 4]
    assert indices(buffer.groups) == [3, 4]
    assert buffer.draw(9) == []


def test_draws_are_without_replacement_and_repeat() -> None:
    def drawn(seed: int, step: int) -> list[int]:
        buffer = ReplayBuffer(ReplaySettings(capacity=20, groups_per_step=5), seed)
        buffer.add([group(i, 0.0, 1.0) for i in range(20)])
        return indices(buffer.draw(step))

    assert drawn(0, 1) == drawn(0, 1)
    assert len(set(drawn(0, 1))) == 5
    assert drawn(0, 1) != drawn(1, 1)
    assert drawn(0, 1) != drawn(0, 2)


def test_chances_follow_age_and_spread() -> None:
    """A single draw hits a group in proportion to its weight: half as old, twice; half the
    deviation, half."""
    hits: Counter[int] = Counter()
    for seed in range(3000):
        buffer = ReplayBuffer(ReplaySettings(capacity=3, groups_per_step=1, half_life=2.0), seed)
        buffer.add([group(0, 0.0, 1.0, step=2), group(1, 0.0, 1.0), group(2, 0.0, 0.5, step=2)])
        hits.update(indices(buffer.draw(3)))
    assert hits[0] / 3000 == pytest.approx(0.5, abs=0.04)
    assert hits[1] / 3000 == pytest.approx(0.25, abs=0.04)
    assert hits[2] / 3000 == pytest.approx(0.25, abs=0.04)


def test_off_by_default() -> None:
    buffer = ReplayBuffer(ReplaySettings(), 0)
    buffer.add([group(0, 0.0, 1.0)])
    assert (buffer.groups, buffer.draw(1)) == ([], [])

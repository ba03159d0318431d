"""The replay buffer: what it keeps, what it draws, and that draws repeat."""

import math
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from isobit.rl.algorithm import replay
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


def test_weights_too_small_for_a_float_are_drawn_in_the_same_order() -> None:
    """A half-life that leaves nothing of an old group's weight ended a run; the control: where no
    weight is so small, the logarithms draw the same groups, and the times are as they were."""
    settings = ReplaySettings(capacity=9, groups_per_step=2, max_staleness=99, half_life=0.05)
    buffer = ReplayBuffer(settings, 0)
    buffer.add([group(i, 0.0, 1.0, step=20 * i) for i in range(4)])
    assert indices(buffer.draw(60)) == [2, 3]
    assert indices(buffer.draw(99)) == [2, 3]
    for seed in range(300):
        ordinary = ReplayBuffer(ReplaySettings(capacity=9, groups_per_step=4, half_life=1.5), seed)
        ordinary.add([group(i, 0.0, 1.0 + i % 2, step=i) for i in range(8)])
        uniform = np.random.default_rng(seed).random(8).tolist()
        times = ordinary._times(uniform, 8)
        spreads = [0.5 + 0.5 * (i % 2) for i in range(8)]
        assert times == [
            -math.log1p(-u) / (2.0 ** (-(8 - i) / 1.5) * spreads[i]) for i, u in enumerate(uniform)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "float_info", SimpleNamespace(min=1e9))  # all are too small
            patch.setattr(replay, "_log", math.log)
            logs = ordinary._times(uniform, 8)
        assert np.argsort(logs).tolist() == np.argsort(times).tolist()


def test_off_by_default() -> None:
    buffer = ReplayBuffer(ReplaySettings(), 0)
    buffer.add([group(0, 0.0, 1.0)])
    assert (buffer.groups, buffer.draw(1)) == ([], [])

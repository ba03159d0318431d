"""A bounded buffer of past groups, drawn from by age and by the spread of their rewards.

A group's weight is 2^(-age / half_life) · standard deviation of its rewards: recent groups that
disagree teach most. Draws are without replacement and a function of (seed, step): the exponential
race (Efraimidis and Spirakis 2006), on raw Philox numbers. A drawn group keeps its rollout
log-probabilities; the learner computes those under its present weights, and a correction weighs the
two. Left out: the learning itself (`learner/learner.py`, `correction.py`).
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Annotated

from isobit.errors import IsobitError
from isobit.options.declare import above, at_least
from isobit.rl.algorithm.advantages import has_spread
from isobit.rl.algorithm.samples import Group


@dataclass(frozen=True)
class ReplaySettings:
    """Training again on past groups, drawn by age and by the spread of their rewards."""

    capacity: Annotated[int, at_least(0), "groups kept; 0: no replay"] = 0
    groups_per_step: Annotated[
        int, at_least(0), "past groups in each step, besides prompts_per_step fresh ones"
    ] = 0
    max_staleness: Annotated[int, at_least(0), "age limit in steps; older groups are dropped"] = 8
    half_life: Annotated[
        float, above(0), "steps after which a group's chance to be drawn halves"
    ] = 2.0

    def __post_init__(self) -> None:
        if self.groups_per_step and not self.max_staleness:
            raise IsobitError(
                "max_staleness: 0 forgets every past group; give at least 1, or groups_per_step: 0"
            )
        if self.groups_per_step > self.capacity:
            raise IsobitError(
                f"groups_per_step {self.groups_per_step} exceeds capacity {self.capacity}"
            )


class ReplayBuffer:
    """Groups that can be learned from again, oldest first. Ages are in training steps."""

    def __init__(self, settings: ReplaySettings, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.groups: list[Group] = []

    def restore(self, groups: Iterable[Group]) -> None:
        """Replace the groups by those of a run that is resumed."""
        self.groups = list(groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Keep the groups whose rewards differ; the oldest groups beyond the capacity are
        forgotten."""
        if self.settings.capacity:
            self.groups += [g for g in groups if has_spread([s.reward for s in g])]
            del self.groups[: -self.settings.capacity]

    def draw(self, step: int) -> list[Group]:
        """Return the groups to learn from again in the step after `step` finished ones, and forget
        the groups that are too old."""
        settings = self.settings
        self.groups = [g for g in self.groups if step - g[0].rollout_step <= settings.max_staleness]
        if not settings.groups_per_step or not self.groups:
            return []
        import numpy as np  # here, so that the settings import none

        key = np.random.SeedSequence([self.seed, step, 0x5EED]).generate_state(2, np.uint64)
        uniform = (
            np.random.Philox(key=key).random_raw(len(self.groups)) >> np.uint64(11)
        ) * 2.0**-53
        times = self._times(uniform.tolist(), step)
        chosen = sorted(np.argsort(times, kind="stable")[: settings.groups_per_step].tolist())
        return [self.groups[i] for i in chosen]

    def _times(self, uniform: Sequence[float], step: int) -> list[float]:
        """Return the time at which each group's exponential clock rings; the groups with the
        earliest times are drawn. Where a weight is too small for a float, return the logarithms of
        the times, which are in the same order."""
        spreads = [pstdev(s.reward for s in g if s.reward is not None) for g in self.groups]
        halved = [(step - g[0].rollout_step) / self.settings.half_life for g in self.groups]
        weights = [2.0**-age * spread for age, spread in zip(halved, spreads)]
        waits = [-math.log1p(-u) for u in uniform]
        if min(weights) >= sys.float_info.min:
            return [wait / weight for wait, weight in zip(waits, weights)]
        return [
            _log(wait) + age * math.log(2) - _log(spread)
            for wait, age, spread in zip(waits, halved, spreads)
        ]


def _log(value: float) -> float:
    return math.log(max(value, sys.float_info.min))

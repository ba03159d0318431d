"""From scored groups to what the learner takes: which groups fill a step, and the credit of each sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from isobit.rl.advantages import batch_advantages, has_spread, overlong_penalty
from isobit.rl.objective import Objective
from isobit.rl.samples import Group, Sample


@dataclass
class StepBatch:
    """The groups of one step. Under dynamic sampling groups without spread are dropped and others sampled instead,
    `rounds_left` times; what comes in beyond `wanted` is kept for the next step."""

    wanted: int
    dynamic: bool = False
    rounds_left: int = 1
    groups: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    dropped: int = 0
    scored: list[Group] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """How many more groups to roll out now."""
        return self.wanted - len(self.groups) if self.rounds_left > 0 else 0

    def carry_over(self, groups: Sequence[Group]) -> None:
        """Begin with what an earlier step left."""
        self.groups, self.surplus = list(groups[: self.wanted]), list(groups[self.wanted :])

    def add(self, groups: Sequence[Group]) -> None:
        """Take scored groups in."""
        self.rounds_left -= 1
        self.scored += groups
        kept = [g for g in groups if not self.dynamic or has_spread([s.reward for s in g])]
        self.dropped += len(groups) - len(kept)
        room = self.wanted - len(self.groups)
        self.groups += kept[:room]
        self.surplus += kept[room:]


def assign_credit(groups: Sequence[Group], objective: Objective) -> tuple[list[Sample], list[float]]:
    """The samples that can be learned from, with their advantages; unscored samples are left out.

    The overlong penalty and the KL in the reward shape what the advantage is computed from, not the reward that is
    logged.
    """
    samples: list[Sample] = []
    advantages: list[float] = []
    shaped = [[_shaped_reward(sample, objective) for sample in group] for group in groups]
    for group, credited in zip(groups, batch_advantages(shaped, objective.advantage)):
        for sample, advantage in zip(group, credited):
            if advantage is not None:
                samples.append(sample)
                advantages.append(advantage)
    return samples, advantages


def _shaped_reward(sample: Sample, objective: Objective) -> float | None:
    if sample.reward is None:
        return None
    length, limit = len(sample.completion_ids), objective.max_new_tokens
    shaped = sample.reward + overlong_penalty(length, limit, objective.overlong_buffer, objective.overlong_penalty)
    if objective.kl_in_reward:
        assert sample.reference_kl is not None, "the reference has not seen this sample"
        shaped -= objective.kl_coefficient * sample.reference_kl
    return shaped

"""From scored groups to what the learner takes: which groups fill a step, and the credit of each
sample."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobit.rl.algorithm.advantages import (
    Advantage,
    AdvantageInputs,
    Advantages,
    has_spread,
    overlong_penalty,
)
from isobit.rl.algorithm.functions import advantage_function
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.samples import Group, Sample, groups_from_json, groups_to_json

LogitNorms = Callable[[Sequence[Sample]], Sequence[Sequence[float]]]
"""A function that returns, for each of the samples, what `AdvantageInputs.logit_norms` has of
it."""


@dataclass
class StepBatch:
    """The groups of one step. Under dynamic sampling, groups without spread are dropped and others
    are sampled instead, `rounds_left` times; groups beyond `wanted` are kept for the next step.
    `objective` defines what spread is."""

    wanted: int
    dynamic: bool = False
    rounds_left: int = 1
    objective: ResolvedObjective = field(default_factory=ResolvedObjective)
    groups: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    dropped: int = 0
    scored: list[Group] = field(default_factory=list)
    replayed: list[Group] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """The number of groups that are still to be rolled out now."""
        return self.wanted - len(self.groups) if self.rounds_left > 0 else 0

    @property
    def learned_from(self) -> list[Group]:
        """The groups that a step learns from, replayed ones at the end."""
        return [*self.groups, *self.replayed]

    def carry_over(self, groups: Sequence[Group]) -> None:
        """Begin the batch with the groups that an earlier step left."""
        self.groups, self.surplus = list(groups[: self.wanted]), list(groups[self.wanted :])

    def to_json(self) -> dict[str, Any]:
        """Return a batch that waits to be learned from, in plain values. A scored group that is
        among the batch's groups is written as its number there."""
        numbers = {id(group): number for number, group in enumerate(self.groups)}
        scored = [
            number if (number := numbers.get(id(group))) is not None else groups_to_json([group])[0]
            for group in self.scored
        ]
        return {"dropped": self.dropped, "groups": groups_to_json(self.groups), "scored": scored}

    @staticmethod
    def from_json(values: Mapping[str, Any], wanted: int) -> "StepBatch":
        """Return the batch that `to_json` wrote."""
        groups = groups_from_json(values["groups"])
        scored = [
            groups[group] if isinstance(group, int) else groups_from_json([group])[0]
            for group in values["scored"]
        ]
        return StepBatch(
            wanted, groups=groups, scored=scored, dropped=values["dropped"], rounds_left=0
        )

    def add(self, groups: Sequence[Group]) -> None:
        """Add the scored groups of one round: drop those without spread under dynamic sampling, and
        keep those beyond `wanted` as surplus."""
        self.rounds_left -= 1
        self.scored += groups
        teaching = [g for g in groups if not self.dynamic or teaches(g, self.objective)]
        self.dropped += len(groups) - len(teaching)
        room = self.wanted - len(self.groups)
        self.groups += teaching[:room]
        self.surplus += teaching[room:]


def assign_credit(
    groups: Sequence[Group], objective: ResolvedObjective, logit_norms: LogitNorms | None = None
) -> tuple[list[Sample], list[Advantage]]:
    """Return the samples that can be learned from and their advantages, each one number or one for
    each trained token; unscored samples are left out. `logit_norms` is called where the advantage
    weighs places.

    The overlong penalty and the KL in the reward change the advantage, but not the reward that is
    logged.
    """
    samples: list[Sample] = []
    advantages: list[Advantage] = []
    norms = None
    if objective.weighs_places:
        assert logit_norms is not None
        rows = iter(logit_norms([sample for group in groups for sample in group]))
        norms = [[next(rows) for _ in group] for group in groups]
    for group, credited in zip(groups, _advantages(groups, objective, norms)):
        for sample, advantage in zip(group, credited):
            if advantage is not None:
                samples.append(sample)
                advantages.append(advantage)
    return samples, advantages


def teaches(group: Group, objective: ResolvedObjective) -> bool:
    """Return whether the rewards of a group differ: their sums, or, where rewards are decoupled,
    those of any function with a weight."""
    if not objective.decoupled_rewards:
        return has_spread([s.reward for s in group])
    return any(
        has_spread(_component(group, name)) for name, weight in objective.reward_weights if weight
    )


def _advantages(
    groups: Sequence[Group],
    objective: ResolvedObjective,
    norms: Sequence[Sequence[Sequence[float]]] | None,
) -> Advantages:
    """Return the advantages of all groups: those of the shaped sum of rewards; or, where rewards
    are decoupled, the weighted sum of each function's advantages (after GDPO, Liu et al. 2026,
    arXiv 2601.05242, without its normalization over the batch), with what shapes the reward as one
    more function of weight 1."""
    estimate = advantage_function(objective.advantage)
    extra = [[_overlong(sample, objective) for sample in group] for group in groups]
    charged = [[_charged(sample, objective) for sample in group] for group in groups]
    if not objective.decoupled_rewards:
        shaped = [
            [_plus(s.reward, more) for s, more in zip(group, row)]
            for group, row in zip(groups, extra)
        ]
        return estimate(AdvantageInputs(shaped, charged, groups, objective, norms))
    shaping = [
        [None if s.reward is None else more for s, more in zip(g, row)]
        for g, row in zip(groups, extra)
    ]
    free = [[(0.0,) * len(row) for row in group] for group in charged]
    terms = [(1.0, estimate(AdvantageInputs(shaping, charged, groups, objective, norms)))]
    for name, weight in objective.reward_weights:
        rewards = [_component(group, name) for group in groups]
        terms.append((weight, estimate(AdvantageInputs(rewards, free, groups, objective, norms))))
    return [
        [
            None
            if sample.reward is None
            else _sum([(weight, values[g][i]) for weight, values in terms if weight])
            for i, sample in enumerate(group)
        ]
        for g, group in enumerate(groups)
    ]


def _sum(terms: Sequence[tuple[float, Advantage | None]]) -> Advantage:
    """Return the weighted sum of advantages: a number, or, where any part is token by token, one
    number for each token, in which a part that is a number counts for every token. A function that
    did not score the sample adds nothing."""
    scored = [(weight, a) for weight, a in terms if a is not None]
    numbers = [weight * a for weight, a in scored if isinstance(a, (int, float))]
    rows = [
        [weight * value for value in a] for weight, a in scored if not isinstance(a, (int, float))
    ]
    if rows:
        return tuple(math.fsum((*numbers, *token)) for token in zip(*rows, strict=True))
    return sum(numbers)


def _component(group: Group, name: str) -> list[float | None]:
    return [None if sample.reward is None else sample.rewards.get(name) for sample in group]


def _plus(reward: float | None, extra: float) -> float | None:
    return None if reward is None else reward + extra


def _overlong(sample: Sample, objective: ResolvedObjective) -> float:
    limit, buffer = objective.max_new_tokens, objective.overlong_buffer
    return overlong_penalty(sample.num_sampled, limit, buffer, objective.overlong_penalty)


def _charged(sample: Sample, objective: ResolvedObjective) -> tuple[float, ...]:
    """Return what the KL to the reference takes from each trained token; 0 for a sample whose
    teacher was shown nothing, which has no advantage either."""
    untaught = objective.distills and sample.reference_kl is None
    if not objective.kl_in_reward or sample.reward is None or untaught:
        return (0.0,) * sample.num_trained
    assert sample.reference_kl is not None, "the reference has not seen this sample"
    return tuple(objective.kl_coefficient * value for value in sample.reference_kl)

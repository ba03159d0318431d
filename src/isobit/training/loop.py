"""Reinforcement learning: the whole algorithm. Open this first.

    sync            make the FP8 working weights from the masters
    roll out        sample a group of completions for each prompt, and record their log-probabilities
    score           run the reward functions
    assign credit   turn the rewards of a group into advantages
    learn           take optimizer steps on the loss
    record          write metrics, completions, and a checkpoint when one is due

With a unified precision the learner computes the rollout's log-probabilities bit for bit
(tests/training/test_loop.py), so they are the old log-probabilities of the surrogate. Where
rollouts run ahead of the learner or past groups are replayed they are of older weights, and a
correction weighs them. Each verb returns what it found, and `record` is given all of it. Left out:
how a run is opened (`run.py`), and each verb itself (`policy.py`,
`rollouts/sources.py`, `learning.py`, `recording/recorder.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from isobit.rl.algorithm.credit import StepBatch, assign_credit
from isobit.rl.algorithm.samples import Group
from isobit.training.measuring.meter import added
from isobit.training.scoring import RolloutScoring

if TYPE_CHECKING:
    from isobit.training.run import Run


@dataclass(frozen=True, eq=False)
class Rollout:
    """The batch that a step learns from, and what sampling and scoring took in this step (seconds
    and counts)."""

    batch: StepBatch
    metrics: Mapping[str, float]


class Rollouts(Protocol):
    """The source of batches: sampled now, recorded by another run, ahead of the learner, or with
    past groups."""

    def next(self) -> Rollout:
        """Return the batch of the next step, its groups scored."""


def training_loop(run: "Run[Any]") -> None:
    """Do all steps that are left."""
    while run.unfinished:
        training_step(run)


def training_step(run: "Run[Any]") -> None:
    """Do one step. `run.rollouts.next` samples and scores with `roll_out`, or takes what was
    recorded."""
    synced = run.policy.sync()
    rollout = run.rollouts.next()
    groups, norms = rollout.batch.learned_from, run.learning.logit_norms
    samples, advantages = assign_credit(groups, run.objective, norms)
    lesson = run.learning.learn(samples, advantages)
    run.recorder.record(synced, rollout.batch, rollout.metrics, lesson)


@dataclass(frozen=True, eq=False)
class Sampled:
    """Groups that this rank has sampled, by the place of their prompt; their rewards, which are
    being computed."""

    groups: Mapping[int, Group]
    scoring: RolloutScoring
    metrics: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Scored:
    """Groups of all ranks with rewards, and what sampling and scoring them took."""

    groups: Sequence[Group]
    metrics: Mapping[str, float]


class RolloutSource(Protocol):
    """The prompts of a run, the engine that answers them, and the reward functions that score the
    answers."""

    def sample(self, count: int) -> Sampled:
        """Return a group of completions for each of the next `count` prompts; where there are
        several ranks, for some."""

    def score(self, sampled: Sampled) -> Scored:
        """Return the same groups with rewards, those of all ranks together."""


def roll_out(batch: StepBatch, source: RolloutSource) -> dict[str, float]:
    """Fill a batch: once, or under dynamic sampling until enough groups have rewards that differ.
    What it took."""
    took: dict[str, float] = {}
    while batch.missing:
        scored = source.score(source.sample(batch.missing))
        batch.add(scored.groups)
        took = added(took, scored.metrics)
    return took

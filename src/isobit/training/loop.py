"""Reinforcement learning: the whole algorithm. Open this first.

    sync            make the FP8 working weights from the masters
    roll out        sample a group of completions for each prompt, and record their log-probabilities
    score           run the reward functions
    assign credit   turn the rewards of a group into advantages
    learn           take optimizer steps on the loss
    record          write metrics, completions, and a checkpoint when one is due

With a unified precision the learner computes the rollout's log-probabilities bit for bit (tests/training/test_loop.py),
so they are the old log-probabilities of the surrogate. Where rollouts run ahead of the learner or past groups are
replayed they are of older weights, and a correction weighs them. Left out: how a run is opened (`session/opening.py`),
and each verb itself (`policy.py`, `rollouts/sources.py`, `learning.py`, `recording/recorder.py`).
"""

from collections.abc import Sequence
from typing import Protocol

from isobit.rl.algorithm.credit import StepBatch, assign_credit
from isobit.rl.algorithm.objective import Objective
from isobit.rl.algorithm.samples import Group
from isobit.training.learning import Learning
from isobit.training.policy import Policy
from isobit.training.recording.recorder import Recorder


class Rollouts(Protocol):
    """Where batches come from: sampled now, recorded by another run, ahead of the learner, or with past groups."""

    def next(self) -> StepBatch:
        """The batch of the next step, its groups scored."""


class Prompts(Protocol):
    """The prompts of a run, and the engine and the reward functions that answer and score them."""

    def sample(self, count: int) -> Sequence[Group]:
        """A group of completions for each of the next `count` prompts; where there are several ranks, for some."""

    def score(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The same groups with rewards, those of all ranks together."""


class Run(Protocol):
    """An open run, as `session/open_run.py` puts it together."""

    objective: Objective
    policy: Policy
    rollouts: Rollouts
    learning: Learning
    recorder: Recorder

    @property
    def unfinished(self) -> bool:
        """Whether steps are left to do, and nobody has interrupted."""


def training_loop(run: Run) -> None:
    """All steps that are left."""
    while run.unfinished:
        training_step(run)


def training_step(run: Run) -> None:
    """One step. `run.rollouts.next` samples and scores with `roll_out`, or takes what was recorded."""
    run.policy.sync()
    batch = run.rollouts.next()
    samples, advantages = assign_credit([*batch.groups, *batch.replayed], run.objective)
    learned = run.learning.learn(samples, advantages)
    run.recorder.record(batch, learned)


def roll_out(batch: StepBatch, prompts: Prompts) -> None:
    """Fill a batch: once, or under dynamic sampling until enough groups have rewards that differ."""
    while batch.missing:
        groups = prompts.sample(batch.missing)
        batch.add(prompts.score(groups))

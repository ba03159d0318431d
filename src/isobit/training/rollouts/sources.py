"""The sources of the groups of a step: groups sampled now, groups recorded by another run, groups
sampled ahead of the learner, and past groups again.

Each source has `next()`, which returns the batch of the next step, and sources wrap one another.
What they keep between steps is in the run's `State`, which a checkpoint holds. Left out: how
completions are sampled (`engine/`) and scored (`scoring.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from isobit.config import Config
from isobit.data.curriculum import Curriculum
from isobit.data.dataset import Example
from isobit.engine.engine import OnGroup
from isobit.engine.sequences import Stats, clamped_fraction
from isobit.engine.types import Completion
from isobit.rl import Group, Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.replay import ReplayBuffer
from isobit.run.metrics import member
from isobit.training.context import RunContext
from isobit.training.loop import Rollout, Rollouts, Sampled, Scored, roll_out
from isobit.training.measuring.meter import added
from isobit.training.rollouts.problems import Problems
from isobit.training.rollouts.rank_sampling import gather_groups, gather_stats
from isobit.training.saving.snapshot import State
from isobit.training.scoring import RewardScorer

Judged = tuple[tuple[float, ...] | None, tuple[int, ...] | None]
"""(the KL to the reference of each trained token of a completion, None where a teacher is shown
nothing; the ids that a teacher reads before it, if they count later and are not its prompt)."""
ReferenceKL = Callable[[Sequence[Group]], Sequence[Judged]]
"""Returns the `Judged` of each completion, group by group."""


class Sampler(Protocol):
    """The source of completions: this rank's engine (`rank_sampling.ClaimedGroups`), or the engines
    of a fleet (`asynchronous.FleetGroups`)."""

    @property
    def n(self) -> int:
        """The number of completions of each prompt."""

    def __call__(
        self, examples: Sequence[Example], ids: Sequence[int], on_group: OnGroup
    ) -> tuple[dict[int, list[Completion]], Stats]:
        """Sample and return the groups of this rank, by the index of their example, and the
        statistics of its engines; calls `on_group` with each group that is done."""


class LiveRollouts:
    """Batches of `prompts_per_step` groups of completions of the next prompts, sampled by the
    present weights. Groups that one step has left over begin the batch of the next step.

    `reference_kl`: returns the KL of each sample, where the reward pays for its distance to the
    reference. `before_scoring` is called before rewards are collected, and `meanwhile` over and
    over until they are there.
    """

    def __init__(
        self,
        config: Config,
        context: RunContext,
        sampler: Sampler,
        scorer: RewardScorer,
        reference_kl: ReferenceKL | None,
        before_scoring: Callable[[], object] = lambda: None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._train, self._sampler, self._scorer = context.train, sampler, scorer
        self._objective, self._state = context.trained.objective, context.state
        self._ranks, self._meter, self._saver = context.ranks, context.meter, context.saver
        self._warn = context.display.warn
        self._prompts_per_step, self._steps = config.prompts_per_step, config.steps
        self._reference_kl, self._before_scoring = reference_kl, before_scoring
        self._meanwhile = meanwhile
        variables = config.environment.variables
        self._problems = Problems(context.ranks, scorer.stop_on_error, variables)
        self._curriculum = Curriculum(config.curriculum, context.train, context.state.solved)

    def next(self) -> Rollout:
        objective, state = self._objective, self._state
        rounds = objective.max_resamples if objective.dynamic_sampling else 1
        batch = StepBatch(self._prompts_per_step, objective.dynamic_sampling, rounds, objective)
        batch.carry_over(state.pending)
        took = roll_out(batch, self)
        state.pending = batch.surplus
        return Rollout(batch, took)

    def sample(self, count: int) -> Sampled:
        """Sample a group of completions for each of the next `count` prompts that this rank claims;
        reward functions begin on finished groups while others are still sampled."""
        state, took = self._state, dict[str, float]()
        ids, next_cursor = self._curriculum.take(state.cursor, count)
        examples = [self._train.at(cursor) for cursor in ids]
        progress = state.progress(self._steps, len(self._train))
        scoring = self._scorer.begin(examples, self._sampler.n, progress)
        with (
            self._meter.timed(took, "rollout", peak=True),
            self._saver.broken_weights_end_the_run(),
        ):
            completed, stats = self._ranks.run_on_all(
                lambda: self._sampler(examples, ids, scoring.add)
            )
        stats = gather_stats(self._ranks, stats)
        took |= _counted(stats) | clamped_fraction(stats.kv_clamped, stats.kv_written)
        if self._curriculum.chooses:
            took["prompts/skipped"] = float(next_cursor - state.cursor - count)
        state.cursor = next_cursor
        groups = {
            i: [sample_of(c, state.step) for c in group] for i, group in sorted(completed.items())
        }
        return Sampled(groups, scoring, took)

    def score(self, sampled: Sampled) -> Scored:
        """Return the sampled groups of all ranks with their rewards and, where the reward pays for
        it, with their distance to the reference."""
        took, ranks = dict(sampled.metrics), self._ranks
        self._before_scoring()
        with self._meter.timed(took, "score"):
            rewards = ranks.run_on_all(lambda: sampled.scoring.collect(self._meanwhile))
        took["time/score_overlapped"] = sampled.scoring.overlapped_s
        rewarded = iter(rewards)
        mine = {
            index: [
                replace(sample, reward=reward.total, rewards=reward.by_function)
                for sample, reward in zip(group, islice(rewarded, len(group)))
            ]
            for index, group in sampled.groups.items()
        }
        scored = gather_groups(ranks, mine)
        notes = sampled.scoring.notes
        for line in self._problems.of_step(self._state.step + 1, notes, rewards, scored):
            self._warn(line)
        for group in scored:
            self._curriculum.see(group[0].prompt_index, [sample.reward for sample in group])
        tokens = sum(sample.num_trained for group in scored for sample in group)
        took.setdefault("rollout/tokens", tokens)
        if self._reference_kl is None:
            return Scored(scored, took)
        with self._meter.timed(took, "score"), self._saver.broken_weights_end_the_run():
            distances = self._reference_kl(scored)
        if self._objective.distills:
            took["groups/unshown"] = float(sum(distance is None for distance, _ in distances))
        judged = iter(distances)
        charged = [[_charged(sample, *next(judged)) for sample in group] for group in scored]
        return Scored(charged, took)


def _charged(sample: Sample, distance: tuple[float, ...] | None, read: Any) -> Sample:
    return replace(sample, reference_kl=distance, teacher_ids=read)


@dataclass(frozen=True, eq=False)
class RecordedRollouts:
    """The batches that another run learned from, in the order of that run."""

    groups: Iterator[list[Group]]

    def next(self) -> Rollout:
        groups = next(self.groups, [])
        return Rollout(StepBatch(len(groups), groups=groups, scored=groups, rounds_left=0), {})


@dataclass(frozen=True, eq=False)
class PrefetchedRollouts:
    """Batches of a source, each sampled `steps` steps before it is learned from.

    Batches are sampled ahead at the end of a run too, where nothing will learn from the last ones
    yet: so a run that is extended equals a run that was planned longer.
    """

    source: Rollouts
    state: State
    steps: int

    def next(self) -> Rollout:
        took: dict[str, float] = {}
        while len(self.state.queue) <= self.steps:
            sampled = self.source.next()
            self.state.queue.append(sampled.batch)
            took = added(took, sampled.metrics)
        return Rollout(self.state.queue.pop(0), took)

    def settle(self) -> dict[str, float]:
        """Return no metrics: nothing is sampled while the learner works."""
        return {}


@dataclass(frozen=True, eq=False)
class ReplayedRollouts:
    """The batches of a source, each with past groups to learn from again."""

    source: Rollouts
    state: State
    buffer: ReplayBuffer

    def next(self) -> Rollout:
        rollout = self.source.next()
        batch = replace(rollout.batch, replayed=self.buffer.draw(self.state.step))
        return replace(rollout, batch=batch)


def _counted(stats: Stats) -> dict[str, float]:
    """Return the counts of the engines in a rollout as metrics. Where environments answered,
    preemptions and cached tokens depend on when they answered, and are named `env/...`."""
    drafts = drafted(stats)
    if not stats.episodes:
        return drafts | {
            "rollout/preemptions": stats.preemptions,
            "rollout/prompt_tokens": stats.prompt_tokens,
            "rollout/cached_tokens": stats.cached_tokens,
        }
    return drafts | {
        "env/preemptions": stats.preemptions,
        "rollout/prompt_tokens": stats.prompt_tokens,
        "env/cached_tokens": stats.cached_tokens,
        "time/tools": sum(stats.tool_s.values()),
        **{f"time/tools/{member(name)}": took for name, took in sorted(stats.tool_s.items())},
    }


def drafted(stats: Stats) -> dict[str, float]:
    """Return the metrics of drafted and accepted tokens; empty where nothing was drafted."""
    if not stats.num_drafts:
        return {}
    counts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return {f"spec_decode/{name}": float(getattr(stats, name)) for name in counts}


def sample_of(completion: Completion, step: int = 0) -> Sample:
    """Return a completion that was sampled after `step` learned steps as a sample for the learner,
    not yet scored."""
    return Sample(
        prompt_index=completion.prompt_id,
        sample_index=completion.sample_index,
        prompt_ids=tuple(completion.prompt_token_ids),
        completion_ids=tuple(completion.token_ids),
        rollout_logprobs=tuple(completion.logprobs),
        completion=completion.text,
        truncated=completion.finish_reason == "length",
        weights_version=completion.weights_version,
        routes=completion.routes,
        rollout_step=step,
        completion_mask=None
        if completion.completion_mask is None
        else tuple(completion.completion_mask),
        episode=completion.episode,
        forks=completion.forks,
    )

"""Where the groups of a step come from: sampled now, or recorded by another run; ahead of the learner; past ones again.

Each source has `next()`, which returns the batch of the next step, and sources wrap one another. What they keep between
steps is in the run's `State`, which a checkpoint holds. Left out: how completions are sampled (`engine/`) and scored
(`scoring.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from isobit.engine.engine import OnGroup, clamped_fraction
from isobit.engine.prompts import Prompt
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion
from isobit.rl import Group, Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.replay import ReplayBuffer
from isobit.training.context import Context
from isobit.training.loop import Rollouts, roll_out
from isobit.training.rollouts.rank_sampling import gather_groups, gather_stats, sample_claimed
from isobit.training.saving.snapshot import State
from isobit.training.scoring import RolloutScoring


class Sampled:
    """Batches of completions of the next prompts, sampled by the weights of now. Groups that one step has left over
    begin the next one's batch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._scoring: RolloutScoring
        self._indices: list[int] = []  # of the groups that this rank sampled last
        self._name, self._calls = context.parts.ranks.fresh_name(), 0

    def next(self) -> StepBatch:
        config, objective, state = self._context.parts.config, self._context.parts.objective, self._context.state
        rounds = objective.max_resamples if objective.dynamic_sampling else 1
        batch = StepBatch(config.prompts_per_step, objective.dynamic_sampling, rounds, objective)
        batch.carry_over(state.pending)
        roll_out(batch, self)
        state.pending = batch.surplus
        return batch

    def sample(self, count: int) -> list[Group]:
        """A group of completions for each of the next `count` prompts that this rank claims; reward functions begin on
        those that are finished while others are still sampled."""
        parts, meter, state = self._context.parts, self._context.meter, self._context.state
        ids = list(range(state.cursor, state.cursor + count))
        examples = [parts.task.train.at(cursor) for cursor in ids]
        self._scoring = parts.scorer.begin(examples, parts.sampling.n)
        self._calls += 1
        with meter.timed("rollout", peak=True), self._context.saver.broken_weights_end_the_run():
            prompts = [example.prompt for example in examples]
            found, stats = parts.ranks.run_on_all(lambda: self._groups(prompts, ids, self._scoring.add))
        stats = gather_stats(parts.ranks, stats)
        meter.count("rollout/preemptions", stats.preemptions)
        meter.count("rollout/prompt_tokens", stats.prompt_tokens)
        meter.count("rollout/cached_tokens", stats.cached_tokens)
        meter.metrics |= clamped_fraction(stats.kv_clamped, stats.kv_written)
        state.cursor += count
        self._indices = sorted(found)
        return [[sample_of(completion, state.step) for completion in found[index]] for index in self._indices]

    def _groups(
        self, prompts: Sequence[Prompt], ids: Sequence[int], add: OnGroup
    ) -> tuple[dict[int, list[Completion]], Stats]:
        """The groups that this rank claims, by index."""
        parts, name = self._context.parts, f"{self._name} {self._calls}"
        return sample_claimed(parts.engine, prompts, parts.sampling, ids, parts.ranks, name, add)

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that the ranks sampled last, with rewards, and where the reward pays for it their distance to the
        reference."""
        parts, meter, ranks = self._context.parts, self._context.meter, self._context.parts.ranks
        with meter.timed("score"):
            rewards = ranks.run_on_all(self._scoring.collect)
        meter.count("time/score_overlapped", self._scoring.overlapped_s)
        rewarded = iter(rewards)
        mine = {
            index: [
                replace(s, reward=r.total, rewards=r.by_function) for s, r in zip(group, islice(rewarded, len(group)))
            ]
            for index, group in zip(self._indices, groups)
        }
        unscored = [f"unscored: {reward.error}" for reward in rewards if reward.error is not None]
        for notes in ranks.all_gather_json([*self._scoring.notes, *unscored]):
            for note in notes:
                self._context.display.note(note)
        scored = gather_groups(ranks, mine)
        samples = [sample for group in scored for sample in group]
        meter.count("rollout/tokens", sum(len(s.completion_ids) for s in samples))
        if not parts.objective.kl_in_reward:
            return scored
        with meter.timed("score"), self._context.saver.broken_weights_end_the_run():
            distances = iter(parts.learner.reference_kl(samples))
        return [[replace(sample, reference_kl=next(distances)) for sample in group] for group in scored]


@dataclass(frozen=True, eq=False)
class Recorded:
    """The batches that another run learned from, in its order."""

    groups: Iterator[list[Group]]

    def next(self) -> StepBatch:
        groups = next(self.groups, [])
        return StepBatch(len(groups), groups=groups, scored=groups, rounds_left=0)


@dataclass(frozen=True, eq=False)
class Ahead:
    """Batches of a source, each sampled `steps` steps before it is learned from.

    At the end of a run too, where nothing will learn from the last ones yet: a run that is extended is then the run
    that was planned longer.
    """

    source: Rollouts
    state: State
    steps: int

    def next(self) -> StepBatch:
        while len(self.state.queue) <= self.steps:
            self.state.queue.append(self.source.next())
        return self.state.queue.pop(0)

    def settle(self) -> None:
        """Nothing is sampled beside the learner."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """Batches of a source, and with each of them past groups to learn from again."""

    source: Rollouts
    state: State
    buffer: ReplayBuffer

    def next(self) -> StepBatch:
        batch = self.source.next()
        batch.replayed = self.buffer.draw(self.state.step)
        return batch


def sample_of(completion: Completion, step: int = 0) -> Sample:
    """A completion that was sampled after `step` learned steps, as the learner takes it; not yet scored."""
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
        completion_mask=None if completion.completion_mask is None else tuple(completion.completion_mask),
    )

"""Rollouts that continue across a weight update: a step ends when enough groups are whole, and what
is unfinished then goes on after the update, under the new weights.

    round       each unfinished completion gets at most `partial.tokens_per_round` tokens more
    step        rounds, over the groups of as many prompts as it waits for and `extra_prompts` more,
                until as many groups are whole
    update      keys and values are of the old weights: the next round computes them again of all
                tokens so far

So each segment of a completion is what its weights draw after everything before it, with the bits
of a prefill and decode steps under them. What is interrupted depends on the tokens alone: it is the
same at any number of ranks, under any scheduling and after a resume, and a run whose budget no
completion reaches is the run without one (tests/training/test_partial.py). Groups are learned from
in the order in which their prompts were taken, as far as they are whole. With rollouts ahead of the
learner a batch waits whole, and what is unfinished goes on in the next batch that is sampled. Left
out: what is too old to learn from (`rl/algorithm/partial.py`), environments, and fleets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from isobit.data.dataset import Example
from isobit.distributed import Ranks
from isobit.engine.engine import Engine
from isobit.engine.episodes import Episodes
from isobit.engine.sequences import Stats, clamped_fraction, summed
from isobit.engine.types import Completion, Request, Sampling
from isobit.rl import Group, Sample
from isobit.rl.algorithm.partial import PartialSettings, learnable, unfinished
from isobit.rl.algorithm.samples import Segment
from isobit.training.loop import Rollout, Rollouts, Sampled
from isobit.training.rollouts.rank_sampling import ClaimedGroups, gather_groups, gather_stats
from isobit.training.rollouts.sources import LiveRollouts, drafted, sample_of
from isobit.training.saving.snapshot import State
from isobit.training.scoring import RolloutScoring


class PartialGroups(ClaimedGroups):
    """A `sources.Sampler` of one round: groups, whole or not, of new prompts and prompts with a
    `begun` group, by the prompt's index in the data."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        ranks: Ranks,
        settings: PartialSettings,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        most, budget = sampling.max_new_tokens, settings.tokens_per_round
        first = replace(sampling, max_new_tokens=min(budget, most))
        super().__init__(engine, first, ranks, between)
        self.settings, self.max_new_tokens = settings, most
        self.begun: Mapping[int, Group] = {}

    def whole(self, group: Group) -> bool:
        """Return whether each completion of a group has ended, or reached its length limit."""
        return bool(group) and not any(unfinished(sample, self.max_new_tokens) for sample in group)

    def _ask(
        self, episodes: Episodes, example: Example, prompt_id: int
    ) -> tuple[Sequence[Request], Sequence[Completion]]:
        if prompt_id not in self.begun:
            return super()._ask(episodes, example, prompt_id)
        requests, known = list[Request](), list[Completion]()
        for sample in self.begun[prompt_id]:
            completion = completion_of(sample)
            if unfinished(sample, self.max_new_tokens):
                left = self.max_new_tokens - len(sample.completion_ids)
                budget = min(self.settings.tokens_per_round, left)
                more = replace(self._sampling, max_new_tokens=budget)
                requests.append(self._engine.resume(completion, more))
            else:
                known.append(completion)
        return requests, known


class PartialRollouts(LiveRollouts):
    """`LiveRollouts` whose completions may go on in a later step. What is unfinished is in the
    run's state."""

    _sampler: PartialGroups

    def next(self) -> Rollout:
        settings, state = self._sampler.settings, self._state
        state.pending = [
            learnable(group, state.step, settings.max_staleness) for group in state.pending
        ]
        rollout, most = super().next(), self._sampler.max_new_tokens
        open_ = [unfinished(sample, most) for group in state.unfinished for sample in group]
        return replace(
            rollout, metrics={**rollout.metrics, "partial/unfinished": float(sum(open_))}
        )

    def sample(self, count: int) -> Sampled:
        """Sample until at least `count` groups are whole; return these in the order of their
        prompts. The other groups stay in the state."""
        state, sampler, took = self._state, self._sampler, dict[str, float]()
        extra = sampler.settings.extra(self._prompts_per_step)
        new = max(0, count + extra - len(state.unfinished))
        taken, next_cursor = self._curriculum.take(state.cursor, new)
        groups: list[Group] = [*state.unfinished, *([] for _ in taken)]
        ids = [*(group[0].prompt_index for group in state.unfinished), *taken]
        examples = [self._train.at(cursor) for cursor in ids]
        progress = state.progress(self._steps, len(self._train))
        scoring = self._scorer.begin(examples, sampler.n, progress)
        tokens_at_start = _tokens(groups)
        mine, stats, rounds = dict[int, Group](), Stats(), 0
        with (
            self._meter.timed(took, "rollout", peak=True),
            self._saver.broken_weights_end_the_run(),
        ):
            while sum(map(sampler.whole, groups)) < count:
                completed, did = self._round(groups, ids, examples, scoring)
                mine, stats, rounds = {**mine, **completed}, summed(stats, did), rounds + 1
        took |= _counted(stats) | clamped_fraction(stats.kv_clamped, stats.kv_written)
        took |= {
            "partial/rounds": float(rounds),
            "rollout/tokens": _tokens(groups) - tokens_at_start,
        }
        if self._curriculum.chooses:
            took["prompts/skipped"] = float(next_cursor - state.cursor - new)
        state.cursor = next_cursor
        state.unfinished = [group for group in groups if not sampler.whole(group)]
        oldest = sampler.settings.max_staleness
        learned = {i: learnable(group, state.step, oldest) for i, group in sorted(mine.items())}
        return Sampled(learned, scoring, took)

    def _round(
        self,
        groups: list[Group],
        ids: Sequence[int],
        examples: Sequence[Example],
        scoring: RolloutScoring,
    ) -> tuple[dict[int, Group], Stats]:
        """Let each group that is not whole go on, in place, on whichever rank claims it. Return the
        groups that became whole on this rank, by index, and the statistics of all engines."""
        sampler, ranks, step = self._sampler, self._ranks, self._state.step
        open_ = [index for index, group in enumerate(groups) if not sampler.whole(group)]
        sampler.begun = {ids[index]: groups[index] for index in open_ if groups[index]}
        grown: dict[int, Group] = {}

        def on_group(number: int, completions: list[Completion]) -> None:
            index = open_[number]
            grown[index] = _grown(groups[index], completions, step)
            if sampler.whole(grown[index]):
                scoring.add(index, completions)

        arguments = [examples[index] for index in open_], [ids[index] for index in open_]
        _, stats = ranks.run_on_all(lambda: sampler(*arguments, on_group))
        for index, group in zip(open_, gather_groups(ranks, grown), strict=True):
            groups[index] = group
        whole = {index: group for index, group in grown.items() if sampler.whole(group)}
        return whole, gather_stats(ranks, stats)


@dataclass(frozen=True, eq=False)
class AgedRollouts:
    """The batches that a source has kept for some steps, as the present step learns from them:
    tokens that have become too old meanwhile are context only."""

    source: Rollouts
    state: State
    max_staleness: int

    def next(self) -> Rollout:
        rollout, step = self.source.next(), self.state.step
        groups = [learnable(group, step, self.max_staleness) for group in rollout.batch.groups]
        return replace(rollout, batch=replace(rollout.batch, groups=groups))


def _counted(stats: Stats) -> dict[str, float]:
    """Return the metrics of engines over a step. The cached tokens depend on which rank goes on
    with which group."""
    return drafted(stats) | {
        "rollout/prompt_tokens": stats.prompt_tokens,
        "partial/cached_tokens": stats.cached_tokens,
        "partial/preemptions": stats.preemptions,
    }


def _grown(group: Group, completions: Sequence[Completion], step: int) -> Group:
    """Return a group with the completions of a round in step `step` added to it."""
    known = {sample.sample_index: sample for sample in group}
    return [
        _longer(known.get(completion.sample_index), completion, step) for completion in completions
    ]


def _longer(earlier: Sample | None, completion: Completion, step: int) -> Sample:
    sample = sample_of(completion, step)
    if earlier is None:
        return sample
    if len(earlier.completion_ids) == len(sample.completion_ids):  # it had ended
        return earlier
    *older, last = earlier.drawn
    version, stop = completion.weights_version, len(completion.token_ids)
    if last.weights_version == version:
        drawn = [*older, last._replace(stop=stop)]
    else:
        drawn = [*older, last, Segment(last.stop, stop, version, step)]
    return replace(sample, segments=tuple(drawn) if len(drawn) > 1 else ())


def completion_of(sample: Sample) -> Completion:
    """Return a sample of one turn as the completion that its engine had."""
    return Completion(
        prompt_id=sample.prompt_index,
        sample_index=sample.sample_index,
        prompt_token_ids=list(sample.prompt_ids),
        token_ids=list(sample.completion_ids),
        text=sample.completion,
        logprobs=list(sample.rollout_logprobs),
        finish_reason="length" if sample.truncated else "stop",
        weights_version=sample.weights_version,
        routes=sample.routes,
    )


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(sample.completion_ids) for group in groups for sample in group)

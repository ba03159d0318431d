"""What a run that samples, or learns from the rollouts of another run, is put together from, and
where its groups come from. Left out: how this is opened (`assembly.py`)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import torch

from isobit.config import Config, load_run_config
from isobit.data.dataset import Dataset
from isobit.distributed import ALONE
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine
from isobit.engine.fleet.fleet import Fleet
from isobit.engine.types import Sampling
from isobit.evaluation.periodic import PeriodicEvaluation
from isobit.model import Model
from isobit.rl import Group
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.tasks.builtin import Task
from isobit.training.context import RunContext
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.measuring.agreement import failure
from isobit.training.measuring.meter import Meter
from isobit.training.objects import Objects, OnStep
from isobit.training.parts.cautions import cautions
from isobit.training.parts.divided import held_by
from isobit.training.parts.model import model_warning
from isobit.training.recording.rollouts import LearnedRollouts
from isobit.training.recording.rows import CompletionRows, recorded_groups
from isobit.training.rollouts.asynchronous import AsyncRollouts, FleetGroups
from isobit.training.rollouts.lengths import endings
from isobit.training.rollouts.partial import AgedRollouts, PartialGroups, PartialRollouts
from isobit.training.rollouts.processes import Processes
from isobit.training.rollouts.rank_sampling import ClaimedGroups
from isobit.training.rollouts.serving import ServedRollouts, Serving
from isobit.training.rollouts.sources import (
    Judged,
    LiveRollouts,
    PrefetchedRollouts,
    RecordedRollouts,
    ReplayedRollouts,
    Sampler,
)
from isobit.training.rollouts.teaching import Teaching
from isobit.training.run import Source
from isobit.training.running.resolved import Resolved
from isobit.training.sampled_ahead import SampledAhead
from isobit.training.saving.checkpoint import Trained
from isobit.training.scoring import RewardScorer


@dataclass(frozen=True, eq=False)
class SampledParts:
    """The parts of a run that samples. `engine` rolls out, or the engines of a `fleet` instead;
    that of `held_out` answers its prompts, and that of `serving` requests of clients. These share
    the weights. `processes`: of the user's code; `dialogue`: with environments, where there are
    some; `teaching`: what a teacher reads, where it is shown more than the policy. `recorded`: the
    run whose rollouts are learned from, if none are sampled; `unlike`: what makes the bits other
    than those of that run. `objects`: what was given in Python."""

    config: Config
    resolved: Resolved
    trained: Trained
    task: Task
    held_out: PeriodicEvaluation | None
    processes: Processes
    scorer: RewardScorer
    engine: Engine
    sampling: Sampling
    unlike: tuple[str, ...]
    dialogue: Dialogue | None
    teaching: Teaching | None
    recorded: Path | None
    objects: Objects
    fleet: Fleet | None = None
    serving: Serving | None = None

    kind, result = "", None

    @property
    def train(self) -> Dataset:
        return self.task.train

    @property
    def model(self) -> Model:
        return self.trained.model

    @property
    def optimizer(self) -> ShardedOptimizer:
        return self.trained.optimizer

    @property
    def learner(self) -> Learner:
        return self.trained.learner

    @property
    def reference(self) -> Model | None:
        return self.learner.reference

    @property
    def engines(self) -> list[Engine]:
        """The engines of the rollout, of held-out prompts and of others' requests, in this
        process."""
        held_out = [] if self.held_out is None else [self.held_out.engine]
        return [self.engine, *held_out, *([] if self.serving is None else [self.serving.engine])]

    @property
    def callbacks(self) -> Sequence[OnStep]:
        return self.objects.callbacks

    @property
    def best_by(self) -> str | None:
        """The metric of the best model, if it is kept."""
        evaluation = self.config.evaluation
        return evaluation.best_by if evaluation.every and evaluation.keep_best else None

    def resolved_values(self) -> dict[str, Any]:
        """Return the values that the config leaves open, as `resolved.json` has them."""
        return self.resolved.plain()

    def memory_metrics(self) -> dict[str, float]:
        """Return the memory allocated for keys and values, and for weights, in MiB."""
        cached = sum(engine.kv_bytes for engine in self.engines)
        reference = None if self.config.shares_reference else self.reference
        metrics = {"memory/kv_cache_mib": cached / 2**20, **self.trained.memory_metrics(reference)}
        if self.scorer.models:
            judging = sum(weighted.model.nbytes() for weighted in self.scorer.models)
            metrics["memory/reward_models_mib"] = judging / 2**20
        return metrics

    def notes(self) -> Iterator[str]:
        """Yield the lines of the server, and a line on the kernels, the consistency and the
        correction."""
        yield from () if self.serving is None else self.serving.lines
        computes, rule = self.model.ops.why, self.trained.objective.rule
        line = f"{computes}; consistency: {self.config.consistency}; correction: {rule}"
        yield line + held_by(self.model)

    def warnings(self) -> Iterable[str | None]:
        """Yield warnings of what the config probably does not mean."""
        if self.unlike:
            others = ", ".join(self.unlike)
            yield f"tokens may differ from those of {self.recorded}: it had another {others}"
        yield from endings(self.model, self.config.sampling)
        yield model_warning(self.config, self.model)
        yield from cautions(self.config, self.task, self.model)

    def close(self) -> None:
        """End the processes of the user's code, the fleet and the server. May be called again."""
        for resource in (self.processes, self.fleet, self.serving):
            if resource is not None:
                resource.close()

    def learned(self, context: RunContext) -> LearnedRollouts:
        """Return what a step records of its rollouts."""
        kind, tokenizer = self.config.run.completions, self.model.tokenizer
        rows = CompletionRows(kind, tokenizer, self.train)
        return LearnedRollouts(rows, context.state, self.trained.replay)

    def source(self, context: RunContext) -> Source:
        """Return the source of batches: the recorded groups of another run, the engine of this
        process, or a fleet of other processes; and how the run learns from them."""
        config, state, trained = self.config, context.state, self.trained
        self.processes.print_to(context.run.directory)
        batches = self._batches(context)
        rollouts: Rollouts = ReplayedRollouts(batches, state, trained.replay)
        samples = self.recorded is None
        if samples and config.rollouts_ahead and config.partial.used:
            rollouts = AgedRollouts(rollouts, state, config.partial.max_staleness)
        if self.serving is not None:
            rollouts = ServedRollouts(rollouts, self.serving, state)
        early = SampledAhead(
            context,
            share=config.mismatch.share_ahead,
            seed=config.seed,
            ahead=config.rollouts_ahead if samples else 0,
            partial=config.partial.used and samples,
            late=isinstance(batches, AsyncRollouts),
            keeps_weights=config.keeps_weights,
        )
        learning = Learning(
            context,
            early,
            quantization_every=config.run.quantization_every,
            engines=self.engines,
            measures=self.objects.measures if self.trained.ranks.first else (),
            sleep=config.engine.sleep,
            settle=batches.settle,
            failure_of=partial(failure, self.learner, context.run.directory, not samples),
        )
        beside = batches if isinstance(batches, AsyncRollouts) else None
        held: tuple[AbstractContextManager[Any] | None, ...]
        held = self.processes, self.serving, beside
        return Source(rollouts, learning, [resource for resource in held if resource is not None])

    def _batches(self, context: RunContext) -> PrefetchedRollouts | AsyncRollouts:
        state, config = context.state, self.config
        if self.recorded is not None:
            groups = recorded_groups(self.recorded, load_run_config(self.recorded))
            return PrefetchedRollouts(RecordedRollouts(islice(groups, state.step, None)), state, 0)
        if config.fleet.engines:
            return self._beside(context)
        between = (lambda: None) if self.serving is None else self.serving.between
        engine = self.engine, self.sampling, self.trained.ranks
        if config.partial.used:
            source = self._live(context, PartialGroups(*engine, config.partial, between))
        else:
            source = self._live(context, ClaimedGroups(*engine, between, self.dialogue))
        return PrefetchedRollouts(source, state, config.rollouts_ahead)

    def _beside(self, context: RunContext) -> AsyncRollouts:
        """Return the source that the fleet samples while the learner works."""
        self.engine.sleep()  # the evaluation has a separate engine
        objective, reference = self.trained.objective, self.config.reference
        learned, source = Event(), None
        if self.fleet is not None:
            # what this process computes of rewards waits for the learner
            waits = self.scorer.models or objective.kl_in_reward
            alone = replace(
                context, ranks=ALONE, meter=Meter(lambda phase: None, torch.device("cpu"))
            )
            warn = context.display.warn
            sampler = FleetGroups(self.fleet, self.sampling, warn, self.dialogue)
            source = self._live(alone, sampler, learned if waits else None)
        # several updates of a batch change the policy, and a reference may move after them
        moves = reference.weights == "policy" or reference.follows
        needs_weights = objective.kl_in_reward and (objective.recompute_old or moves)
        return AsyncRollouts(self.config, context, self.fleet, source, learned, needs_weights)

    def _live(
        self, context: RunContext, sampler: Sampler, learned: Event | None = None
    ) -> LiveRollouts:
        """Return a source of groups that `sampler` samples; they are scored once `learned` is set,
        if it is given."""
        kind = PartialRollouts if isinstance(sampler, PartialGroups) else LiveRollouts
        return kind(
            self.config,
            context,
            sampler,
            self.scorer,
            self._reference_kl if self.trained.objective.kl_in_reward else None,
            (lambda: None) if learned is None else learned.wait,
            None if self.serving is None else self.serving.meanwhile,
        )

    def _reference_kl(self, groups: Sequence[Group]) -> Sequence[Judged]:
        samples = [sample for group in groups for sample in group]
        prompts = None if self.teaching is None else self.teaching.prompts(groups)
        distances = self.learner.reference_kl(samples, prompts)
        read_again = prompts is not None and self.trained.objective.loss == "divergence"
        return [*zip(distances, prompts if read_again and prompts else [None] * len(distances))]

"""A run that samples: where its groups come from, and how it learns from them. Left out: how it is
opened (`opening.py`), and the parts of every run (`running/open_run.py`)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Event
from typing import Any

import torch

from isobit.distributed import ALONE, Ranks
from isobit.rl import Group
from isobit.run.directory import RunDirectory
from isobit.training.adapting import model_warning
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.measuring.agreement import failure
from isobit.training.measuring.meter import Meter
from isobit.training.objects import NO_OBJECTS, Measure, Objects
from isobit.training.parts import Parts
from isobit.training.recording.rollouts import LearnedRollouts
from isobit.training.recording.rows import CompletionRows
from isobit.training.rollouts.asynchronous import AsyncRollouts, FleetGroups
from isobit.training.rollouts.lengths import endings
from isobit.training.rollouts.partial import AgedRollouts, PartialGroups, PartialRollouts
from isobit.training.rollouts.rank_sampling import ClaimedGroups
from isobit.training.rollouts.serving import ServedRollouts
from isobit.training.rollouts.sources import (
    Judged,
    LiveRollouts,
    PrefetchedRollouts,
    RecordedRollouts,
    ReplayedRollouts,
    Sampler,
)
from isobit.training.running.open_run import OpenRun
from isobit.training.sampled_ahead import SampledAhead
from isobit.training.saving.snapshot import State
from isobit.training.session.cautions import cautions


class Session(OpenRun):
    """An open run that samples; with `recorded` groups it learns from these and samples none.
    `objects`: the callbacks and measures given in Python. `saved_step`: the step of the checkpoint
    that it goes on from."""

    def __init__(
        self,
        parts: Parts,
        run: RunDirectory,
        state: State,
        *,
        quiet: bool,
        recorded: Iterator[list[Group]] | None = None,
        objects: Objects = NO_OBJECTS,
        saved_step: int | None = None,
    ) -> None:
        self.config, self.parts = parts.config, parts
        rows = CompletionRows(self.config.run.completions, parts.model.tokenizer, parts.train)
        evaluation, replay = self.config.evaluation, parts.trained.replay
        super().__init__(
            parts,
            run,
            state,
            LearnedRollouts(rows, state, replay),
            quiet=quiet,
            saved_step=saved_step,
            callbacks=objects.callbacks,
            best_by=evaluation.best_by if evaluation.every and evaluation.keep_best else None,
        )
        self._on_fleet = bool(self.config.fleet.engines) and recorded is None
        ahead = 0 if recorded is not None else self.config.rollouts_ahead
        batches = self._batches(recorded, ahead)
        self._beside = batches if isinstance(batches, AsyncRollouts) else None
        self.rollouts: Rollouts = ReplayedRollouts(batches, state, replay)
        if ahead and self.config.partial.used:
            oldest = self.config.partial.max_staleness
            self.rollouts = AgedRollouts(self.rollouts, state, oldest)
        if parts.serving is not None:
            self.rollouts = ServedRollouts(self.rollouts, parts.serving, state)
        measures = objects.measures if self.ranks.first else ()
        self.learning = self._learning(batches, ahead, measures, recorded is not None)

    def _batches(
        self, recorded: Iterator[list[Group]] | None, ahead: int
    ) -> PrefetchedRollouts | AsyncRollouts:
        """Return the source of batches: the recorded groups of another run, the engine of this
        process, or a fleet of other processes."""
        parts, state = self.parts, self.state
        if recorded is not None:
            return PrefetchedRollouts(RecordedRollouts(recorded), state, ahead)
        if not self._on_fleet:
            source = self._live(self._sampler(), self.ranks, self._meter)
            return PrefetchedRollouts(source, state, ahead)
        learned, beside = Event(), None
        if parts.fleet is not None:
            computes = (
                parts.scorer.models or self.objective.kl_in_reward
            )  # which waits for the learner
            beside = self._live(
                FleetGroups(parts.fleet, parts.sampling, self.display.warn, parts.dialogue),
                ALONE,
                Meter(lambda phase: None, torch.device("cpu")),
                learned if computes else None,
            )
        return AsyncRollouts(
            parts.fleet,
            beside,
            learned,
            state,
            self.ranks,
            self._meter,
            self.saver,
            steps=ahead,
            prompts_per_step=self.config.prompts_per_step,
            # several updates of a batch change the policy, and a reference may move after them
            needs_weights=self.objective.kl_in_reward
            and (
                self.objective.recompute_old
                or self.config.reference.weights == "policy"
                or self.config.reference.follows
            ),
        )

    def _sampler(self) -> ClaimedGroups:
        """Return the sampler of this process: of whole groups, or of groups that may go on after an
        update."""
        parts, settings = self.parts, self.config.partial
        between = (lambda: None) if parts.serving is None else parts.serving.between
        asked = parts.engine, parts.sampling, self.ranks
        if settings.used:
            return PartialGroups(*asked, settings, between)
        return ClaimedGroups(*asked, between, parts.dialogue)

    def _live(
        self, sampler: Sampler, ranks: Ranks, meter: Meter, learned: Event | None = None
    ) -> LiveRollouts:
        """Return a source of groups that `sampler` samples; they are scored once `learned` is set,
        if it is given."""
        parts = self.parts
        kind = PartialRollouts if isinstance(sampler, PartialGroups) else LiveRollouts
        return kind(
            parts.task.train,
            sampler,
            parts.scorer,
            self.objective,
            self.state,
            ranks,
            meter,
            self.saver,
            self.display.warn,
            prompts_per_step=self.config.prompts_per_step,
            steps=self.config.steps,
            curriculum=self.config.curriculum,
            reference_kl=self._reference_kl if self.objective.kl_in_reward else None,
            before_scoring=(lambda: None) if learned is None else learned.wait,
            meanwhile=None if parts.serving is None else parts.serving.meanwhile,
            variables=self.config.environment.variables,
        )

    def _reference_kl(self, groups: Sequence[Group]) -> Sequence[Judged]:
        teaching, samples = self.parts.teaching, [s for group in groups for s in group]
        prompts = None if teaching is None else teaching.prompts(groups)
        found = self.parts.learner.reference_kl(samples, prompts)
        read_again = prompts is not None and self.objective.loss == "divergence"
        return [*zip(found, prompts if read_again and prompts else [None] * len(found))]

    def _learning(
        self,
        batches: PrefetchedRollouts | AsyncRollouts,
        ahead: int,
        measures: Sequence[Measure],
        recorded: bool,
    ) -> Learning:
        state, meter, saver = self.state, self._meter, self.saver
        learner, config = self.parts.learner, self.config
        early = SampledAhead(
            learner,
            state,
            meter,
            saver,
            share=config.mismatch.share_ahead,
            seed=config.seed,
            ahead=ahead,
            partial=config.partial.used and not recorded,
            late=self._on_fleet,
            keeps_weights=config.keeps_weights,
        )
        return Learning(
            self.trained,
            early,
            state,
            meter,
            saver,
            self.display.warn,
            quantization_every=config.run.quantization_every,
            engines=self.parts.engines,
            measures=measures,
            sleep=config.engine.sleep,
            settle=batches.settle,
            failure_of=partial(failure, learner, self.run.directory, recorded),
        )

    def resources(self) -> Sequence[AbstractContextManager[Any]]:
        """Return the worker processes, the server, and the source that samples while the learner
        works; without those that the run does not have."""
        beside = (self.parts.processes, self.parts.serving, self._beside)
        return [each for each in beside if each is not None]

    def told(self) -> Iterable[str]:
        """Yield the lines of the server, and a line on the kernels, the consistency and the
        correction."""
        yield from () if self.parts.serving is None else self.parts.serving.lines
        computes, rule = self.model.ops.why, self.objective.rule
        yield f"{computes}; consistency: {self.config.consistency}; correction: {rule}"

    def warned(self) -> Iterable[str | None]:
        """Yield warnings of what the config probably does not mean."""
        yield from endings(self.model, self.config.sampling)
        yield model_warning(self.config, self.model)
        yield from cautions(self.config, self.parts.task, self.model)

    def _begin(self) -> None:
        self.parts.processes.print_to(self.run.directory)
        if self._beside is not None:
            self.parts.engine.sleep()  # the evaluation has a separate engine
        super()._begin()

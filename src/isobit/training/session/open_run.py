"""An open run: what the loop of `loop.py` works with, put together, and what is due before its
first step and after its last. Left out: how it is opened (`opening.py`)."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import Any

import torch

from isobit.distributed import ALONE, Ranks
from isobit.evaluation.best import Best
from isobit.monitor.report import write_report
from isobit.monitor.screen import Display
from isobit.monitor.trackers.process import Trackers
from isobit.options.declare import plain
from isobit.rl import Group
from isobit.run import directory as runs
from isobit.run.directory import Interruption, RunDirectory
from isobit.run.heartbeat import Heartbeat, log_path
from isobit.training.adapting import rank_warning
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.measuring.agreement import failure
from isobit.training.measuring.meter import Meter
from isobit.training.objects import NO_OBJECTS, Objects
from isobit.training.parts import Parts
from isobit.training.policy import Policy
from isobit.training.recording.evaluating import Evaluating, evaluated_only_as_the_last
from isobit.training.recording.recorder import Recorder
from isobit.training.recording.rows import CompletionRows
from isobit.training.resolved import keep
from isobit.training.rollouts.asynchronous import AsyncRollouts, FleetGroups
from isobit.training.rollouts.lengths import endless
from isobit.training.rollouts.rank_sampling import ClaimedGroups
from isobit.training.rollouts.serving import ServedRollouts
from isobit.training.rollouts.sources import (
    LiveRollouts,
    PrefetchedRollouts,
    RecordedRollouts,
    ReplayedRollouts,
    Sampler,
)
from isobit.training.sampled_ahead import SampledAhead
from isobit.training.saving.saver import Saver
from isobit.training.saving.snapshot import State
from isobit.training.session.cautions import cautions
from isobit.training.session.machine import machine_facts


class Session:
    """Use as a context manager. Its `policy`, `rollouts`, `learning` and `recorder` are the verbs
    of the loop. With `recorded` groups it samples none. `saved_step`: of the checkpoint that it
    goes on from."""

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
        self.config, self.parts, self.run, self.state = parts.config, parts, run, state
        self.model, self.objective = parts.model, parts.resolved.objective
        self.ranks = parts.ranks
        facts = machine_facts(self.model, self.objective)
        self._changed = self.ranks.run_on_all(lambda: run.record_machine(facts))
        self.ranks.run_on_all(lambda: keep(parts.resolved, run))
        self.interruption = Interruption()
        quiet = quiet or not self.ranks.first
        details = f"{self.model.precision.name}, {self.config.consistency}"
        self.display = Display(self.config.steps, quiet, state.step, run.directory.name, details)
        self.trackers = Trackers(
            plain(self.config.tracking) | ({} if self.ranks.first else {"trackers": ()}),
            plain(self.config),
            run.directory,
            exit_code=lambda: self.interruption.exit_code,
            say=self.display.note,
        )
        self._heartbeat = Heartbeat(
            run.directory, self.ranks.rank, self.ranks.size, lambda: state.step
        )
        self.ranks.print_to(log_path(run.directory, self.ranks.rank))
        self._meter = Meter(self._phase, self.model.ops.device)
        evaluation, keep_last = self.config.evaluation, self.config.run.keep_last
        best_by = evaluation.best_by if evaluation.every and evaluation.keep_best else None
        self.best = Best(run.directory, best_by, parts.trained.save_model, self.ranks)
        self.saver = Saver(parts.trained, run, state, self.best, self._meter, keep_last, saved_step)
        self._on_fleet = bool(self.config.fleet.engines) and recorded is None
        ahead = 0 if recorded is not None else self.config.rollouts_ahead
        batches = self._batches(recorded, ahead)
        self._beside = batches if isinstance(batches, AsyncRollouts) else None
        self.policy = Policy(
            self.model, parts.calibrator, parts.task.train, state, self._meter, self.saver
        )
        self.rollouts: Rollouts = ReplayedRollouts(batches, state, parts.trained.replay)
        if parts.serving is not None:
            self.rollouts = ServedRollouts(self.rollouts, parts.serving, state)
        self.learning = self._learning(batches, ahead, objects, recorded is not None)
        self.recorder = self._recorder(objects)
        self._stack = ExitStack()

    def _batches(
        self, recorded: Iterator[list[Group]] | None, ahead: int
    ) -> PrefetchedRollouts | AsyncRollouts:
        """Where groups come from: another run, this process, or a fleet beside it."""
        parts, state = self.parts, self.state
        if recorded is not None:
            return PrefetchedRollouts(RecordedRollouts(recorded), state, ahead)
        if not self._on_fleet:
            between = (lambda: None) if parts.serving is None else parts.serving.between
            sampler = ClaimedGroups(
                parts.engine, parts.sampling, self.ranks, between, parts.dialogue
            )
            return PrefetchedRollouts(self._live(sampler, self.ranks, self._meter), state, ahead)
        learned, source = Event(), None
        if parts.fleet is not None:
            computes = (
                parts.scorer.models or self.objective.kl_in_reward
            )  # which waits for the learner
            source = self._live(
                FleetGroups(parts.fleet, parts.sampling, self.display.note, parts.dialogue),
                ALONE,
                Meter(lambda phase: None, torch.device("cpu")),
                learned if computes else None,
            )
        return AsyncRollouts(
            parts.fleet,
            source,
            learned,
            state,
            self.ranks,
            self._meter,
            self.saver,
            steps=ahead,
            prompts_per_step=self.config.prompts_per_step,
            # several updates of a batch change the policy
            needs_weights=self.objective.kl_in_reward and self.objective.recompute_old,
        )

    def _live(
        self, sampler: Sampler, ranks: Ranks, meter: Meter, learned: Event | None = None
    ) -> LiveRollouts:
        """Groups that are sampled; scored once `learned` is set, if one is given."""
        parts = self.parts
        return LiveRollouts(
            parts.task.train,
            sampler,
            parts.scorer,
            self.objective,
            self.state,
            ranks,
            meter,
            self.saver,
            self.display.note,
            prompts_per_step=self.config.prompts_per_step,
            steps=self.config.steps,
            reference_kl=parts.learner.reference_kl if self.objective.kl_in_reward else None,
            before_scoring=(lambda: None) if learned is None else learned.wait,
            meanwhile=None if parts.serving is None else parts.serving.meanwhile,
        )

    def _learning(
        self,
        batches: PrefetchedRollouts | AsyncRollouts,
        ahead: int,
        objects: Objects,
        recorded: bool,
    ) -> Learning:
        parts, state, meter, saver = self.parts, self.state, self._meter, self.saver
        learner, config = parts.learner, self.config
        early = SampledAhead(
            learner,
            state,
            meter,
            saver,
            share=config.mismatch.share_ahead,
            seed=config.seed,
            ahead=ahead,
            late=self._on_fleet,
            keeps_weights=config.keeps_weights,
        )
        return Learning(
            learner,
            parts.calibrator,
            parts.engines,
            early,
            state,
            meter,
            saver,
            objects.measures if self.ranks.first else (),
            quantization_every=config.run.quantization_every,
            sleep=config.engine.sleep,
            settle=batches.settle,
            failure_of=partial(failure, learner, self.run.directory, recorded),
            note=self.display.note,
        )

    def _recorder(self, objects: Objects) -> Recorder:
        parts, state, saver, note = self.parts, self.state, self.saver, self.display.note
        train = parts.task.train
        evaluating = Evaluating(
            parts.held_out,
            self.policy,
            parts.learner,
            state,
            self._meter,
            saver,
            self.best,
            note,
            every=self.config.evaluation.every,
            steps=self.config.steps,
            prompts=len(train),
        )
        return Recorder(
            self.config,
            self.run,
            state,
            parts.trained,
            saver,
            CompletionRows(self.config.run.completions, self.model.tokenizer, train),
            evaluating,
            parts.memory_metrics,
            self.display,
            self.trackers,
            objects.callbacks if self.ranks.first else (),
        )

    def __enter__(self) -> "Session":
        with ExitStack() as stack:
            for resource_ in (
                self.run,
                self.parts.processes,
                self.interruption,
                self.display,
                self.trackers,
            ):
                stack.enter_context(resource_)
            if self.parts.serving is not None:
                stack.enter_context(self.parts.serving)
            if self._beside is not None:
                stack.enter_context(self._beside)
                self.parts.engine.sleep()  # evaluation has an engine of its own
            self._begin()
            self._stack = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Say what computes, know what was done before, and record what is due before the first
        step."""
        self.parts.processes.print_to(self.run.directory)
        for line in () if self.parts.serving is None else self.parts.serving.lines:
            self.display.note(line)
        computes, rule = self.model.ops.why, self.objective.rule
        self.display.note(f"{computes}; consistency: {self.config.consistency}; correction: {rule}")
        told = endless(self.model, self.config.sampling), rank_warning(self.config, self.model)
        for warning in (*self._changed, *told, *cautions(self.config, self.parts.task, self.model)):
            if warning is not None:
                self.display.note(warning)
        if self.config.run.check_memory:
            self.parts.trained.keep_checksums()
        if self.ranks.first:
            for row in runs.read_jsonl(
                self.run.directory / runs.METRICS
            ):  # of a resumed run: what it had done
                self.display.history.add(row)
        if self.saver.saved_step is None:
            self.recorder.certify(None, {})
            self.display.history.add(self.recorder.evaluate_and_write())
            self.saver.save()
        elif self.state.unrecorded is not None:
            measured = {
                **self.state.unrecorded,
                **self.parts.memory_metrics(),
            }  # which no checkpoint holds
            self.display.history.add(self.recorder.finish_step(measured))
            if not evaluated_only_as_the_last(self.config, self.state.step):
                self.saver.save()
        self.saver.keep()

    def __exit__(self, *raised: Any) -> None:
        try:
            self.saver.after(raised[1])
        finally:
            self._stack.__exit__(*raised)

    def _phase(self, name: str) -> None:
        self.ranks.meet(name)
        self._heartbeat.beat(name)
        self.display.phase(name)

    @property
    def unfinished(self) -> bool:
        signals = [
            found
            for found in self.ranks.all_gather_json(self.interruption.signal)
            if found is not None
        ]
        if signals:  # of one rank, it ends all
            self.interruption.signal = signals[0]
        return self.state.step < self.config.steps and not signals

    def finish(self) -> None:
        """Save what is not saved, write the report, and say how to go on."""
        if self.saver.saved_step != self.state.step:
            self.saver.save()
        if self.config.run.report and self.ranks.first:
            path = write_report([self.run.directory], self.run.directory / runs.REPORT)
            self.display.note(f"report: {path}")
        if (verdict := self.display.history.no_progress.verdict) is not None:
            self.display.note(verdict)
        if (line := self.best.line(self.state.step)) is not None:
            self.display.note(line)
        self.display.note(f"certificate of step {self.state.step}: {self.state.head}")
        if self.interruption.signal is not None:
            again = f"isobit train --resume {self.run.directory}"
            self.display.note(f"stopped after step {self.state.step}; go on with: {again}")

"""An open run: what the loop of `loop.py` works with, put together, and what is due before its first step and after its
last. Left out: how it is opened (`opening.py`)."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

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
from isobit.training.context import Context
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.measuring.meter import Meter
from isobit.training.objects import NO_OBJECTS, Objects
from isobit.training.parts import Parts
from isobit.training.policy import Policy
from isobit.training.recording.recorder import Recorder, evaluated_only_as_the_last
from isobit.training.rollouts.asynchronous import Beside
from isobit.training.rollouts.lengths import endless
from isobit.training.rollouts.sources import Ahead, Recorded, Replayed, Sampled
from isobit.training.sampled_ahead import SampledAhead
from isobit.training.saving.saver import Saver
from isobit.training.saving.snapshot import State
from isobit.training.session.cautions import cautions


class Session:
    """Use as a context manager. Its `policy`, `rollouts`, `learning` and `recorder` are the verbs of the loop."""

    def __init__(
        self,
        parts: Parts,
        run: RunDirectory,
        state: State,
        *,
        quiet: bool,
        recorded: Iterator[list[Group]] | None = None,
        objects: Objects = NO_OBJECTS,
    ) -> None:
        self.config, self.parts, self.run, self.state = parts.config, parts, run, state
        self.model, self.objective = parts.model, parts.objective
        self.ranks = parts.ranks
        self._changed = self.ranks.run_on_all(lambda: run.record_machine(parts.machine()))
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
        self._heartbeat = Heartbeat(run.directory, self.ranks.rank, self.ranks.size, lambda: state.step)
        self.ranks.print_to(log_path(run.directory, self.ranks.rank))
        meter = Meter(self._phase, self.model.ops.device)
        evaluation = self.config.evaluation
        best_by = evaluation.best_by if evaluation.every and evaluation.keep_best else None
        self.best = Best(run.directory, best_by, parts.save_model, parts.ranks)
        self.saver = Saver(parts, run, state, self.best, meter)
        context = Context(parts, run, state, meter, self.display, self.saver)
        self.policy = Policy(context)
        measures, callbacks = (objects.measures, objects.callbacks) if self.ranks.first else ((), ())
        source: Rollouts = Recorded(recorded) if recorded is not None else Sampled(context)
        ahead = 0 if recorded is not None else self.config.rollouts_ahead
        on_fleet = self.config.fleet.engines and recorded is None
        self._beside = Beside(context, parts.fleet, ahead) if on_fleet else None
        batches = self._beside or Ahead(source, state, ahead)
        self.rollouts: Rollouts = Replayed(batches, state, parts.replay)
        early = SampledAhead(context, ahead, late=bool(on_fleet))
        self.learning = Learning(context, measures, recorded is not None, batches.settle, early)
        self.recorder = Recorder(context, self.policy, self.learning, self.trackers, callbacks)
        self._stack = ExitStack()

    def __enter__(self) -> "Session":
        with ExitStack() as stack:
            for resource_ in (self.run, self.parts.rewards, self.interruption, self.display, self.trackers):
                stack.enter_context(resource_)
            if self._beside is not None:
                stack.enter_context(self._beside)
            self._begin()
            self._stack = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Say what computes, know what was done before, and record what is due before the first step."""
        self.parts.rewards.output.path = self.run.directory / runs.REWARDS_LOG
        self.display.note(f"{self.model.ops.why}; consistency: {self.config.consistency}")
        told = endless(self.model, self.config.sampling), rank_warning(self.config, self.model)
        for warning in (*self._changed, *told, *cautions(self.config, self.parts.task, self.model)):
            if warning is not None:
                self.display.note(warning)
        if self.config.run.check_memory:
            self.parts.keep_checksums()
        if self.ranks.first:
            for row in runs.read_jsonl(self.run.directory / runs.METRICS):  # of a resumed run: what it had done
                self.display.history.add(row)
        if self.saver.saved_step is None:
            self.recorder.certify(None, {})
            self.display.history.add(self.recorder.evaluate_and_write())
            self.saver.save()
        elif self.state.unrecorded is not None:
            measured = {**self.state.unrecorded, **self.parts.memory_metrics()}  # which no checkpoint holds
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
        signals = [found for found in self.ranks.all_gather_json(self.interruption.signal) if found is not None]
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
        if (verdict := self.display.history.standstill.verdict) is not None:
            self.display.note(verdict)
        if (line := self.best.line(self.state.step)) is not None:
            self.display.note(line)
        self.display.note(f"certificate of step {self.state.step}: {self.state.head}")
        if self.interruption.signal is not None:
            again = f"isobit train --resume {self.run.directory}"
            self.display.note(f"stopped after step {self.state.step}; go on with: {again}")

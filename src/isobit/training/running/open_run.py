"""The parts of every open run: its directory, screen, trackers and saver, the verbs that sync and
record, the work that is due after its last step, and when it ends.

The source of its batches, and what is learned from them besides the loss, are defined by the kinds
of run that inherit from this: a run that samples (`session/open_run.py`), and a supervised run
(`sft/open_run.py`). Left out: how a run is opened (`opening.py`), and the records of a step
(`recording/recorder.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar

from isobit.config import Config, SftConfig
from isobit.data.dataset import Dataset
from isobit.evaluation.best import Best
from isobit.monitor.report import write_report
from isobit.monitor.screen import Display
from isobit.monitor.trackers.process import Trackers
from isobit.options.declare import plain
from isobit.run import directory as runs
from isobit.run.directory import RunDirectory
from isobit.run.heartbeat import Heartbeat, log_path
from isobit.run.interruption import Interruption
from isobit.run.no_progress import CutOff
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.measuring.meter import Meter
from isobit.training.objects import OnStep
from isobit.training.policy import Policy
from isobit.training.recording.callbacks import named_callbacks
from isobit.training.recording.evaluating import Evaluating, HeldOut
from isobit.training.recording.recorder import Learned, Recorder
from isobit.training.resolved import keep
from isobit.training.running.machine import machine_facts
from isobit.training.running.restoring import Restored
from isobit.training.saving.checkpoint import Trained
from isobit.training.saving.saver import Saver
from isobit.training.saving.snapshot import State

_Self = TypeVar("_Self", bound="OpenRun")


class RunParts(Protocol):
    """The parts from which a run of any kind is put together."""

    @property
    def config(self) -> Config | SftConfig:
        """The config as resolved: without `auto` and `epochs`."""

    @property
    def trained(self) -> Trained:
        """The state that training changes."""

    @property
    def train(self) -> Dataset:
        """The examples of the training split."""

    @property
    def held_out(self) -> HeldOut | None:
        """The held-out examples; None where the run evaluates nothing."""

    def resolved_values(self) -> Mapping[str, Any]:
        """Return the values that the config leaves open, as `resolved.json` has them."""

    def memory_metrics(self) -> dict[str, float]:
        """Return the metrics of allocated memory, in MiB."""


class OpenRun:
    """An open run; a context manager. `learned`: the metrics and rows of a step; `callbacks` are
    called after each step. `best_by`: the metric of the best model, if it is kept. `saved_step`:
    the step of the checkpoint that the run goes on from. `details`: a few words for the screen. A
    subclass sets `rollouts` and `learning`."""

    rollouts: Rollouts
    learning: Learning

    def __init__(
        self,
        parts: RunParts,
        run: RunDirectory,
        state: State,
        learned: Learned,
        *,
        quiet: bool,
        saved_step: int | None,
        callbacks: Sequence[OnStep] = (),
        best_by: str | None = None,
        details: str = "",
    ) -> None:
        config, trained = parts.config, parts.trained
        self.run, self.state, self.trained = run, state, trained
        self.model, self.ranks, self.objective = trained.model, trained.ranks, trained.objective
        facts = machine_facts(self.model, self.objective)
        self._changed = self.ranks.run_on_all(lambda: run.record_machine(facts))
        self.ranks.run_on_all(lambda: keep(parts.resolved_values(), run))
        self.interruption = Interruption()
        self._steps, self._report = config.steps, config.run.report
        self._check_memory = config.run.check_memory
        self._ends = isinstance(config, Config) and not config.sampling.ignore_eos
        details = f"{details}{self.model.precision.name}, {config.consistency}"
        name, speaks = run.directory.name, self.ranks.first
        self.display = Display(config.steps, quiet, state.step, name, details, speaks)
        self.trackers = Trackers(
            plain(config.tracking) | ({} if self.ranks.first else {"trackers": ()}),
            plain(config),
            run.directory,
            exit_code=lambda: self.interruption.exit_code,
            say=self.display.note,
        )
        self._heartbeat = Heartbeat(
            run.directory, self.ranks.rank, self.ranks.size, lambda: state.step
        )
        self.ranks.print_to(log_path(run.directory, self.ranks.rank))
        self._meter = meter = Meter(self._phase, self.model.ops.device)
        self.best = Best(run.directory, best_by, trained.save_model, self.ranks)
        self.saver = Saver(trained, run, state, self.best, meter, config.run.keep_last, saved_step)
        self.policy = Policy(trained, parts.train, state, meter, self.saver)
        evaluating = Evaluating(
            config,
            parts.held_out,
            self.policy,
            trained.learner,
            state,
            meter,
            self.saver,
            self.best,
            self.display.note,
            run.write_held_out,
            prompts=len(parts.train),
        )
        self.recorder = Recorder(
            config,
            run,
            state,
            trained,
            self.saver,
            learned,
            evaluating,
            parts.memory_metrics,
            self.display,
            self.trackers,
            [*callbacks, *named_callbacks(config.run.callbacks)] if self.ranks.first else (),
        )
        self._stack = ExitStack()

    def goes_on_as(self, restored: Restored) -> None:
        """Restore the best model of a run that goes on, and keep a warning where it has a
        problem."""
        if restored.finished:
            self.best.stay()
        else:
            self.best.restore(restored.best)
        saved = None if restored.finished else restored.best
        line = self.ranks.broadcast_result(lambda: self.best.problem(saved))
        self._changed = [*self._changed, *([] if line is None else [line])]

    def resources(self) -> Sequence[AbstractContextManager[Any]]:
        """Return other context managers to keep open as long as the run is open."""
        return ()

    def told(self) -> Iterable[str]:
        """Return lines to print before the first step."""
        return ()

    def warned(self) -> Iterable[str | None]:
        """Return warnings to print before the first step; None in it is skipped."""
        return ()

    def __enter__(self: _Self) -> _Self:
        with ExitStack() as stack:
            stack.enter_context(self.run)
            stack.enter_context(self.interruption)
            stack.enter_context(self.display)
            stack.enter_context(self.trackers)
            for resource in self.resources():
                stack.enter_context(resource)
            self._begin()
            self._stack = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Print lines and warnings, begin to check memory if the config says so, and record what is
        due before the first step."""
        for line in self._changed:
            self.display.warn(line)
        for line in self.told():
            self.display.note(line)
        for warning in self.warned():
            if warning is not None:
                self.display.warn(warning)
        if self._check_memory:
            self.trained.keep_checksums()
        self.recorder.begin()

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
        """Whether steps are left to do, no rank was interrupted, and no evaluation ended the
        run."""
        signals = [
            found
            for found in self.ranks.all_gather_json(self.interruption.signal)
            if found is not None
        ]
        if signals:  # a signal to one rank ends the run on all
            self.interruption.signal = signals[0]
        return self.state.step < self._steps and not signals and self.recorder.ended is None

    def finish(self) -> None:
        """Save what is not saved, write the report, and say how to go on."""
        if self.saver.saved_step != self.state.step:
            self.saver.save()
        if self._report and self.ranks.first and self.run.written()["rows"]:
            path = write_report([self.run.directory], self.run.directory / runs.REPORT)
            self.display.note(f"report: {path}")
        if self.recorder.ended is not None:
            self.display.note(f"ended early: {self.recorder.ended}")
        cut_off = self.display.history.cut_off if self._ends else CutOff()
        for verdict in (self.display.history.no_progress.verdict, cut_off.verdict):
            if verdict is not None:
                self.display.warn(verdict)
        if (line := self.best.line(self.state.step)) is not None:
            self.display.note(line)
        self.display.note(f"certificate of step {self.state.step}: {self.state.head}")
        if self.interruption.signal is not None:
            again = f"isobit train --resume {self.run.directory}"
            self.display.warn(f"stopped after step {self.state.step}; go on with: {again}")

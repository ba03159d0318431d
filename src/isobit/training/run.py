"""One run, whatever it learns from: how it is opened, new or again, what it has while it is open,
and how it ends.

What a run is put together from is opened before its directory, so that a user's mistakes are found
before anything is written. The parts say where batches come from and how they are learned from: of
a run that samples `parts/sampled.py`, of given answers `parts/given.py`. Left out: how files are
restored (`running/restoring.py`), and the records of a step (`recording/recorder.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from isobit.config import Config, SftConfig, dump_config, load_any_run_config
from isobit.config.reading import override
from isobit.distributed import ALONE, Ranks
from isobit.evaluation.best import Best
from isobit.monitor.report import write_report
from isobit.monitor.screen import Display
from isobit.monitor.trackers.process import Trackers
from isobit.options.declare import plain
from isobit.run import checkpoints
from isobit.run import directory as runs
from isobit.run.directory import RunDirectory
from isobit.run.heartbeat import Heartbeat, log_path
from isobit.run.interruption import Interruption
from isobit.run.no_progress import CutOff
from isobit.training.context import RunContext
from isobit.training.learning import Learning
from isobit.training.loop import Rollouts
from isobit.training.measuring.meter import Meter
from isobit.training.policy import Policy
from isobit.training.recording.callbacks import named_callbacks
from isobit.training.recording.evaluating import Evaluating
from isobit.training.recording.recorder import Recorder
from isobit.training.running.inputs import check_inputs, config_of, inputs_of
from isobit.training.running.machine import machine_facts
from isobit.training.running.resolved import keep
from isobit.training.running.restoring import (
    Restored,
    directory,
    go_on_with,
    locked,
    of_ranks,
    refuse_lost,
    restore,
)
from isobit.training.saving.checkpoint import problem_of
from isobit.training.saving.saver import Saver
from isobit.training.saving.snapshot import State

if TYPE_CHECKING:
    from isobit.training.parts.given import GivenParts
    from isobit.training.parts.sampled import SampledParts


Parts = TypeVar("Parts", bound="SampledParts | GivenParts")
OpenParts = Callable[[Any, Ranks, Mapping[str, Any], Path | None], Parts]
"""Opens the parts of a run: of its config, the ranks, the facts of the run that goes on or is
repeated, and the checkpoint with its weights, if there is one. Raises IsobitError for whatever does
not fit."""


def open_new(
    config: Config | SftConfig,
    open_parts: OpenParts[Parts],
    *,
    quiet: bool,
    ranks: Ranks = ALONE,
    recorded: Path | None = None,
) -> "Run[Parts]":
    """Open a new run. `recorded`: the run that it repeats, if it does. Raises IsobitError, before
    anything is written, for what it cannot be made of."""
    folder = Path(config.run.dir)
    ranks.on_first(lambda: runs.refuse_existing(folder))
    config = of_ranks(config, ranks)
    inputs = ranks.on_first(lambda: inputs_of(config)) or {}
    began = {} if recorded is None else runs.began_by(recorded)
    ranks.on_first(lambda: len(named_callbacks(config.run.callbacks)))
    with ExitStack() as held:
        run_parts = held.enter_context(closing(open_parts(config, ranks, began, None)))
        config_text = dump_config(run_parts.config)
        run = directory(folder, ranks, lambda: RunDirectory.create(folder, config_text, recorded))
        held.enter_context(run)
        go_on_with(run, {**inputs, **config_of(run_parts.config)}, (), ranks)
        opened = Run(run_parts, run, State(), quiet, None)
        held.pop_all()  # the run closes them
        return opened


def open_again(
    run_dir: Path,
    overrides: Sequence[str],
    opener: Callable[[Any, Path | None], OpenParts[Parts]],
    *,
    quiet: bool,
    ranks: Ranks = ALONE,
) -> "Run[Parts]":
    """Open a run that goes on from its newest whole checkpoint, on any number of ranks, or begins
    again where it was killed before its first; `opener` of its config, and of the run whose rollouts
    it learns from, if it does, opens its parts."""
    with locked(run_dir, overrides, ranks) as lock, ExitStack() as held:
        config = load_any_run_config(run_dir, [override("run.dir", run_dir), *overrides])
        source = runs.rollouts_from(run_dir)
        open_parts = opener(config, source)
        config = of_ranks(config, ranks)
        inputs = ranks.on_first(lambda: {**inputs_of(config), **config_of(config)}) or {}
        changes = ranks.on_first(lambda: check_inputs(run_dir, inputs, config.run.on_change)) or []
        began = runs.began_by(source or run_dir)
        path = None
        if checkpoints.all_checkpoints(run_dir / runs.CHECKPOINTS):
            path = runs.newest_checkpoint(run_dir, lambda c: problem_of(c, ranks), ranks)
        else:
            ranks.on_first(lambda: refuse_lost(run_dir))
        ranks.on_first(lambda: len(named_callbacks(config.run.callbacks)))
        run_parts = held.enter_context(closing(open_parts(config, ranks, began, path)))
        if path is None:
            text, nothing = dump_config(run_parts.config), runs.NOTHING_WRITTEN
            run = directory(run_dir, ranks, lambda: RunDirectory(run_dir, nothing, text, lock))
            held.enter_context(run)
            go_on_with(run, inputs, changes, ranks)
            again = Run(run_parts, run, State(), quiet, None)
        else:
            restored = restore(path, run_dir, config, run_parts.trained, inputs, changes, lock)
            held.enter_context(restored.run)
            state = restored.state
            again = Run(run_parts, restored.run, state, quiet, state.step)
            again.goes_on_as(restored)
        held.pop_all()  # the run closes them
        return again


@dataclass(frozen=True, eq=False)
class Source:
    """The batches of an open run, the way it learns from them, and the `resources` that stay open
    as long as the run is open, besides its parts."""

    rollouts: Rollouts
    learning: Learning
    resources: Sequence[AbstractContextManager[Any]] = ()


class Run(Generic[Parts]):
    """An open run; a context manager. `saved_step`: the step of the checkpoint that it goes on
    from."""

    def __init__(
        self, parts: Parts, run: RunDirectory, state: State, quiet: bool, saved_step: int | None
    ) -> None:
        config, trained = parts.config, parts.trained
        self.config, self.parts, self.run, self.state = config, parts, run, state
        self.trained, self.model, self.ranks = trained, trained.model, trained.ranks
        self.objective = trained.objective
        facts = machine_facts(self.model, self.objective)
        self._changed = self.ranks.run_on_all(lambda: run.record_machine(facts))
        self.ranks.run_on_all(lambda: keep(parts.resolved_values(), run))
        self.interruption = Interruption()
        details = f"{parts.kind}{self.model.precision.name}, {config.consistency}"
        name, speaks = run.directory.name, self.ranks.first
        self.display = Display(config.steps, quiet, state.step, name, details, speaks)
        self.trackers = Trackers(
            plain(config.tracking) | ({} if speaks else {"trackers": ()}),
            plain(config),
            run.directory,
            exit_code=lambda: self.interruption.exit_code,
            say=self.display.note,
        )
        self._heartbeat = Heartbeat(
            run.directory, self.ranks.rank, self.ranks.size, lambda: state.step
        )
        self.ranks.print_to(log_path(run.directory, self.ranks.rank))
        meter = Meter(self._phase, self.model.ops.device)
        self.best = Best(run.directory, parts.best_by, trained.save_model, self.ranks)
        self.saver = Saver(trained, run, state, self.best, meter, config.run.keep_last, saved_step)
        context = RunContext(
            run, trained, parts.train, state, self.ranks, meter, self.saver, self.best, self.display
        )
        self.policy = Policy(context)
        self.recorder = Recorder(
            config,
            context,
            parts.learned(context),
            Evaluating(config, parts.held_out, self.policy, context),
            parts.memory_metrics,
            self.trackers,
            [*parts.callbacks, *named_callbacks(config.run.callbacks)] if speaks else (),
        )
        source = parts.source(context)
        self.rollouts, self.learning = source.rollouts, source.learning
        self._resources, self._stack = source.resources, ExitStack()

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

    def __enter__(self) -> "Run[Parts]":
        held: tuple[AbstractContextManager[Any], ...]
        held = (self.run, self.interruption, self.display, self.trackers, *self._resources)
        with ExitStack() as stack:
            stack.enter_context(closing(self.parts))
            for resource in held:
                stack.enter_context(resource)
            self._begin()
            self._stack = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Print lines and warnings, begin to check memory if the config says so, and record what is
        due before the first step."""
        for line in self._changed:
            self.display.warn(line)
        for line in self.parts.notes():
            self.display.note(line)
        for warning in self.parts.warnings():
            if warning is not None:
                self.display.warn(warning)
        if self.config.run.check_memory:
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
        received = self.ranks.all_gather_json(self.interruption.signal)
        signals = [signal for signal in received if signal is not None]
        if signals:  # a signal to one rank ends the run on all
            self.interruption.signal = signals[0]
        return self.state.step < self.config.steps and not signals and self.recorder.ended is None

    def finish(self) -> None:
        """Save what is not saved, write the report, and say how to go on."""
        display, config = self.display, self.config
        if self.saver.saved_step != self.state.step:
            self.saver.save()
        if config.run.report and self.ranks.first and self.run.written()["rows"]:
            path = write_report([self.run.directory], self.run.directory / runs.REPORT)
            display.note(f"report: {path}")
        if self.recorder.ended is not None:
            display.note(f"ended early: {self.recorder.ended}")
        ends = isinstance(config, Config) and not config.sampling.ignore_eos
        cut_off = display.history.cut_off if ends else CutOff()
        for verdict in (display.history.no_progress.verdict, cut_off.verdict):
            if verdict is not None:
                display.warn(verdict)
        if (line := self.best.line(self.state.step)) is not None:
            display.note(line)
        display.note(f"certificate of step {self.state.step}: {self.state.head}")
        if self.interruption.signal is not None:
            again = f"isobit train --resume {self.run.directory}"
            display.warn(f"stopped after step {self.state.step}; go on with: {again}")
        if self.parts.result is not None:
            newest = checkpoints.all_checkpoints(self.run.checkpoints)[-1]
            display.note(f"{self.parts.result} in {newest}")

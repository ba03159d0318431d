"""Open a run that samples, or one that trains on the rollouts of another: what of its opening is
not every run's (`running/opening.py`)."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from isobit.config import Config, load_run_config
from isobit.config.reading import override
from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.options.declare import plain
from isobit.run import directory as runs
from isobit.run import ends as files
from isobit.run.directory import RunDirectory
from isobit.run.rows import warn
from isobit.training.objects import NO_OBJECTS, Given, Objects
from isobit.training.parts import Parts
from isobit.training.recording.rows import recorded_groups
from isobit.training.rollouts.asynchronous import open_fleet
from isobit.training.rollouts.serving import open_serving, take_place
from isobit.training.running.opening import Kind, open_again, open_new
from isobit.training.running.restoring import locked
from isobit.training.saving.snapshot import State
from isobit.training.session.assembly import open_parts
from isobit.training.session.open_run import Session


@dataclass(frozen=True, eq=False)
class _WithRollouts(Kind[Config, Parts, Session]):
    """`objects`: what the run takes from Python."""

    objects: Objects = NO_OBJECTS

    def open_parts(
        self, config: Config, ranks: Ranks, began: Mapping[str, Any], checkpoint: Path | None
    ) -> Parts:
        """And where the run samples, the engines of a fleet and the server, if there are some."""
        with ExitStack() as held:
            place = take_place(config) if self.recorded is None else None
            if place is not None:
                held.callback(place.listener.close)
            parts = open_parts(
                config,
                quiet=self.quiet,
                checkpoint=checkpoint,
                objects=self.objects,
                ranks=ranks,
                began=began,
                recorded=self.recorded,
            )
            if self.recorded is not None:
                return parts
            held.callback(parts.processes.close)
            fleet = ranks.run_on_all(
                lambda: open_fleet(parts.config, parts.sampling, parts.engine, ranks)
            )
            coming = parts.optimizer.nbytes + parts.optimizer.gradient_bytes
            serving = open_serving(parts.config, parts.model, coming, place)
            held.pop_all()  # the run closes them
            return replace(parts, fleet=fleet, serving=serving)

    def put_together(
        self, parts: Parts, run: RunDirectory, state: State, saved_step: int | None
    ) -> Session:
        """What another run recorded is learned from after the step that is done."""
        recorded = None
        if self.recorded is not None:
            groups = recorded_groups(self.recorded, load_run_config(self.recorded))
            recorded = islice(groups, state.step, None)
        return Session(
            parts,
            run,
            state,
            quiet=self.quiet,
            recorded=recorded,
            objects=self.objects,
            saved_step=saved_step,
        )


def open_session(config: Config, objects: Objects, *, quiet: bool, ranks: Ranks = ALONE) -> Session:
    """A new run."""
    return open_new(config, _WithRollouts(quiet, objects=objects), ranks)


def open_resumed(
    run_dir: Path, overrides: Sequence[str], given: Given, *, quiet: bool, ranks: Ranks = ALONE
) -> Session:
    """A run that goes on, with the objects that it was `given`, or begins again where it had no
    checkpoint."""
    with locked(run_dir, overrides, ranks) as lock:
        config = load_run_config(run_dir, [override("run.dir", run_dir), *overrides])
        source, objects = runs.rollouts_from(run_dir), given.again(config)
        if source is not None:
            _require_recorded(run_dir, source, config)
        kind = _WithRollouts(quiet, source, objects)
        return open_again(run_dir, config, kind, lock, ranks)


def open_replay(
    recorded: Path, out: Path, overrides: Sequence[str], *, quiet: bool, ranks: Ranks = ALONE
) -> Session:
    """A new run that learns from the rollouts recorded in another."""
    runs.require_run(recorded)
    steps = _recorded_steps(recorded)
    if steps == 0:
        raise IsobitError(f"{recorded}: no step was recorded")
    for line in (files.cut_short(recorded), files.other_completions(recorded)):
        if line is not None:
            warn(line)
    began = load_run_config(recorded)
    recorded_groups(recorded, began)  # refuses one that has not all of them
    config = load_run_config(recorded, [f"steps={steps}", *overrides, override("run.dir", out)])
    _refuse_other_rollouts(config, began, recorded)
    _refuse_more_steps(config, recorded)
    session = open_new(config, _WithRollouts(quiet, recorded), ranks)
    if other := ", ".join(session.parts.unlike):
        session.display.warn(f"tokens may differ from those of {recorded}: it had another {other}")
    return session


def _require_recorded(run_dir: Path, recorded: Path, config: Config) -> None:
    """Raise IsobitError where the other run is not there any more, or has too few steps."""
    if not (recorded / runs.CONFIG).is_file():
        raise IsobitError(
            f"{run_dir} learns from the rollouts of {recorded}, which is no run directory any "
            f"more; if it was moved, write its new path into {run_dir / runs.ROLLOUTS_FROM}"
        )
    _refuse_more_steps(config, recorded)


def _refuse_other_rollouts(config: Config, began: Config, recorded: Path) -> None:
    """Raise IsobitError where a config says of the rollouts what they are not: none are sampled."""
    now, before = (
        {
            "prompts_per_step": each.prompts_per_step,
            **{f"sampling.{key}": value for key, value in plain(each.sampling).items()},
        }
        for each in (config, began)
    )
    for key, value in now.items():
        if value != before[key]:
            raise IsobitError(
                f"{key}={value}: {recorded} sampled its rollouts with {before[key]}, and they are "
                f"learned from as they are; leave {key} out, or sample anew: isobit train "
                f"{recorded / runs.CONFIG} {key}={value} --out DIR"
            )


def _recorded_steps(run_dir: Path) -> int:
    return sum(1 for row in runs.read_jsonl(run_dir / runs.METRICS) if row["step"] > 0)


def _refuse_more_steps(config: Config, recorded: Path) -> None:
    if config.steps > (steps := _recorded_steps(recorded)):
        raise IsobitError(
            f"steps={config.steps}: {recorded} recorded {steps}, and no more can be learned from "
            f"its rollouts; give at most steps={steps}"
        )

"""Open a run: a new one, one resumed from its checkpoint, or one that trains on the rollouts of
another.

Models, data and reward workers are opened before the run directory, so that a user's mistakes are
found before anything is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isobit.config import Config, check_resumed, dump_config, load_run_config
from isobit.config.reading import override
from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.rl.algorithm.samples import Group
from isobit.run import checkpoints
from isobit.run import directory as runs
from isobit.run.directory import RunDirectory
from isobit.training.objects import Given, Objects
from isobit.training.parts import Parts
from isobit.training.recording.rows import recorded_groups
from isobit.training.rollouts.asynchronous import open_fleet
from isobit.training.rollouts.serving import open_serving
from isobit.training.running.inputs import check_inputs, inputs_of, record_inputs
from isobit.training.running.restoring import (
    Changes,
    directory,
    go_on_with,
    locked,
    of_ranks,
    refuse_lost,
    restore,
)
from isobit.training.saving.checkpoint import problem_of
from isobit.training.saving.snapshot import State
from isobit.training.session.assembly import open_parts
from isobit.training.session.open_run import Session


def open_session(config: Config, objects: Objects, *, quiet: bool, ranks: Ranks = ALONE) -> Session:
    """A new run."""
    folder = Path(config.run.dir)
    ranks.on_first(lambda: runs.refuse_existing(folder))
    config = of_ranks(config, ranks)
    inputs = ranks.on_first(lambda: inputs_of(config)) or {}
    parts = _open_all(config, quiet, objects, ranks)
    run = directory(folder, ranks, lambda: RunDirectory.create(folder, dump_config(parts.config)))
    ranks.on_first(lambda: record_inputs(run, inputs))
    return Session(parts, run, State(), quiet=quiet, objects=objects)


def _open_all(
    config: Config,
    quiet: bool,
    objects: Objects,
    ranks: Ranks,
    began: Mapping[str, Any] = MappingProxyType({}),
    checkpoint: Path | None = None,
    recorded: Path | None = None,
) -> Parts:
    """All parts, and the engines of a fleet and the server where there are some and the run
    samples, as one does that learns from no `recorded` rollouts."""
    parts = open_parts(
        config,
        quiet=quiet,
        checkpoint=checkpoint,
        objects=objects,
        ranks=ranks,
        began=began,
        recorded=recorded,
    )
    if recorded is not None:
        return parts
    try:
        opened = ranks.run_on_all(
            lambda: open_fleet(parts.config, parts.sampling, parts.engine, ranks)
        )
        coming = parts.optimizer.nbytes + parts.optimizer.gradient_bytes
        serving = open_serving(parts.config, parts.model, coming)
        return replace(parts, fleet=opened, serving=serving)
    except BaseException:
        parts.processes.close()
        raise


def open_resumed(
    run_dir: Path, overrides: Sequence[str], given: Given, *, quiet: bool, ranks: Ranks = ALONE
) -> Session:
    """A run that goes on, with the objects that it was `given`, on any number of ranks. One that
    was killed before its first checkpoint begins again."""
    runs.require_run(run_dir)
    check_resumed(overrides, run_dir)
    with locked(run_dir, ranks) as lock:
        return _resumed(run_dir, overrides, given, lock, ranks, quiet=quiet)


def _resumed(
    run_dir: Path,
    overrides: Sequence[str],
    given: Given,
    lock: runs.Lock | None,
    ranks: Ranks,
    *,
    quiet: bool,
) -> Session:
    config = load_run_config(run_dir, [override("run.dir", run_dir), *overrides])
    objects, config = given.again(config), of_ranks(config, ranks)
    source = runs.rollouts_from(run_dir)
    inputs = ranks.on_first(lambda: inputs_of(config)) or {}
    changed = ranks.on_first(lambda: check_inputs(run_dir, inputs, config.run.on_change)) or []
    changes = Changes(inputs, changed)
    began = runs.began_by(run_dir if source is None else source)
    if source is not None:
        _require_recorded(run_dir, source, config)
    if not checkpoints.all_checkpoints(run_dir / runs.CHECKPOINTS):
        ranks.on_first(lambda: refuse_lost(run_dir))
        parts = _open_all(config, quiet, objects, ranks, began, recorded=source)
        recorded = None if source is None else _recorded(source, 0)
        run = directory(
            run_dir,
            ranks,
            lambda: RunDirectory(run_dir, runs.NOTHING_WRITTEN, dump_config(config), lock),
        )
        go_on_with(run, changes, ranks)
        return Session(parts, run, State(), quiet=quiet, objects=objects, recorded=recorded)
    path = runs.newest_checkpoint(run_dir, lambda checkpoint: problem_of(checkpoint, ranks), ranks)
    parts = _open_all(config, quiet, objects, ranks, began, path, source)
    restored = restore(path, run_dir, config, parts.trained, changes, lock, config.prompts_per_step)
    step = restored.state.step
    recorded = None if source is None else _recorded(source, step)
    session = Session(
        parts,
        restored.run,
        restored.state,
        quiet=quiet,
        objects=objects,
        recorded=recorded,
        saved_step=step,
    )
    session.goes_on_as(restored)
    return session


def open_replay(
    recorded: Path, out: Path, overrides: Sequence[str], *, quiet: bool, ranks: Ranks = ALONE
) -> Session:
    """A new run that learns from the rollouts recorded in another."""
    runs.require_run(recorded)
    steps = _recorded_steps(recorded)
    if steps == 0:
        raise IsobitError(f"{recorded}: no step was recorded")
    groups = recorded_groups(recorded, load_run_config(recorded))
    config = load_run_config(recorded, [f"steps={steps}", *overrides, override("run.dir", out)])
    _refuse_more_steps(config, recorded)
    ranks.on_first(lambda: runs.refuse_existing(out))
    config = of_ranks(config, ranks)
    parts = open_parts(
        config, quiet=quiet, ranks=ranks, began=runs.began_by(recorded), recorded=recorded
    )
    run = directory(
        out, ranks, lambda: RunDirectory.create(out, dump_config(parts.config), recorded)
    )
    ranks.on_first(lambda: record_inputs(run, inputs_of(config)))
    session = Session(parts, run, State(), quiet=quiet, recorded=groups)
    if other := ", ".join(parts.unlike):
        session.display.note(f"tokens may differ from those of {recorded}: it had another {other}")
    return session


def _require_recorded(run_dir: Path, recorded: Path, config: Config) -> None:
    """Raise IsobitError where the other run is not there any more, or has too few steps."""
    if not (recorded / runs.CONFIG).is_file():
        raise IsobitError(
            f"{run_dir} learns from the rollouts of {recorded}, which is no run directory any "
            f"more; if it was moved, write its new path into {run_dir / runs.ROLLOUTS_FROM}"
        )
    _refuse_more_steps(config, recorded)


def _recorded(recorded: Path, step: int) -> Iterator[list[Group]]:
    """What a run that learns from the rollouts of another has still to learn after a step."""
    return islice(recorded_groups(recorded, load_run_config(recorded)), step, None)


def _recorded_steps(run_dir: Path) -> int:
    return sum(1 for row in runs.read_jsonl(run_dir / runs.METRICS) if row["step"] > 0)


def _refuse_more_steps(config: Config, recorded: Path) -> None:
    if config.steps > (steps := _recorded_steps(recorded)):
        raise IsobitError(
            f"steps={config.steps}: {recorded} recorded {steps}, and no more can be learned from "
            f"its rollouts; give at most steps={steps}"
        )

"""Open a run: a new one, one resumed from its checkpoint, or one that trains on the rollouts of
another.

Models, data and reward workers are opened before the run directory, so that a user's mistakes are
found before anything is written.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isobit.config import Config, check_resumed, dump_config, load_run_config
from isobit.config.reading import override
from isobit.distributed import ALONE, Ranks
from isobit.distributed.launch import check_alike
from isobit.errors import IsobitError
from isobit.kernels import versions
from isobit.options.declare import plain
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.samples import Group, groups_from_json
from isobit.run import checkpoints, metrics
from isobit.run import directory as runs
from isobit.run import ends as files
from isobit.run.directory import FollowedDirectory, RunDirectory
from isobit.run.rows import warn
from isobit.run.source import source_digest
from isobit.training.objects import Given, Objects
from isobit.training.parts import Parts
from isobit.training.recording.evaluating import evaluated_only_as_the_last
from isobit.training.recording.rows import recorded_groups
from isobit.training.rollouts.asynchronous import open_fleet
from isobit.training.rollouts.serving import open_serving
from isobit.training.saving.checkpoint import head_of, problem_of
from isobit.training.saving.snapshot import State
from isobit.training.session.assembly import open_parts
from isobit.training.session.inputs import Inputs, check_inputs, inputs_of, record_inputs
from isobit.training.session.open_run import Session


def open_session(config: Config, objects: Objects, *, quiet: bool, ranks: Ranks = ALONE) -> Session:
    """A new run."""
    directory = Path(config.run.dir)
    ranks.on_first(lambda: runs.refuse_existing(directory))
    config = _of_ranks(config, ranks)
    inputs = ranks.on_first(lambda: inputs_of(config)) or {}
    parts = _open_all(config, quiet, objects, ranks)
    run = _directory(
        directory, ranks, lambda: RunDirectory.create(directory, dump_config(parts.config))
    )
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
    check_resumed(overrides)
    lock = ranks.on_first(lambda: runs.Lock(run_dir))
    try:
        return _resumed(run_dir, overrides, given, lock, ranks, quiet=quiet)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def _resumed(
    run_dir: Path,
    overrides: Sequence[str],
    given: Given,
    lock: runs.Lock | None,
    ranks: Ranks,
    *,
    quiet: bool,
) -> Session:
    """The directory is this run's alone before anything in it is read or cleared away."""
    config = load_run_config(run_dir, [override("run.dir", run_dir), *overrides])
    objects, config = given.again(config), _of_ranks(config, ranks)
    source = runs.rollouts_from(run_dir)
    inputs = ranks.on_first(lambda: inputs_of(config)) or {}
    changed = ranks.on_first(lambda: check_inputs(run_dir, inputs, config.run.on_change)) or []
    began = runs.began_by(run_dir if source is None else source)
    if source is not None:
        _require_recorded(run_dir, source, config)
    if not checkpoints.all_checkpoints(run_dir / runs.CHECKPOINTS):
        ranks.on_first(lambda: _refuse_lost(run_dir))
        parts = _open_all(config, quiet, objects, ranks, began, recorded=source)
        recorded = None if source is None else _recorded(source, 0)
        run = _directory(
            run_dir,
            ranks,
            lambda: RunDirectory(run_dir, runs.NOTHING_WRITTEN, dump_config(config), lock),
        )
        ranks.on_first(lambda: _go_on_with(run, inputs, changed))
        return Session(parts, run, State(), quiet=quiet, objects=objects, recorded=recorded)
    path = runs.newest_checkpoint(run_dir, lambda checkpoint: problem_of(checkpoint, ranks), ranks)
    parts = _open_all(config, quiet, objects, ranks, began, path, source)
    counted = parts.trained.restore(path)
    pending = groups_from_json(counted["pending"])
    queue = [StepBatch.from_json(values, config.prompts_per_step) for values in counted["queue"]]
    head = ranks.broadcast_result(lambda: head_of(path))
    state = State(
        counted["step"], counted["cursor"], pending, queue, counted.get("unrecorded"), head=head
    )
    if state.step > config.steps:
        raise IsobitError(
            f"{run_dir} has finished step {state.step} already; extend it with steps=N"
        )
    ranks.on_first(lambda: checkpoints.go_on_from(path))
    ends, lost = ranks.broadcast_result(lambda: files.ends(run_dir, counted))
    if (done := ranks.broadcast_result(lambda: files.last_step(run_dir))) > state.step:
        lost = [
            *lost,
            f"{run_dir} goes on after step {state.step}: steps up to {done}, which it had "
            "recorded, are done again",
        ]
    changed = [*changed, *lost]
    finished = _take_the_last_row(run_dir, config, state, ends, ranks)
    run = _directory(run_dir, ranks, lambda: RunDirectory(run_dir, ends, dump_config(config), lock))
    ranks.on_first(lambda: _go_on_with(run, inputs, changed))
    recorded = None if source is None else _recorded(source, state.step)
    session = Session(
        parts, run, state, quiet=quiet, objects=objects, recorded=recorded, saved_step=state.step
    )
    if finished:
        session.best.stay()
    else:
        session.best.restore(counted.get("best"))
    return session


def _go_on_with(run: RunDirectory, inputs: Inputs, lines: Sequence[str]) -> None:
    """For the first rank: say what is not as it was, and keep the hashes of the files that count
    from here on."""
    for line in lines:
        warn(line)
    record_inputs(run, inputs)


def _refuse_lost(run_dir: Path) -> None:
    """Raise IsobitError where a run without a checkpoint has recorded a step: what it had learned
    is gone."""
    if step := files.last_step(run_dir):
        again = f"isobit train {run_dir / runs.CONFIG} --out DIR"
        raise IsobitError(
            f"{run_dir}: its checkpoints are gone, after step {step}: bring "
            f"{run_dir / runs.CHECKPOINTS} back, or begin anew in another directory: {again}"
        )


def _take_the_last_row(
    run_dir: Path, config: Config, state: State, ends: dict[str, int], ranks: Ranks
) -> bool:
    """Whether the run has finished after its checkpoint, with an evaluation of its last step: the
    row is written after everything else, and stays. If it is to be recorded anew, its times, which
    no checkpoint holds, are taken over."""
    if state.unrecorded is None:
        return False
    found = ranks.broadcast_result(lambda: files.row_at(run_dir / runs.METRICS, ends[runs.METRICS]))
    if found is None or found[0].get("step") != state.step:
        return False
    row, end = found
    lasting = {name for name in row if not metrics.of_the_machine(name)}
    if evaluated_only_as_the_last(config, state.step) and lasting > {"step", *state.unrecorded}:
        state.unrecorded, ends[runs.METRICS] = None, end
        return True
    state.unrecorded |= {name: value for name, value in row.items() if name not in lasting}
    return False


def _of_ranks(config: Config, ranks: Ranks) -> Config:
    """The config with the number of ranks that there are. Raises IsobitError unless they are
    alike."""
    if ranks.size > 1:
        check_alike(
            ranks, {"isobit's source": source_digest()[:16], **versions(), **_flat(plain(config))}
        )
    return replace(config, ranks=ranks.size)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """`section.key` to value."""
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return found


def _directory(directory: Path, ranks: Ranks, opened: Callable[[], RunDirectory]) -> RunDirectory:
    """The run directory as this rank has it: the first one opens it, the others must see it."""
    mine = ranks.on_first(opened)

    def followed() -> RunDirectory:
        if mine is not None:
            return mine
        if not (directory / runs.CONFIG).is_file():
            raise IsobitError(
                f"run directory {directory}: rank {ranks.rank} on host {platform.node()} does "
                "not see it; the "
                "ranks need one file system: set run.dir to a path that all of them share"
            )
        return FollowedDirectory(directory)

    return ranks.run_on_all(followed)


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
    config = _of_ranks(config, ranks)
    parts = open_parts(
        config, quiet=quiet, ranks=ranks, began=runs.began_by(recorded), recorded=recorded
    )
    run = _directory(
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

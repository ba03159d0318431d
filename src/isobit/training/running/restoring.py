"""How a run goes on: its directory is its own alone, its checkpoint is restored, and its files are
cut back to where that was made. And how several ranks open one directory.

Left out: what a run is put together from (`parts/`).
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from isobit.config import Config, SftConfig, check_resumed, dump_config
from isobit.distributed import Ranks
from isobit.distributed.launch import check_alike
from isobit.errors import IsobitError
from isobit.kernels import versions
from isobit.options.declare import plain
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.samples import groups_from_json
from isobit.run import checkpoints, completions, metrics
from isobit.run import directory as runs
from isobit.run import ends as files
from isobit.run.completions import HELD_OUT
from isobit.run.directory import FollowedDirectory, RunDirectory
from isobit.run.rows import warn
from isobit.run.source import source_digest
from isobit.training.recording.evaluating import evaluated_only_as_the_last
from isobit.training.running.inputs import Inputs, record_inputs
from isobit.training.saving.checkpoint import Trained, head_of
from isobit.training.saving.snapshot import State

_Config = TypeVar("_Config", bound=Config | SftConfig)


@dataclass(frozen=True, eq=False)
class Restored:
    """A run at its checkpoint. `finished`: it was at its end, and its last row stays; `best`: what
    the checkpoint knows of the best model."""

    run: RunDirectory
    state: State
    finished: bool
    best: Mapping[str, Any] | None


@contextmanager
def locked(run_dir: Path, overrides: Sequence[str], ranks: Ranks) -> Iterator[runs.Lock | None]:
    """Lock the directory of a run that goes on before anything in it is read or cleared away; the
    code that opens the run keeps the lock, and an error gives it back. Raises IsobitError for a
    directory without a run, and for overrides that would make another run of it."""
    runs.require_run(run_dir)
    check_resumed(overrides, run_dir)
    lock = ranks.on_first(lambda: runs.Lock(run_dir))
    try:
        yield lock
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def restore(
    checkpoint: Path,
    run_dir: Path,
    config: Config | SftConfig,
    trained: Trained,
    inputs: Inputs,
    changes: Sequence[str],
    lock: runs.Lock | None,
) -> Restored:
    """Go on from a checkpoint, with the present hashes of the `inputs`. Raises IsobitError for a
    run that has done more steps than it is to have."""
    ranks, counted = trained.ranks, trained.restore(checkpoint)
    queue = [StepBatch.from_json(values, config.prompts_per_step) for values in counted["queue"]]
    state = State(
        counted["step"],
        counted["cursor"],
        groups_from_json(counted["pending"]),
        queue,
        counted.get("unrecorded"),
        head=ranks.broadcast_result(lambda: head_of(checkpoint)),
        solved={int(index): fraction for index, fraction in counted.get("solved", {}).items()},
        unfinished=groups_from_json(counted.get("unfinished", [])),
    )
    if state.step > config.steps:
        raise IsobitError(
            f"{run_dir} has finished step {state.step} already; extend it with steps=N"
        )
    ranks.on_first(lambda: checkpoints.go_on_from(checkpoint))
    ends, lost = ranks.broadcast_result(lambda: files.ends(run_dir, counted))
    if (done := ranks.broadcast_result(lambda: files.last_step(run_dir))) > state.step:
        lost = [
            *lost,
            f"{run_dir} goes on after step {state.step}: steps up to {done}, which it had "
            "recorded, are done again",
        ]
    finished = _take_the_last_row(run_dir, config, state, ends, ranks)
    run = directory(run_dir, ranks, lambda: RunDirectory(run_dir, ends, dump_config(config), lock))
    go_on_with(run, inputs, [*changes, *lost], ranks)
    return Restored(run, state, finished, counted.get("best"))


def go_on_with(run: RunDirectory, inputs: Inputs, changes: Sequence[str], ranks: Ranks) -> None:
    """Print what has changed, and record the hashes of the files that count from here on, on the
    first rank."""

    def say() -> None:
        for line in changes:
            warn(line)
        record_inputs(run, inputs)

    ranks.on_first(say)


def refuse_lost(run_dir: Path) -> None:
    """Raise IsobitError where a run without a checkpoint has recorded a step: what it had learned
    is gone."""
    if step := files.last_step(run_dir):
        again = f"isobit train {run_dir / runs.CONFIG} --out DIR"
        raise IsobitError(
            f"{run_dir}: its checkpoints are gone, after step {step}: bring "
            f"{run_dir / runs.CHECKPOINTS} back, or begin anew in another directory: {again}"
        )


def _take_the_last_row(
    run_dir: Path,
    config: Config | SftConfig,
    state: State,
    ends: dict[str, int],
    ranks: Ranks,
) -> bool:
    """Return whether the run has finished after its checkpoint, with an evaluation of its last
    step: the row is written after everything else, and stays. If it is to be recorded anew, its
    times, which no checkpoint holds, are taken over."""
    if state.unrecorded is None:
        return False
    last = ranks.broadcast_result(lambda: files.row_at(run_dir / runs.METRICS, ends[runs.METRICS]))
    if last is None or last[0].get("step") != state.step:
        return False
    row, end = last
    lasting = {name for name in row if not metrics.of_the_machine(name)}
    if evaluated_only_as_the_last(config, state.step) and lasting > {"step", *state.unrecorded}:
        state.unrecorded, ends[runs.METRICS] = None, end
        ends[HELD_OUT] = ranks.broadcast_result(lambda: completions.end(run_dir / HELD_OUT))
        return True
    state.unrecorded |= {name: value for name, value in row.items() if name not in lasting}
    return False


def of_ranks(config: _Config, ranks: Ranks) -> _Config:
    """Return the config with the number of ranks. Raises IsobitError unless they are alike."""
    if ranks.size > 1:
        check_alike(
            ranks, {"isobit's source": source_digest()[:16], **versions(), **_flat(plain(config))}
        )
    return replace(config, ranks=ranks.size)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return the values of nested sections by `section.key`."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def directory(path: Path, ranks: Ranks, opened: Callable[[], RunDirectory]) -> RunDirectory:
    """Return the run directory as this rank has it: the first one opens it, the others must see
    it."""
    mine = ranks.on_first(opened)

    def followed() -> RunDirectory:
        if mine is not None:
            return mine
        if not (path / runs.CONFIG).is_file():
            raise IsobitError(
                f"run directory {path}: rank {ranks.rank} on host {platform.node()} does "
                "not see it; the "
                "ranks need one file system: set run.dir to a path that all of them share"
            )
        return FollowedDirectory(path)

    return ranks.run_on_all(followed)

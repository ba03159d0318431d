"""Open a supervised run: a new one, or one resumed from its checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from isobit.config import SftConfig, check_resumed, dump_config, load_any_run_config
from isobit.config.reading import override
from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.run import checkpoints
from isobit.run import directory as runs
from isobit.run.directory import RunDirectory
from isobit.training.running.inputs import check_inputs, inputs_of
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
from isobit.training.sft.open_run import SupervisedRun
from isobit.training.sft.parts import open_parts


def open_supervised(config: SftConfig, *, quiet: bool, ranks: Ranks = ALONE) -> SupervisedRun:
    """A new run. Raises IsobitError for bad data or models, before anything is written."""
    folder = Path(config.run.dir)
    ranks.on_first(lambda: runs.refuse_existing(folder))
    config = of_ranks(config, ranks)
    inputs = ranks.on_first(lambda: inputs_of(config)) or {}
    parts = open_parts(config, quiet=quiet, ranks=ranks, began={})
    run = directory(folder, ranks, lambda: RunDirectory.create(folder, dump_config(parts.config)))
    go_on_with(run, Changes(inputs, ()), ranks)
    return SupervisedRun(parts, run, State(), quiet=quiet)


def open_supervised_again(
    run_dir: Path, overrides: Sequence[str], *, quiet: bool, ranks: Ranks = ALONE
) -> SupervisedRun:
    """A run that goes on from its newest whole checkpoint, on any number of ranks. One that was
    killed before its first begins again."""
    check_resumed(overrides, run_dir)
    config = load_any_run_config(run_dir, [override("run.dir", run_dir), *overrides])
    if not isinstance(config, SftConfig):
        raise IsobitError(
            f"{run_dir} is a run of `isobit train`; go on with: isobit train --resume {run_dir}"
        )
    config = of_ranks(config, ranks)
    with locked(run_dir, ranks) as lock:
        inputs = ranks.on_first(lambda: inputs_of(config)) or {}
        lines = ranks.on_first(lambda: check_inputs(run_dir, inputs, config.run.on_change)) or []
        changes, began = Changes(inputs, lines), runs.began_by(run_dir)
        if not checkpoints.all_checkpoints(run_dir / runs.CHECKPOINTS):
            ranks.on_first(lambda: refuse_lost(run_dir))
            parts = open_parts(config, quiet=quiet, ranks=ranks, began=began)
            nothing, kept = runs.NOTHING_WRITTEN, dump_config(parts.config)
            run = directory(run_dir, ranks, lambda: RunDirectory(run_dir, nothing, kept, lock))
            go_on_with(run, changes, ranks)
            return SupervisedRun(parts, run, State(), quiet=quiet)
        path = runs.newest_checkpoint(run_dir, lambda found: problem_of(found, ranks), ranks)
        parts = open_parts(config, quiet=quiet, ranks=ranks, began=began, checkpoint=path)
        found = restore(path, run_dir, config, parts.trained, changes, lock, config.batch_size)
        step = found.state.step
        session = SupervisedRun(parts, found.run, found.state, quiet=quiet, saved_step=step)
        session.goes_on_as(found)
        return session

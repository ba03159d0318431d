"""Open a supervised run: what of its opening is not every run's (`running/opening.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.config import SftConfig, load_any_run_config
from isobit.config.reading import override
from isobit.distributed import ALONE, Ranks
from isobit.run.directory import RunDirectory
from isobit.training.running.opening import Kind, open_again, open_new
from isobit.training.running.restoring import locked
from isobit.training.saving.snapshot import State
from isobit.training.sft.open_run import SupervisedRun
from isobit.training.sft.parts import SupervisedParts, open_parts


@dataclass(frozen=True, eq=False)
class _Supervised(Kind[SftConfig, SupervisedParts, SupervisedRun]):
    def open_parts(
        self, config: SftConfig, ranks: Ranks, began: Mapping[str, Any], checkpoint: Path | None
    ) -> SupervisedParts:
        return open_parts(config, quiet=False, ranks=ranks, began=began, checkpoint=checkpoint)

    def put_together(
        self, parts: SupervisedParts, run: RunDirectory, state: State, saved_step: int | None
    ) -> SupervisedRun:
        return SupervisedRun(parts, run, state, quiet=self.quiet, saved_step=saved_step)


def open_supervised(config: SftConfig, *, quiet: bool, ranks: Ranks = ALONE) -> SupervisedRun:
    """A new run. Raises IsobitError for bad data or models, before anything is written."""
    return open_new(config, _Supervised(quiet), ranks)


def open_supervised_again(
    run_dir: Path, overrides: Sequence[str], *, quiet: bool, ranks: Ranks = ALONE
) -> SupervisedRun:
    """A supervised run that goes on, or begins again where it had no checkpoint."""
    with locked(run_dir, overrides, ranks) as lock:
        config = load_any_run_config(run_dir, [override("run.dir", run_dir), *overrides])
        assert isinstance(config, SftConfig), f"{run_dir} is a run that samples"
        return open_again(run_dir, config, _Supervised(quiet), lock, ranks)

"""Open a run of any kind: a new one, or one that goes on.

What a run is put together from is opened before its directory, so that a user's mistakes are found
before anything is written. Left out: what that is, which each kind of run says itself
(`session/opening.py`, `sft/opening.py`), and how files are restored (`restoring.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from isobit.config import Config, SftConfig, dump_config
from isobit.distributed import Ranks
from isobit.run import checkpoints
from isobit.run import directory as runs
from isobit.run.directory import RunDirectory
from isobit.training.recording.callbacks import named_callbacks
from isobit.training.running.inputs import check_inputs, config_of, inputs_of
from isobit.training.running.open_run import OpenRun, RunParts
from isobit.training.running.restoring import (
    Changes,
    directory,
    go_on_with,
    of_ranks,
    refuse_lost,
    restore,
)
from isobit.training.saving.checkpoint import problem_of
from isobit.training.saving.snapshot import State

_Config = TypeVar("_Config", Config, SftConfig)
_Parts = TypeVar("_Parts", bound=RunParts)
_Run = TypeVar("_Run", bound=OpenRun)


@dataclass(frozen=True, eq=False)
class Kind(ABC, Generic[_Config, _Parts, _Run]):
    """A kind of run. `recorded`: the run whose rollouts it learns from, if it samples none."""

    quiet: bool
    recorded: Path | None = None

    @abstractmethod
    def open_parts(
        self, config: _Config, ranks: Ranks, began: Mapping[str, Any], checkpoint: Path | None
    ) -> _Parts:
        """What the run is put together from, its weights from the `checkpoint` where one is given;
        `began`: the facts of the run that goes on, or is repeated. Raises IsobitError for whatever
        does not fit."""

    @abstractmethod
    def put_together(
        self, parts: _Parts, run: RunDirectory, state: State, saved_step: int | None
    ) -> _Run:
        """The run, which goes on from the checkpoint of `saved_step`, or begins."""


def _parts(
    config: _Config,
    kind: Kind[_Config, _Parts, _Run],
    ranks: Ranks,
    began: Mapping[str, Any],
    checkpoint: Path | None,
) -> _Parts:
    """`Kind.open_parts`, after what every kind checks first."""
    ranks.on_first(lambda: len(named_callbacks(config.run.callbacks)))
    return kind.open_parts(config, ranks, began, checkpoint)


def open_new(config: _Config, kind: Kind[_Config, _Parts, _Run], ranks: Ranks) -> _Run:
    """A new run. Raises IsobitError, before anything is written, for what it cannot be made of."""
    folder = Path(config.run.dir)
    ranks.on_first(lambda: runs.refuse_existing(folder))
    config = of_ranks(config, ranks)
    inputs = ranks.on_first(lambda: inputs_of(config)) or {}
    began = {} if kind.recorded is None else runs.began_by(kind.recorded)
    parts = _parts(config, kind, ranks, began, None)

    def create() -> RunDirectory:
        return RunDirectory.create(folder, dump_config(parts.config), kind.recorded)

    run = directory(folder, ranks, create)
    go_on_with(run, Changes({**inputs, **config_of(parts.config)}, ()), ranks)
    return kind.put_together(parts, run, State(), None)


def open_again(
    run_dir: Path,
    config: _Config,
    kind: Kind[_Config, _Parts, _Run],
    lock: runs.Lock | None,
    ranks: Ranks,
) -> _Run:
    """A run that goes on from its newest whole checkpoint, on any number of ranks. One that was
    killed before its first checkpoint begins again."""
    config = of_ranks(config, ranks)
    inputs = ranks.on_first(lambda: {**inputs_of(config), **config_of(config)}) or {}
    lines = ranks.on_first(lambda: check_inputs(run_dir, inputs, config.run.on_change)) or []
    changes, began = Changes(inputs, lines), runs.began_by(kind.recorded or run_dir)
    if not checkpoints.all_checkpoints(run_dir / runs.CHECKPOINTS):
        ranks.on_first(lambda: refuse_lost(run_dir))
        parts = _parts(config, kind, ranks, began, None)
        kept, nothing = dump_config(parts.config), runs.NOTHING_WRITTEN
        run = directory(run_dir, ranks, lambda: RunDirectory(run_dir, nothing, kept, lock))
        go_on_with(run, changes, ranks)
        return kind.put_together(parts, run, State(), None)
    path = runs.newest_checkpoint(run_dir, lambda found: problem_of(found, ranks), ranks)
    parts = _parts(config, kind, ranks, began, path)
    restored = restore(path, run_dir, config, parts.trained, changes, lock)
    opened = kind.put_together(parts, restored.run, restored.state, restored.state.step)
    opened.goes_on_as(restored)
    return opened

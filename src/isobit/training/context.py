"""The context of an open run: what its verbs, its sources of batches and its records share."""

from dataclasses import dataclass

from isobit.data.dataset import Dataset
from isobit.distributed import Ranks
from isobit.evaluation.best import Best
from isobit.monitor.screen import Display
from isobit.run.directory import RunDirectory
from isobit.training.measuring.meter import Meter
from isobit.training.saving.checkpoint import Trained
from isobit.training.saving.saver import Saver
from isobit.training.saving.snapshot import State


@dataclass(frozen=True, eq=False)
class RunContext:
    """The directory of an open run, what training changes (`trained`) and counts (`state`), the
    examples of the training split (`train`), and the objects that time, save and show its steps.
    `best`: the keeper of the best model."""

    run: RunDirectory
    trained: Trained
    train: Dataset
    state: State
    ranks: Ranks
    meter: Meter
    saver: Saver
    best: Best
    display: Display

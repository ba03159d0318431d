"""What the verbs of a run share."""

from dataclasses import dataclass

from isobit.monitor.screen import Display
from isobit.run.directory import RunDirectory
from isobit.training.measuring.meter import Meter
from isobit.training.parts import Parts
from isobit.training.saving.saver import Saver
from isobit.training.saving.snapshot import State


@dataclass(frozen=True, eq=False)
class Context:
    """The parts of a run, its directory, what is counted over steps and within one, the screen, and who saves."""

    parts: Parts
    run: RunDirectory
    state: State
    meter: Meter
    display: Display
    saver: Saver

"""The options of a fleet. Left out: how far it is ahead of the learner (`rollouts_ahead`)."""

from dataclasses import dataclass
from typing import Annotated

from isobit.errors import IsobitError
from isobit.options.declare import above, at_least, at_most


@dataclass(frozen=True)
class FleetSettings:
    """Rollouts by engines in separate processes, by Ray. No bit depends on them, so a resumed run
    may change these keys. With `rollouts_ahead` at least 1 the engines sample while the learner
    learns."""

    engines: Annotated[
        int, at_least(0), at_most(4096), "number of engines; 0: the learner's process samples"
    ] = 0
    cluster: Annotated[
        str | None,
        "auto, or the address of a Ray cluster, such as head:6379; default: start Ray on this "
        "machine",
    ] = None
    cpus_per_engine: Annotated[
        float, above(0), "CPU cores that Ray reserves for an engine, and its number of threads"
    ] = 1.0
    gpus_per_engine: Annotated[
        float | None,
        at_least(0),
        "GPUs that Ray reserves for an engine; default: 1 if the learner has a GPU, else 0",
    ] = None
    deadline_s: Annotated[
        float,
        above(0),
        "seconds in which an engine must answer: at the start, while it samples, and after all "
        "engines have died",
    ] = 300.0

    def __post_init__(self) -> None:
        if self.cluster == "":
            raise IsobitError(
                "fleet.cluster: give auto or an address; leave it out to start Ray here"
            )

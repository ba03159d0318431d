"""The trackers by name: which library each needs, and where its module is."""

import importlib
import importlib.util
from dataclasses import dataclass

from isobit.errors import IsobitError
from isobit.monitor.trackers.base import Tracker


@dataclass(frozen=True)
class Entry:
    """`library`: what is imported; `kind`: the class in `isobit.monitor.trackers.<name>`."""

    library: str
    kind: str


TRACKERS = {
    "tensorboard": Entry("tensorboard", "TensorBoard"),
    "wandb": Entry("wandb", "WeightsAndBiases"),
    "trackio": Entry("trackio", "Trackio"),
    "mlflow": Entry("mlflow", "MLflow"),
}


def make_tracker(name: str) -> Tracker:
    """The tracker of that name, not yet open. Raises IsobitError where its library is not installed."""
    entry = TRACKERS[name]
    if importlib.util.find_spec(entry.library) is None:
        raise IsobitError(f'tracking.trackers: {name} is not installed; pip install "isobit[track]"')
    tracker: Tracker = getattr(importlib.import_module(f"isobit.monitor.trackers.{name}"), entry.kind)()
    return tracker

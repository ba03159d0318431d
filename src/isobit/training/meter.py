"""The times and counts of one step, which gather while it goes on and become part of its metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from isobit.training.statistics import PeakMemory


class Meter:
    """`metrics` of the present step. `phase` is called with the name of whatever is timed, to show it."""

    def __init__(self, phase: Callable[[str], None], device: torch.device) -> None:
        self.metrics: dict[str, float] = {}
        self.peaks = PeakMemory(device)
        self.phase, self._began = phase, 0.0

    def begin(self) -> None:
        """A new step."""
        self.metrics, self._began = {}, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return time.perf_counter() - self._began

    def count(self, name: str, value: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of what follows to `time/NAME`."""
        began = time.perf_counter()
        self.phase(name)
        yield
        self.count(f"time/{name}", time.perf_counter() - began)

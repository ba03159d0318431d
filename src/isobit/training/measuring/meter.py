"""Times, counts and peak memory of one step, which gather while it goes on and become part of its metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch


class PeakMemory:
    """The most memory of a GPU that was allocated during each of a step's phases. On a CPU there is nothing to ask:
    `memory/peak_rss_mib` is the process's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._peaks = device, dict[str, float]()

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Measure a phase; of one that comes several times the largest counts."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        peak = torch.cuda.max_memory_allocated(self._device) / 2**20
        self._peaks[phase] = max(peak, self._peaks.get(phase, 0.0))

    def metrics(self) -> dict[str, float]:
        """`memory/peak_PHASE_mib` of the phases since the last call."""
        found = {f"memory/peak_{phase}_mib": peak for phase, peak in self._peaks.items()}
        self._peaks.clear()
        return found


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
    def timed(self, name: str, peak: bool = False) -> Iterator[None]:
        """Add the seconds of what follows to `time/NAME`; with `peak`, measure the most memory that it takes too."""
        began = time.perf_counter()
        self.phase(name)
        with self.peaks.of(name) if peak else nullcontext():
            yield
        self.count(f"time/{name}", time.perf_counter() - began)

"""Seconds, counts and peak memory of a step's phases, as metrics that each verb returns."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


class Meter:
    """Times phases, into metrics that the caller gives. `phase` is called with the name of each, to
    show it. The most memory of a GPU is measured too; on a CPU there is nothing to ask:
    `memory/peak_rss_mib` is the process's."""

    def __init__(self, phase: Callable[[str], None], device: torch.device) -> None:
        self.phase, self._device = phase, device

    @contextmanager
    def timed(self, into: dict[str, float], name: str, peak: bool = False) -> Iterator[None]:
        """Add the seconds of what follows to `time/NAME`; with `peak`, the most memory that it
        takes is `memory/peak_NAME_mib`, of a phase that comes several times the largest."""
        began = time.perf_counter()
        self.phase(name)
        on_gpu = peak and self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        if on_gpu:
            most = torch.cuda.max_memory_allocated(self._device) / 2**20
            into[f"memory/peak_{name}_mib"] = max(most, into.get(f"memory/peak_{name}_mib", 0.0))
        into[f"time/{name}"] = into.get(f"time/{name}", 0.0) + time.perf_counter() - began


def added(*metrics: Mapping[str, float]) -> dict[str, float]:
    """Add up the metrics of a step's verbs: seconds and counts are summed, of memory the largest
    figure counts; of quantization, which are fractions, and `partial/unfinished` the last."""
    total: dict[str, float] = {}
    for verb in metrics:
        for name, value in verb.items():
            earlier = total.get(name)
            if earlier is None or name.startswith(("quant/", "partial/unfinished")):
                total[name] = value
            else:
                total[name] = max(earlier, value) if name.startswith("memory/") else earlier + value
    return total

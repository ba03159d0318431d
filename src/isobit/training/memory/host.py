"""This machine: the memory that a process may take and that this one has, and the cores that it may use."""

import os
import resource
from pathlib import Path

import torch

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit(device: torch.device) -> tuple[int, str]:
    """(bytes, what they are): of the GPU that the model is on, else of the machine, or its cgroup's if that is less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "GPU memory"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for path in _CGROUPS if (text := _text(Path(path))).isdigit()]
    smallest = min([total, *limits])
    return smallest, "memory of this machine" if smallest == total else "memory of this container"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Of this process: now, or, where there is no /proc (macOS), its peak so far."""
    status = _text(Path("/proc/self/status"))
    if not status:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""

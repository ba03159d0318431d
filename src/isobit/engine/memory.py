"""The memory that a process may take on this machine."""

import os
from pathlib import Path

import torch

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit(device: torch.device) -> tuple[int, str]:
    """Return (bytes, a name for them): the memory of the GPU that the model is on, else of the
    machine, or of its cgroup if that is less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "memory of this GPU"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for path in _CGROUPS if (text := _text(Path(path))).isdigit()]
    smallest = min([total, *limits])
    return smallest, "memory of this machine" if smallest == total else "memory of this container"


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""

"""This machine: the memory that a process may take and that this one has, and the cores that it
may use."""

import os
from pathlib import Path

import torch

from isobit.kernels import Ops
from isobit.plan.cards import Machine

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit(device: torch.device) -> tuple[int, str]:
    """(bytes, what they are): of the GPU that the model is on, else of the machine, or its
    cgroup's if that is less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "memory of this GPU"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for path in _CGROUPS if (text := _text(Path(path))).isdigit()]
    smallest = min([total, *limits])
    return smallest, "memory of this machine" if smallest == total else "memory of this container"


def this_machine(ops: Ops, ranks: int = 1) -> Machine:
    """What each of `ranks` ranks has here: a GPU, or its part of the memory of a CPU."""
    limit, where = memory_limit(ops.device)
    host = ops.device.type == "cpu"
    whose = f"{where}, for each of {ranks} ranks" if host and ranks > 1 else where
    return Machine(whose, limit // ranks if host else limit, host, ops.backend == "native")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""

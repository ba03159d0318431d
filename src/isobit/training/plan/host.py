"""This machine: the memory that a process may take, and the cores that it may use."""

import os

from isobit.engine.memory import memory_limit
from isobit.kernels import Ops
from isobit.training.plan.cards import Machine


def this_machine(ops: Ops, ranks: int = 1) -> Machine:
    """Return the machine as each of `ranks` ranks has it here: a GPU, or an equal part of the
    memory of a CPU."""
    limit, where = memory_limit(ops.device)
    host = ops.device.type == "cpu"
    whose = f"{where}, for each of {ranks} ranks" if host and ranks > 1 else where
    return Machine(whose, limit // ranks if host else limit, host, ops.backend == "native")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

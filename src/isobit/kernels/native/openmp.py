"""Keeps the threads of PyTorch's OpenMP from spinning where PyTorch was loaded before isobit.

GNU's OpenMP reads GOMP_SPINCOUNT when it is loaded; importing isobit sets it, but a script that
imports torch first has the default: after each operator of PyTorch a thread spins for about 10 ms,
on a core that the operators' own threads (`threads.cpp`) and other processes want. Once a process
has more OpenMP threads than cores, they spin a hundred rounds (libgomp's manual, GOMP_SPINCOUNT).
So one region of this many threads is opened, which then sleep. Left out: other OpenMP libraries.
"""

import ctypes
import os
import sys
import threading

__all__ = ["keep_from_spinning"]


def keep_from_spinning() -> bool:
    """Return whether it was done: not where a variable says how threads wait, a user's or isobit's;
    or where PyTorch has not loaded GNU's OpenMP, which is Linux's (LLVM's has its names
    elsewhere)."""
    loaded = ctypes.CDLL(None)
    said = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if said or sys.platform != "linux" or not hasattr(loaded, "GOMP_parallel"):
        return False
    nothing = ctypes.cast(loaded.free, ctypes.c_void_p)  # of no memory: a function that returns
    loaded.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    threads, begun = len(os.sched_getaffinity(0)) + 1, threading.Event()

    def keep_a_team() -> None:  # a team ends with the thread that began it, so this one lives on
        loaded.GOMP_parallel(nothing, None, threads, 0)
        begun.set()
        threading.Event().wait()

    threading.Thread(target=keep_a_team, daemon=True).start()
    begun.wait()
    return True

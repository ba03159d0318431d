"""What a worker process does first: it ties its life to its parent's, and keeps its pipes to
itself. Left out: what it is asked (`tasks/rewards/worker.py`, `tasks/environments/worker.py`)."""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable


def open_pipes() -> tuple[int, int]:
    """Open (request pipe, reply pipe) of this process, whose numbers are its first arguments; the
    third is the lifeline.

    Children of this process do not get them. On Linux the kernel kills the whole process group,
    also inside a function that never returns, when the lifeline loses its other end, that is, when
    the parent dies.
    """
    requests, replies, lifeline = (int(number) for number in sys.argv[1:4])
    for descriptor in (requests, replies, lifeline):
        os.set_inheritable(descriptor, False)
    sys.argv[1:] = []
    _die_with(lifeline)
    os.register_at_fork(after_in_child=_closer(requests, replies))
    return requests, replies


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data`, in as many calls as the descriptor needs."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def end_group() -> None:
    """End this process and what the user's code may have left running."""
    os.killpg(0, signal.SIGKILL)


def _die_with(lifeline: int) -> None:
    """Have the kernel kill this process group when the other end of the lifeline is closed. Linux
    only."""
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _closer(*descriptors: int) -> Callable[[], None]:
    """Return a function that closes the descriptors: a forked child must not hold the pipes open
    after its parent's death."""

    def close() -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    return close

"""What a worker process does first: it ties its life to its parent's, and keeps its pipes to
itself; what it prints goes to stderr, so that nothing that a user's code does to the standard
streams can spoil the messages. `dispatch.py` says what these are. Left out: what it is asked
(`tasks/rewards/worker.py`, `tasks/environments/worker.py`)."""

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 1 << 26
"""The most bytes of a reply."""


class Parent:
    """The pipes to the parent of this process: `requests`, a line each, and its replies.

    Their numbers are the first arguments of this process; the third is the lifeline. Children of
    this process do not get them. On Linux the kernel kills the whole process group, also inside a
    function that never returns, when the lifeline loses its other end, that is, when the parent
    dies.
    """

    def __init__(self) -> None:
        self.requests, self._replies, lifeline = pipes = [int(number) for number in sys.argv[1:4]]
        self._process = os.getpid()
        for descriptor in pipes:
            os.set_inheritable(descriptor, False)
        sys.argv[1:] = []
        _die_with(lifeline)
        os.register_at_fork(after_in_child=self._close)

    def say(self, message: Mapping[str, Any]) -> None:
        """Send the parent a message, as a line of JSON."""
        self.write(json.dumps(message))

    def write(self, line: str) -> None:
        """Send the parent a line that is JSON already."""
        if os.getpid() != self._process:  # a user's function forked and came back from both
            os._exit(0)
        view = memoryview(line.encode() + b"\n")
        while view:
            view = view[os.write(self._replies, view) :]

    def _close(self) -> None:
        """Close the pipes: a forked child must not hold them open after its parent's death."""
        for descriptor in (self.requests, self._replies):
            with contextlib.suppress(OSError):
                os.close(descriptor)


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

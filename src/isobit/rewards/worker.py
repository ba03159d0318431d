"""The process that runs reward functions: `python -m isobit.rewards.worker REQUESTS REPLIES
LIFELINE` (pipe numbers).

One JSON object a line, each way, over two pipes of its own; stdin is empty and everything that a
function prints goes to stderr, so that nothing it does to the standard streams can spoil the
protocol.

    {"load": [reference, ...]}                          -> {"loaded": [{"required": [...], "names": [...]}, ...]}
                                                         or {"error": line}
    {"function": i, "count": n, "arguments": {...}}     -> {"values": [...], "wrong": {index: what}, "unscored": {...}}
                                                         or {"raised": line} or {"malformed": line}

The end of the request pipe ends the process and its whole process group. On Linux the kernel does
that itself, also inside a function that never returns, when the lifeline pipe loses its other end,
that is, when the parent dies.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from isobit.errors import IsobitError
from isobit.rewards.awaiting import LOOP
from isobit.rewards.functions import LoadedFunction, answer, load_function


def main() -> None:
    """Serve requests until their pipe ends."""
    requests, replies, lifeline = (int(number) for number in sys.argv[1:4])
    for descriptor in (requests, replies, lifeline):
        os.set_inheritable(descriptor, False)
    sys.argv[1:] = []
    _die_with(lifeline)
    LOOP.make_current()
    os.register_at_fork(after_in_child=_closer(requests, replies))
    process = os.getpid()
    functions: list[LoadedFunction] = []
    with open(requests, "rb", closefd=False) as lines:
        for line in lines:
            reply = _answer(json.loads(line), functions)
            if os.getpid() != process:  # a function forked and came back from both
                os._exit(0)
            _write(replies, json.dumps(reply).encode() + b"\n")
    os.killpg(0, signal.SIGKILL)  # what the functions may have left running


def _answer(request: dict[str, Any], functions: list[LoadedFunction]) -> dict[str, Any]:
    if "load" in request:
        try:
            functions[:] = [load_function(reference) for reference in request["load"]]
        except IsobitError as error:
            return {"error": str(error)}
        return {"loaded": [{"required": f.required, "names": sorted(f.names)} for f in functions]}
    function = functions[request["function"]]
    return answer(
        function, request["arguments"], request["count"], BaseException
    )  # it may raise also SystemExit


def _die_with(lifeline: int) -> None:
    """Have the kernel kill this process group when the other end of the lifeline is closed. Linux
    only."""
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _closer(*descriptors: int) -> Callable[[], None]:
    """A function that closes the descriptors: a forked child must not hold the pipes open after its
    parent's death."""

    def close() -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    return close


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()

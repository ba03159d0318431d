"""The process that runs reward functions: `python -m isobit.tasks.rewards.worker REQUESTS REPLIES
LIFELINE` (pipe numbers).

One JSON object a line, each way, over two private pipes; stdin is empty and everything that a
function prints goes to stderr, so that nothing it does to the standard streams can spoil the
protocol.

    {"load": [reference, ...]}                          -> {"loaded": [{"required": [...], "names": [...],
                                                             "takes_more": bool}, ...]}
                                                         or {"error": line}
    {"function": i, "count": n, "arguments": {...}}     -> {"values": [...], "wrong": {index: what}, "unscored": {...}}
                                                         or {"raised": line} or {"malformed": line}

The end of the request pipe ends the process and its whole process group.
"""

import json
import os
from typing import Any

from isobit.errors import IsobitError
from isobit.tasks.rewards.awaiting import LOOP
from isobit.tasks.rewards.functions import LoadedFunction, answer, load_function
from isobit.tasks.workers.child import end_group, open_pipes, write


def main() -> None:
    """Serve requests until their pipe ends."""
    requests, replies = open_pipes()
    LOOP.make_current()
    process = os.getpid()
    functions: list[LoadedFunction] = []
    with open(requests, "rb", closefd=False) as lines:
        for line in lines:
            reply = _answer(json.loads(line), functions)
            if os.getpid() != process:  # a function forked and came back from both
                os._exit(0)
            write(replies, json.dumps(reply).encode() + b"\n")
    end_group()


def _answer(request: dict[str, Any], functions: list[LoadedFunction]) -> dict[str, Any]:
    if "load" in request:
        try:
            functions[:] = [load_function(reference) for reference in request["load"]]
        except IsobitError as error:
            return {"error": str(error)}
        return {
            "loaded": [
                {"required": f.required, "names": sorted(f.names), "takes_more": f.takes_more}
                for f in functions
            ]
        }
    function = functions[request["function"]]
    return answer(
        function, request["arguments"], request["count"], BaseException
    )  # it may raise also SystemExit


if __name__ == "__main__":
    main()

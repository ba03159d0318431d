"""The process that runs reward functions: `python -m isobit.tasks.rewards.worker REQUESTS REPLIES
LIFELINE` (pipe numbers). One request at a time, each in the main thread, where no event loop runs.

    {"load": [reference, ...]}                          -> {"loaded": [{"required": [...], "names": [...],
                                                             "takes_more": bool}, ...]}
                                                         or {"error": line}
    {"key": k, "function": i, "count": n, "arguments": {...}}
                                                        -> {"key": k, "values": [...], "wrong": {index: what},
                                                            "unscored": {...}}, or "raised" or "malformed": line

The end of the request pipe ends the process and its whole process group.
"""

import json
from collections.abc import Sequence
from typing import Any

from isobit.errors import IsobitError
from isobit.tasks.rewards.awaiting import LOOP
from isobit.tasks.rewards.functions import LoadedFunction, answer, load_function
from isobit.tasks.workers.child import Parent, end_group


def main() -> None:
    """Serve requests until their pipe ends."""
    parent = Parent()
    LOOP.make_current()
    functions: Sequence[LoadedFunction] = ()
    with open(parent.requests, "rb", closefd=False) as lines:
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            if "load" not in request:
                function, arguments = functions[request["function"]], request["arguments"]
                # it may raise also SystemExit
                reply = answer(function, arguments, request["count"], BaseException)
                parent.say({"key": request["key"], **reply})
                continue
            try:
                functions = [load_function(reference) for reference in request["load"]]
                parent.say({"loaded": [function.signature for function in functions]})
            except IsobitError as error:
                parent.say({"error": str(error)})
    end_group()


if __name__ == "__main__":
    main()

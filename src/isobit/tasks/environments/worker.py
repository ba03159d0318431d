"""The process that runs environments: `python -m isobit.tasks.environments.worker REQUESTS REPLIES
LIFELINE` (pipe numbers).

One event loop serves all episodes for the process's whole life, each question in a separate task,
so that replies come in any order.

    {"load": {...}}                                  -> {"loading": what}, ..., {"loaded": {...}}
    {"key": k, "begin": {"prompt": ..., "columns": {...}}, "kind": name}   -> a reply
    {"key": k, "turn": {...}}                        -> a reply
    {"key": k, "finish": {...}}                      -> a reply
    {"key": k, "end": true}                          -> nothing

`replies.py` says what a reply holds. A question that is late is answered here; if the loop itself
hangs, the parent kills the process. The end of the request pipe ends the process and its whole
process group.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from isobit.data.turns import Reply, Step
from isobit.errors import IsobitError, brief
from isobit.tasks.environments.episode import Episode, Limits, Scorer
from isobit.tasks.environments.home import Late
from isobit.tasks.environments.kinds import Kind, load_kinds
from isobit.tasks.environments.mcp import Server
from isobit.tasks.environments.replies import reply_message, turn_of
from isobit.tasks.environments.settings import McpServer
from isobit.tasks.environments.tools import Tool, by_name, function_tool
from isobit.tasks.rewards.functions import load_function
from isobit.tasks.workers.child import MOST_BYTES, Parent, end_group
from isobit.tasks.workers.loading import last_line

_MOST_BYTES = 1 << 30  # of a request
_ASKS_FOR = "environments"
"""The argument of reward functions that are called here."""


class Worker:
    """The episodes of this process, with the kinds of environments, the reward functions and the
    limits that they use."""

    def __init__(self) -> None:
        self._parent = Parent()
        self._say = self._parent.say
        self._kinds: dict[str | None, Kind] = {}
        self._scorers: list[Scorer] = []
        self._limits = Limits(1, 1.0, "observe")
        self._episodes: dict[int, Episode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer requests until their pipe ends."""
        reader = asyncio.StreamReader(limit=_MOST_BYTES)
        pipe = open(self._parent.requests, "rb", buffering=0)  # noqa: SIM115
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        while line := await reader.readline():
            message = json.loads(line)
            if "load" in message:
                try:
                    self._say({"loaded": await self._load(message["load"])})
                except IsobitError as error:
                    self._say({"error": str(error)})
                except BaseException as error:  # raised by a user's code
                    self._say({"error": f"environment: {last_line(error, '')}"})
                continue
            key = message["key"]
            if "end" in message:
                episode = self._episodes.pop(key, None)
                if episode is not None and key not in self._tasks:
                    episode.release()
                continue
            if "begin" in message:
                kind, several = self._kinds[message["kind"]], message["kind"] is not None
                self._episodes[key] = Episode(key, kind, self._limits, several)
            self._tasks[key] = asyncio.create_task(self._answer(self._episodes[key], message))
        end_group()

    async def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Load tools, servers, factories and reward functions. Return each kind's name, tools and
        reward, and the reward functions that are called here with the columns that they need.
        Raises IsobitError."""
        shared = list[Tool]()
        for reference in request["tools"]:
            self._say({"loading": f"environment.tools {brief(reference, 200)!r}"})
            shared.append(function_tool(reference))
        for server_options in request["mcp"]:
            server = Server(McpServer(**server_options))
            self._say({"loading": server.what})
            shared += await server.tools(request["start_deadline_s"])
        by_name(shared, "environment.tools and environment.mcp")
        self._limits = Limits(request["max_turns"], request["deadline_s"], request["on_error"])
        self._say({"loading": "environment.factory"})
        self._kinds = load_kinds(request["factory"], shared)
        until = asyncio.get_running_loop().time() + request["start_deadline_s"]
        for kind in self._kinds.values():
            try:
                await kind.probe(until)
            except Late:
                limit = f"within {request['start_deadline_s']:g} s"
                raise IsobitError(f"{kind.label}: it was not made {limit}") from None
        called_here = []
        for label, reference in request["rewards"]:
            self._say({"loading": f"reward function {brief(label)}"})
            function = load_function(reference)
            if _ASKS_FOR in function.names:
                self._scorers.append(Scorer(label, function))
                required = [name for name in function.required if name != _ASKS_FOR]
                called_here.append([label, required])
        if called_here and request["factory"] is None:
            raise IsobitError(
                f"reward function {called_here[0][0]}: it asks for {_ASKS_FOR}, and there is no "
                "environment.factory"
            )
        kinds = [
            [kind.name, kind.schemas, kind.reward, kind.answers_turns]
            for kind in self._kinds.values()
        ]
        return {"kinds": kinds, "called_here": called_here}

    async def _answer(self, episode: Episode, message: Mapping[str, Any]) -> None:
        key = episode.key
        try:
            if "begin" in message:
                reply = await episode.begin(**message["begin"])
            elif "turn" in message:
                reply = await episode.turn(turn_of(message["turn"]))
            else:
                reply = await episode.finish(message["finish"], self._scorers)
        except Exception as error:  # an environment's value ends its episode
            text = f"environment: {last_line(error, episode.kind.file)}"
            reply = Reply(key, Step(done=True), problem=text)
        try:
            line = json.dumps(reply_message(reply, episode.lost))
            if len(line) >= MOST_BYTES:
                raise ValueError(f"{len(line):,} bytes, the most are {MOST_BYTES:,}")
        except (TypeError, ValueError, RecursionError) as error:
            text = f"environment: what it returned is no JSON: {error}"
            failed = Reply(key, Step(done=True), problem=text)
            line = json.dumps(reply_message(failed, episode.lost))
        self._tasks.pop(key, None)
        if key in self._episodes:
            self._parent.write(line)
        else:  # the episode was ended meanwhile
            episode.release()


def main() -> None:
    """Serve requests until the pipe of requests ends."""
    worker = Worker()
    try:
        asyncio.run(worker.serve())
    except OSError as error:  # the parent sees that this process ends
        sys.exit(f"a pipe of this process cannot be used any more: {error.strerror}")


if __name__ == "__main__":
    main()

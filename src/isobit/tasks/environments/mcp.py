"""Servers of the Model Context Protocol over stdin and stdout, as tools.

Each worker starts its own server, once, for all its episodes; one that has ended is started again
by the next call. Messages are JSON-RPC 2.0, one a line (specification of 2025-06-18, "Transports",
"Lifecycle" and "Tools"). A line that cannot be read fails the one call that it answers. What a
server writes to stderr goes where the worker's own output goes. Left out: HTTP, resources, prompts,
and requests of a server to its client.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError, brief
from isobit.tasks.environments.settings import McpServer
from isobit.tasks.environments.tools import Tool, schema_of

PROTOCOL = "2025-06-18"
_MOST_BYTES = 1 << 28  # of a message
_MOST_TOOLS = 1024
_END_S = 1.0  # from the end of a server's output to the end of its process
_BEGINNING = 1024  # bytes at each end of a line in which a call's number is looked for
_NUMBER = re.compile(rb'"id"\s*:\s*(\d{1,18})\b')
_NO_METHOD = {"code": -32601, "message": "Method not found"}


_Waiting = dict[int, asyncio.Future[Any]]
"""The calls that a server has not answered, by number."""


class ServerError(Exception):
    """An error that a server answered instead of a result, or the server's end."""


class Server:
    """A server, from its first request to the end of the worker, which kills it."""

    def __init__(self, settings: McpServer) -> None:
        self._settings = settings
        self.what = f"environment.mcp {brief(settings.command, 200)!r}"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: _Waiting = {}
        self._number = 0
        self._starting = asyncio.Lock()

    async def tools(self, deadline_s: float) -> list[Tool]:
        """Start the server, and return the tools that it offers. Raises IsobitError, also if the
        server does not answer within `deadline_s` seconds."""
        try:
            return await asyncio.wait_for(self._tools(), deadline_s)
        except ServerError as error:
            raise IsobitError(f"{self.what}: {error}") from None
        except TimeoutError:
            raise IsobitError(
                f"{self.what}: no answer within {deadline_s:g} s; is it a server over stdio?"
            ) from None

    async def _tools(self) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        while True:
            page = await self._asked("tools/list", {"cursor": cursor} if cursor else {})
            try:
                tools += [self._tool(listing) for listing in page.get("tools", ())]
            except (AttributeError, KeyError, TypeError):
                raise ServerError("its tools/list is not a list of tools with names") from None
            if len(tools) > _MOST_TOOLS:
                raise ServerError(f"it lists more than {_MOST_TOOLS:,} tools")
            cursor = page.get("nextCursor")
            if not cursor:
                return tools

    def _tool(self, listing: Mapping[str, Any]) -> Tool:
        name = listing["name"]
        if not isinstance(name, str):
            raise TypeError

        async def call(**arguments: Any) -> str:
            result = await self._asked("tools/call", {"name": name, "arguments": arguments})
            try:
                text = "\n".join(_text(block) for block in result.get("content", ()))
            except (AttributeError, TypeError):
                raise ServerError("its result has no list of content") from None
            if result.get("isError"):
                raise ServerError(text)
            return text

        parameters = listing.get("inputSchema", {"type": "object", "properties": {}})
        return Tool(
            name, schema_of(name, listing.get("description", ""), parameters), call, remote=True
        )

    async def _asked(self, method: str, params: Mapping[str, Any]) -> Any:
        """Send a request to the server, started again if it has ended; return the result. Raises
        ServerError."""
        async with self._starting:
            ended = self._process is None or self._process.returncode is not None
            if ended or self._reading is None or self._reading.done():
                await self._start()
        return await self._request(method, params)

    async def _start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *shlex.split(self._settings.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **self._settings.environment},
                limit=_MOST_BYTES,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServerError(f"cannot be started: {reason}") from None
        self._waiting = {}
        reading = self._read(self._process, self._waiting)
        self._reading = asyncio.get_running_loop().create_task(reading)
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "isobit", "version": "1"},
        }
        try:
            await self._request("initialize", hello)
        except BaseException:  # half begun it would not answer; the next call starts another
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process = None
            raise
        self._send({"method": "notifications/initialized"})

    async def _request(self, method: str, params: Mapping[str, Any]) -> Any:
        self._number += 1
        number, waiting = self._number, self._waiting
        waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "method": method, "params": params})
            return await waiting[number]
        except asyncio.CancelledError:  # the episode's deadline
            with contextlib.suppress(ServerError):
                self._send({"method": "notifications/cancelled", "params": {"requestId": number}})
            raise
        finally:
            waiting.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.stdin.is_closing():
            raise ServerError("the server has ended")
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process, waiting: _Waiting) -> None:
        """Pass what the server writes to the calls that wait for it, until its output ends or
        cannot be read. Then end the server, and fail the calls that still wait."""
        assert process.stdout is not None
        wrote: str | None = None
        try:
            while line := await process.stdout.readline():
                self._take(line, waiting)
        except ValueError:
            wrote = f"a line of more than {_MOST_BYTES:,} bytes"
        except ServerError:
            pass  # the server is gone
        except Exception as error:
            wrote = f"what cannot be read: {type(error).__name__}"
        status = await _ended(process, 0 if wrote is not None else _END_S)
        ended = f"ended with exit code {status}" if wrote is None else f"wrote {wrote}"
        for future in waiting.values():
            if not future.done():
                future.set_exception(ServerError(f"the server {ended}"))

    def _take(self, line: bytes, waiting: _Waiting) -> None:
        """Read a line of the server: answer its request, or end the call that the line answers. A
        line that is not JSON is the server's printed output, unless it answers a call."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            _unreadable(line, error, waiting)
            return
        if not isinstance(message, dict):
            return
        number = message.get("id")
        if "method" in message:
            if number is not None:
                known = message["method"] == "ping"
                self._send({"id": number, **({"result": {}} if known else {"error": _NO_METHOD})})
            return
        future = waiting.get(number) if isinstance(number, int) else None
        if future is None or future.done():
            return
        if "error" in message:
            refusal = message["error"]
            says = refusal.get("message") if isinstance(refusal, dict) else refusal
            future.set_exception(ServerError(brief(says, 1000)))
        else:
            future.set_result(message.get("result") or {})


def _unreadable(line: bytes, error: Exception, waiting: _Waiting) -> None:
    """Fail the call that an unreadable line answers, by its number, if the line begins like JSON. A
    line nested too deep without a number fails the only call that waits, if just one waits."""
    numbers = map(int, _NUMBER.findall(line[:_BEGINNING] + b" " + line[-_BEGINNING:]))
    answered = [waiting[number] for number in numbers if number in waiting]
    deep = isinstance(error, RecursionError)
    if deep and not answered and len(waiting) == 1:
        answered = [*waiting.values()]
    if answered and not answered[0].done() and line.lstrip()[:1] in (b"{", b"["):
        why = "it is nested too deep" if deep else brief(error)
        answered[0].set_exception(ServerError(f"its answer cannot be read: {why}"))


async def _ended(process: asyncio.subprocess.Process, wait_s: float) -> int:
    """Return the exit code of a server whose output has ended or cannot be read further; kill a
    server that has not ended after `wait_s` seconds.

    Not by `process.kill()`, which reaps a process that has just ended before its status is read.
    """
    try:
        return await asyncio.wait_for(process.wait(), wait_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        return await process.wait()


def _text(block: Mapping[str, Any]) -> str:
    """Return a content block of a tool's result as text; a note for a block that is not text."""
    if block.get("type") == "text":
        return str(block.get("text", ""))
    inner = block.get("resource")
    if isinstance(inner, Mapping) and "text" in inner:
        return str(inner["text"])
    return f"[{block.get('type')} left out]"

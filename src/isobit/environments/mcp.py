"""Servers of the Model Context Protocol over stdin and stdout, as tools.

Each worker starts its own server, once, for all its episodes; one that has ended is started again
by the next call. Messages are JSON-RPC 2.0, one a line (specification of 2025-06-18, "Transports",
"Lifecycle" and "Tools"). What a server writes to stderr goes where the worker's own output goes.
Left out: HTTP, resources, prompts, and what a server asks of its client.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping
from typing import Any

from isobit.environments.settings import McpServer
from isobit.environments.tools import Tool, schema_of
from isobit.errors import IsobitError, brief

PROTOCOL = "2025-06-18"
_MOST_BYTES = 1 << 28  # of a message
_END_S = 1.0  # from the end of its output to its own
_NO_METHOD = {"code": -32601, "message": "Method not found"}


class ServerError(Exception):
    """What a server answered instead of a result, or how it ended."""


class Server:
    """One server, from `start` to the end of the worker, which kills it."""

    def __init__(self, settings: McpServer) -> None:
        self._settings = settings
        self._what = f"environment.mcp {brief(settings.command, 200)!r}"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._starting = asyncio.Lock()

    async def tools(self, deadline_s: float) -> list[Tool]:
        """Start it, and what it offers. Raises IsobitError."""
        try:
            return await asyncio.wait_for(self._tools(), deadline_s)
        except ServerError as error:
            raise IsobitError(f"{self._what}: {error}") from None
        except TimeoutError:
            raise IsobitError(
                f"{self._what}: no answer within {deadline_s:g} s; is it a server over stdio?"
            ) from None

    async def _tools(self) -> list[Tool]:
        found: list[Tool] = []
        cursor: str | None = None
        while True:
            page = await self._asked("tools/list", {"cursor": cursor} if cursor else {})
            found += [self._tool(each) for each in page.get("tools", ())]
            cursor = page.get("nextCursor")
            if not cursor:
                return found

    def _tool(self, given: Mapping[str, Any]) -> Tool:
        name = given["name"]

        async def call(**arguments: Any) -> str:
            result = await self._asked("tools/call", {"name": name, "arguments": arguments})
            text = "\n".join(_text(part) for part in result.get("content", ()))
            if result.get("isError"):
                raise ServerError(text)
            return text

        parameters = given.get("inputSchema", {"type": "object", "properties": {}})
        return Tool(
            name, schema_of(name, given.get("description", ""), parameters), call, remote=True
        )

    async def _asked(self, method: str, params: Mapping[str, Any]) -> Any:
        """The result of a request to a server that runs."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
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
        self._reading = asyncio.get_running_loop().create_task(self._read(self._process))
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "isobit", "version": "1"},
        }
        await self._request("initialize", hello)
        self._send({"method": "notifications/initialized"})

    async def _request(self, method: str, params: Mapping[str, Any]) -> Any:
        self._number += 1
        number = self._number
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "method": method, "params": params})
            return await self._waiting[number]
        except asyncio.CancelledError:  # the episode's deadline
            with contextlib.suppress(ServerError):
                self._send({"method": "notifications/cancelled", "params": {"requestId": number}})
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.stdin.is_closing():
            raise ServerError("the server has ended")
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Give what the server writes to those who wait for it, until it ends."""
        assert process.stdout is not None
        with contextlib.suppress(ValueError, ServerError):  # a line without end; it is gone
            while line := await process.stdout.readline():
                self._take(line)
        status = await _ended(process)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ServerError(f"the server ended with exit code {status}"))

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:  # a server that prints
            return
        if not isinstance(message, dict):
            return
        number = message.get("id")
        if "method" in message:
            if number is not None:
                known = message["method"] == "ping"
                self._send({"id": number, **({"result": {}} if known else {"error": _NO_METHOD})})
            return
        future = self._waiting.get(number) if isinstance(number, int) else None
        if future is None or future.done():
            return
        if "error" in message:
            error = message["error"]
            says = error.get("message") if isinstance(error, dict) else error
            future.set_exception(ServerError(str(says)))
        else:
            future.set_result(message.get("result") or {})


async def _ended(process: asyncio.subprocess.Process) -> int:
    """The exit code of a server that says nothing more; one that goes on is killed.

    Not by `process.kill()`, which reaps a process that has just ended before its status is read.
    """
    try:
        return await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        return await process.wait()


def _text(part: Mapping[str, Any]) -> str:
    """A part of a result as text."""
    if part.get("type") == "text":
        return str(part.get("text", ""))
    inner = part.get("resource")
    if isinstance(inner, Mapping) and "text" in inner:
        return str(inner["text"])
    return f"[{part.get('type')} left out]"

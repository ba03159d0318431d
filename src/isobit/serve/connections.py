"""Connections within bounds, which uvicorn has no options for: how many there are, how long one may
take for a request's first lines, and how long an answer may wait for its reader.

What is one connection too many is answered 503, and closed. Left out: bodies, whose bounds are in
`wire.py`, unless nobody reads them, and what a request costs.
"""

import asyncio
import resource
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import h11_impl

from isobit.serve.requests import Limits

h11 = h11_impl.h11  # uvicorn's own
_REFUSED = 64  # connections that are being told that they are too many
_OWN = 256  # descriptors for files, a GPU, a run's own
_MESSAGE = "too many connections are open; close some, or come again later"


def most_connections(limits: Limits) -> int:
    """As many as the limits say, and as the process may have descriptors, whose number is raised
    where it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _REFUSED + _OWN
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return limits.connections
    return max(1, min(limits.connections, soft - _REFUSED - _OWN))


class Connection(h11_impl.H11Protocol):
    """uvicorn's, of which there are at most so many."""

    def __init__(self, *given: Any, limits: Limits, most: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._limits, self._most = limits, most
        self._head: asyncio.TimerHandle | None = None  # ends it unless what it waits for comes
        self._waits = ""  # for what it waits
        self._reader: asyncio.TimerHandle | None = None  # ends it unless an answer is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """One more."""
        super().connection_made(transport)
        if len(self.connections) > self._most + _REFUSED:
            transport.abort()
            return
        if len(self.connections) > self._most:
            self.app = _too_many
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some of a request, or several."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        for timer in (self._head, self._reader):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        super().pause_writing()  # type: ignore[no-untyped-call]
        if self._reader is None:
            self._reader = self.loop.call_later(self._limits.reader_seconds, self._cut)

    def resume_writing(self) -> None:
        """It has read."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        super().resume_writing()  # type: ignore[no-untyped-call]

    def _watch(self) -> None:
        """Until the first lines of a request are whole their time runs on; and so does that of a
        body that nobody reads, because its request is answered."""
        theirs, answered = self.conn.their_state, self.conn.our_state is h11.DONE
        waits = "head" if theirs is h11.IDLE else ""
        if theirs is h11.SEND_BODY and answered:
            waits = "body"
        if waits == self._waits:
            return
        if self._head is not None:
            self._head.cancel()
        self._waits, self._head = waits, None
        if waits:
            self._head = self.loop.call_later(self._limits.body_seconds, self._cut)

    def _cut(self) -> None:
        self.transport.abort()


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    value = {"message": _MESSAGE, "type": "server_error", "param": None, "code": None}
    headers = {"Retry-After": "1", "Connection": "close"}
    await JSONResponse({"error": value}, 503, headers)(scope, receive, send)

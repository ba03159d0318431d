"""Connections within bounds for which uvicorn has no options: how many there are (`crowd.py`), how
long one may take for a request's first lines, or an answer may wait for its reader.

A connection that is one too many is answered 503, and closed. To close a connection at which bytes
still come resets it, and a reset takes the answer from a client that has not read it yet; so these
bytes are read first and thrown away, within a bound of bytes and of time. A client that has ended
sending, as `nc -N`, looks like one that is gone until something is written to it. Left out: bodies that a
route reads, whose bounds are in `wire.py`, and the cost of a request.
"""

import asyncio
import json
import resource
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import h11_impl

from isobit.serve.crowd import CountedLines, Crowd
from isobit.serve.gateway import Refused
from isobit.serve.requests import BadRequest, Limits
from isobit.serve.wire import CONNECTION, error_value

h11 = h11_impl.h11  # uvicorn's own
REFUSED = 64  # connections that are being answered that they are too many
THROWN_BODIES = 8  # of the longest; as many bytes behind an answer are thrown away
_PROBE_S = 0.5  # between signs of life to a client that has ended sending
_OWN = 256  # descriptors for files, a GPU, and those of a run
_TOO_MANY = Refused(503, "too many connections are open; close some, or come again later")
_INVALID = BadRequest("the request is not valid HTTP")


def most_connections(limits: Limits) -> int:
    """Return how many connections may be open: as many as the limits say, or fewer where the
    process may not have enough descriptors. First the process' bound on descriptors is raised, as
    far as its hard bound allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + REFUSED + _OWN
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return limits.connections
    return max(1, min(limits.connections, soft - REFUSED - _OWN))


class _Logger:
    """uvicorn's log with its warnings, which clients without a token can cause, counted."""

    def __init__(self, logger: Any, lines: CountedLines) -> None:
        self.level, self.log, self.error = logger.level, logger.log, logger.error
        self.warning = lines.add


class _Gentle:
    """A transport of uvicorn's whose `close` is another function."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(h11_impl.H11Protocol):
    """A connection of uvicorn's that is a member of a crowd."""

    def __init__(self, *arguments: Any, limits: Limits, crowd: Crowd, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits, self.crowd = limits, crowd
        self.app_state = {**self.app_state, CONNECTION: self}
        self.logger: Any = _Logger(self.logger, crowd.lines)
        self._head: asyncio.TimerHandle | None = None  # cuts, unless what `_waits` names comes
        self._waits = ""  # what the timer waits for: "head", "rest" or nothing
        self._reader: asyncio.TimerHandle | None = None  # cuts, unless an answer is read
        self._prober: asyncio.TimerHandle | None = None  # of a client that has ended sending
        self._thrown = 0  # bytes that came behind the answer to their request
        self._ending = False  # nothing more is written
        self.of_events = False
        """Whether the response under way is of server-sent events, which routes set."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the new connection, or refuse it where the crowd has no room for it."""
        super().connection_made(transport)
        self._socket, self.transport = transport, _Gentle(transport, self._end)  # type: ignore[assignment]
        if not self.crowd.join(self):
            self.app = _too_many
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read bytes that came: a part of a request, or several requests. Those behind the answer to
        their request, or behind the last one, are thrown away."""
        last = self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED)
        behind = self._ending or last or self._is_answered
        self._thrown += len(data) * behind
        if self._thrown > THROWN_BODIES * self._limits.body_bytes:
            self.cut()
        elif not self._ending and not last:
            super().data_received(data)
            self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer the last request of a client that has ended sending; return False where none is
        whole, and the connection closes."""
        whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        takes_interim = self.conn.their_http_version == b"1.1"
        if self.cycle is None or self.idle or not (whole and takes_interim):
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Write an interim response until the response begins, and a comment while it is of events,
        which may be silent: a client that is gone resets the connection at the first, and the next
        one fails."""
        begins = self.conn.our_state is h11.SEND_RESPONSE
        event: Any = h11.Data(data=b":\n\n")
        if begins:
            event = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
        elif self.conn.our_state is not h11.SEND_BODY or not self.of_events:
            return
        if not self._socket.is_closing():
            self.transport.write(self.conn.send(event))
            self._prober = self.loop.call_later(_PROBE_S, self._probe)

    def on_response_complete(self) -> None:
        """Go on behind a whole answer."""
        self._thrown, self.of_events = 0, False
        super().on_response_complete()
        self._watch()

    def shutdown(self) -> None:
        """End with the server, once an answer that has begun is whole."""
        if self._ending:
            self._socket.close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the crowd, and cancel the timers."""
        self.crowd.leave(self)
        for timer in (self._head, self._reader, self._prober):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the reader's timer: the client reads more slowly than the answer is written."""
        super().pause_writing()  # type: ignore[no-untyped-call]
        if self._reader is None:
            self._reader = self.loop.call_later(self._limits.reader_seconds, self.cut)

    def resume_writing(self) -> None:
        """Stop the reader's timer: the client has read."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        super().resume_writing()  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        """Whether the connection is answering no request."""
        return self.cycle is None or self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in OpenAI's form, and close the connection;
        an answer that has begun is ended instead."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = json.dumps(error_value(_INVALID)[1]).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        if self.cycle is not None:  # of the bad body: nothing of its answer is written behind this
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def cut(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    def _end(self) -> None:
        """Close the connection; where the client may still send, when it has ended that."""
        done = (h11.IDLE, h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        if self.conn.their_state in done and not self.conn.trailing_data[0]:
            self._socket.close()
        elif not self._ending and not self._socket.is_closing():
            self._ending = True
            self._socket.write_eof()
            self._socket.resume_reading()
            self._watch()

    @property
    def _is_answered(self) -> bool:
        """Whether a body comes whose request is answered already."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _unsupported_upgrade_warning(self) -> None:
        self.crowd.lines.add("an upgrade that is not offered")

    def _watch(self) -> None:
        """Start or stop the timer of what the client sends. It runs until the first lines of a
        request are complete, and while bytes are thrown away."""
        waits = "head" if self.conn.their_state is h11.IDLE else ""
        if self._ending or self._is_answered:
            waits = "rest"
        if waits == self._waits:
            return
        if self._head is not None:
            self._head.cancel()
        self._waits, self._head = waits, None
        if waits:
            self._head = self.loop.call_later(self._limits.body_seconds, self.cut)


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"Retry-After": "1", "Connection": "close"}
    status, value = error_value(_TOO_MANY)
    await JSONResponse(value, status, headers)(scope, receive, send)

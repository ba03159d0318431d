"""Sessions of clients: a session's runs and sampling clients are dropped when it ends, or when its
client is not heard any more."""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.errors import brief
from isobit.serve.gateway import Gateway, in_thread
from isobit.serve.requests import BadRequest
from isobit.serve.state.rows import StoredSession
from isobit.serve.tinker.protocol import CreateSession, Named, metadata_of
from isobit.serve.wire import read_request

IDLE_SECONDS = 1800.0
"""The time without a heartbeat after which a session, and all that it holds, is dropped."""
_MOST_SESSIONS, _LONGEST_DISPLAY = 1024, 256  # of a tenant
TESTED = ("0.38.0",)
"""Versions of the official client with which the tests were run (tests/serve/test_tinker.py)."""
_MOST_UNTESTED = 16  # versions of which the log tells
_LOG = logging.getLogger("isobit.serve")


class Session:
    """A client's session. `seen`: when its client was last heard, by the monotonic clock."""

    def __init__(self, name: str, tenant: str) -> None:
        self.name, self.tenant, self.seen = name, tenant, time.monotonic()
        self.ended = False
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Functions that are called when the session ends, and release what it holds."""


class Sessions:
    """The sessions of a server."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions: dict[str, Session] = {}
        self._untested = set[str]()  # versions of clients of which the log has told

    async def create(self, request: Request) -> Response:
        """Begin a session of a client, and answer with its id."""
        keys = await read_request(request, CreateSession, self._gateway.limits)
        self._tell_untested(keys.sdk_version)
        await self._drop_idle()
        tenant = request.state.tenant
        if sum(session.tenant == tenant for session in self._sessions.values()) >= _MOST_SESSIONS:
            raise BadRequest(
                f"{_MOST_SESSIONS:,} sessions of yours are open; finish some", status=429
            )
        name = secrets.token_hex(16)
        display, metadata = keys.display_name, metadata_of(keys.user_metadata)
        row = StoredSession(
            name, tenant, time.time(), metadata, display and display[:_LONGEST_DISPLAY]
        )
        if self._gateway.state is not None:
            await in_thread(self._gateway.state.add_session, row)
        self.begin(name, tenant)
        return JSONResponse({"type": "create_session", "session_id": name})

    def begin(self, name: str, tenant: str) -> Session:
        """Register a session, new or of an earlier server, and return it."""
        self._sessions[name] = Session(name, tenant)
        return self._sessions[name]

    async def heartbeat(self, request: Request) -> Response:
        """Note that a session's client is there, and end the sessions of clients that are gone."""
        keys = await read_request(request, Named, self._gateway.limits)
        self.find(request, keys.session_id).seen = time.monotonic()
        await self._drop_idle()
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """End a client's session. A client asks again where the answer did not reach it, so a
        session that has ended already is not an error."""
        session = self._find(request, request.path_params["name"])
        if session is not None:
            await self.end(session)
        return JSONResponse({"status": "ok"})

    def find(self, request: Request, name: str | None) -> Session:
        """Return the session that a request names. Raises BadRequest (410) for a name that is not
        of an open session of the request's tenant."""
        session = self._find(request, name)
        if session is None:
            raise BadRequest(f"no session {brief(name)}: it has ended", status=410)
        return session

    def _find(self, request: Request, name: str | None) -> Session | None:
        """Return the session of a name; None: the request's tenant has no open one of this name."""
        session = self._sessions.get(name or "")
        return session if session is not None and session.tenant == request.state.tenant else None

    def _tell_untested(self, version: str | None) -> None:
        """Log once for each version that a client is of a version that was not tested."""
        if version is None or version in (*TESTED, *self._untested):
            return
        if len(self._untested) < _MOST_UNTESTED:
            self._untested.add(version)
            _LOG.warning(
                "a client of tinker %s has begun a session; tested is tinker %s",
                brief(repr(version), 40),
                ", ".join(TESTED),
            )

    async def _drop_idle(self) -> None:
        for session in list(self._sessions.values()):
            if time.monotonic() - session.seen > IDLE_SECONDS:
                await self.end(session)

    async def end(self, session: Session) -> None:
        """End a session, and drop what it holds; do nothing where it has ended already."""
        if session.ended:
            return
        del self._sessions[session.name]
        session.ended = True
        for close in list(session.closers):
            await close()
        if self._gateway.state is not None:
            await in_thread(self._gateway.state.end_session, session.name)

"""A client's session: what it has is dropped when it ends, or when it is not heard of any more."""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.errors import brief
from isobit.serve.gateway import Gateway, in_thread
from isobit.serve.requests import BadRequest, Fields
from isobit.serve.state.rows import StoredSession
from isobit.serve.tinker.wire import metadata_of
from isobit.serve.wire import read_fields

IDLE_SECONDS = 1800.0
"""After so long without a heartbeat a session, and what its clients hold, is dropped."""
_MOST_SESSIONS, _LONGEST_DISPLAY = 1024, 256  # of a tenant
TESTED = ("0.38.0",)
"""Versions of the official client with which the tests were run (tests/serve/test_tinker.py)."""
_MOST_UNTESTED = 16  # versions that are told of
_LOG = logging.getLogger("isobit.serve")


class Session:
    """A client's session. `seen`: when it was last heard of, by the monotonic clock."""

    def __init__(self, name: str, tenant: str) -> None:
        self.name, self.tenant, self.seen = name, tenant, time.monotonic()
        self.ended = False
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Called when it ends; they let go of what it has."""


class Sessions:
    """All of a server."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions: dict[str, Session] = {}
        self._untested = set[str]()  # versions of clients, which the log has told of

    async def create(self, request: Request) -> Response:
        """A client begins."""
        fields = await read_fields(request, self._gateway.limits)
        self._tell_untested(fields.text("sdk_version"))
        await self._drop_idle()
        tenant = request.state.tenant
        if sum(each.tenant == tenant for each in self._sessions.values()) >= _MOST_SESSIONS:
            raise BadRequest(
                f"{_MOST_SESSIONS:,} sessions of yours are open; finish some", status=429
            )
        name = secrets.token_hex(16)
        row = _stored(name, tenant, fields)
        if self._gateway.state is not None:
            await in_thread(self._gateway.state.add_session, row)
        self.begin(name, tenant)
        return JSONResponse({"type": "create_session", "session_id": name})

    def begin(self, name: str, tenant: str) -> Session:
        """A session, new or of an earlier server."""
        self._sessions[name] = Session(name, tenant)
        return self._sessions[name]

    async def heartbeat(self, request: Request) -> Response:
        """A client is there. Others may be gone, and what they hold is let go of."""
        fields = await read_fields(request, self._gateway.limits)
        self.find(request, fields.text("session_id")).seen = time.monotonic()
        await self._drop_idle()
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """A client ends. It asks again where the answer did not reach it, and of a session that has
        ended meanwhile all is done: so that is no error."""
        session = self._find(request, request.path_params["name"])
        if session is not None:
            await self.end(session)
        return JSONResponse({"status": "ok"})

    def find(self, request: Request, name: str | None) -> Session:
        """The session that a request names. Raises BadRequest for what is none of its tenant."""
        found = self._find(request, name)
        if found is None:
            raise BadRequest(f"no session {brief(name)}: it has ended", status=410)
        return found

    def _find(self, request: Request, name: str | None) -> Session | None:
        """One of its tenant's, while it goes on."""
        found = self._sessions.get(name or "")
        return found if found is not None and found.tenant == request.state.tenant else None

    def _tell_untested(self, version: str | None) -> None:
        """Say once in the log that a client is of a version that was not tested."""
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
        """What a session has is dropped; nothing happens to one that has ended."""
        if session.ended:
            return
        del self._sessions[session.name]
        session.ended = True
        for close in list(session.closers):
            await close()
        if self._gateway.state is not None:
            await in_thread(self._gateway.state.end_session, session.name)


def _stored(name: str, tenant: str, fields: Fields) -> StoredSession:
    display = fields.text("display_name")
    return StoredSession(
        name, tenant, time.time(), metadata_of(fields), display and display[:_LONGEST_DISPLAY]
    )

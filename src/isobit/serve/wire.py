"""HTTP: bodies within limits, tokens, errors in OpenAI's format, streams that end with their
client."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isobit.errors import IsobitError, RunFailed, brief, did_you_mean
from isobit.serve.desk import LIGHT_BYTES
from isobit.serve.gateway import Gateway, Refused, unless_gone
from isobit.serve.keys import tenant_of
from isobit.serve.requests import BadRequest, Limits, parse_body, read

OPEN_TO_ALL = ("/health",)
CONNECTION = "connection"
"""The name, in a request's state, of the connection at which it came (`connections.py`)."""
DESK = "desk"
"""The name, in a request's state, of the desk at which its text is read."""
_LOG = logging.getLogger("isobit.serve")
_T = TypeVar("_T")
_TWO_LENGTHS = BadRequest("Content-Length and Transfer-Encoding: expected one of them")
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_value(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the (status, body) of an error. A fault of the server's is logged, and not shown."""
    status, param, message = 500, None, "the server failed; its log says why"
    code = None
    if isinstance(error, BadRequest):
        status, param, message, code = error.status, error.param, str(error), error.code
    elif isinstance(error, Refused):
        status, message = error.status, str(error)
    elif isinstance(error, IsobitError):  # a full disk is not the client's
        status, message = 500 if isinstance(error, RunFailed) else 400, str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    else:
        _LOG.error("a request failed", exc_info=error)
    default = "invalid_request_error" if status < 500 else "server_error"
    value = {"message": message, "type": _TYPES.get(status, default), "param": param, "code": code}
    return status, {"error": value}


def error_response(request: Request, error: Exception) -> Response:
    """Return the response to a request that an error ended."""
    status, value = error_value(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if isinstance(error, HTTPException):  # no route takes it
        value["error"]["message"] = _of_routes(request, error)
        headers |= error.headers or {}
    return JSONResponse(value, status, headers)


def _of_routes(request: Request, error: HTTPException) -> str:
    """Return a message that names the nearest path to an unknown one, or the methods that are
    allowed where this method is not."""
    path = request.scope["path"]
    shown = brief(repr(path))  # in one line, whatever it spells
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow")
        return f"{request.method} {shown}: expected {allowed}"
    if error.status_code != 404:
        return error.detail
    known = [getattr(route, "path", "{") for route in request.app.routes]
    known = [p for p in known if "{" not in p and not p.startswith("/api/")]
    return f"there is no {shown}; {did_you_mean(path[:200], known)}"


async def read_request(request: Request, schema: type[_T], limits: Limits) -> _T:
    """Read a request's body, and return the JSON object that it is as its declaration. Raises
    BadRequest as `read_as` and `read`."""
    return await read_as(request, limits, lambda value: read(schema, value, limits))


async def read_as(request: Request, limits: Limits, declared: Callable[[Any], _T]) -> _T:
    """Read a request's body, and return what `declared` makes of its JSON value: where the body is
    long, outside the loop, in its tenant's turn. Raises BadRequest as `read_body` and `declared`, and
    for a body that is encoded (415)."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise BadRequest(
            f"Content-Encoding: {brief(encoding, 80)} is not read here; send JSON as it is",
            status=415,
        )
    body = await read_body(request, limits)
    desk = getattr(request.state, DESK, None)

    def parsed() -> _T:
        return declared(parse_body(body))

    if desk is None or len(body) <= LIGHT_BYTES:
        return parsed()
    keys: _T = await desk.do(request.state.tenant, parsed)
    return keys


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a request's body, and return it. Raises BadRequest; a long body is refused before it is
    read, and a slow one after `limits.body_seconds`."""
    too_long = BadRequest(f"the body is longer than {limits.body_bytes:,} bytes", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limits.body_bytes):
        raise too_long
    chunks, size = list[bytes](), 0

    async def receive() -> None:
        nonlocal size
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.body_bytes:
                raise too_long
            chunks.append(chunk)

    try:
        await asyncio.wait_for(receive(), limits.body_seconds)
    except ClientDisconnect:  # no client reads this answer
        raise BadRequest("the client went away before its body was whole") from None
    except TimeoutError:
        raise BadRequest(
            f"the body took longer than {limits.body_seconds:g} seconds", status=408
        ) from None
    body = b"".join(chunks)
    request.state.body = body  # as it came, for the state, which keeps requests
    return body


class Guard:
    """The middleware in front of all routes: a request without a token is refused, and one that
    comes before the server is ready waits. Paths under `links` need no token: their routes check
    the permission that a link carries."""

    def __init__(self, app: ASGIApp, gateway: Gateway, tokens: tuple[str, ...], links: str) -> None:
        self._app, self._gateway, self._tokens, self._links = app, gateway, tokens, links
        self._held = Counter[str]()  # bytes of bodies, of a tenant's requests that are open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        headers = Headers(scope=scope)
        credential, key = (
            headers.get(name, "").encode("latin-1") for name in ("authorization", "x-api-key")
        )
        tenant = tenant_of(credential, key, self._tokens)
        status, held = 0, 0
        connection = scope.setdefault("state", {}).get(CONNECTION)

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            held += size
            self._held[tenant or ""] += size
            if size and self._held[tenant or ""] > self._gateway.limits.held_bytes:
                raise Refused(
                    429,
                    f"bodies of your open requests have more than "
                    f"{self._gateway.limits.held_bytes:,} bytes; ask again when some are answered",
                )
            return message

        known = tenant is not None or path in OPEN_TO_ALL or path.startswith(self._links)
        try:
            if connection is not None and not await _may_answer(connection, tenant, known):
                connection.cut()
                return
            if "content-length" in headers and "transfer-encoding" in headers:
                response = error_response(Request(scope), _TWO_LENGTHS)
                response.headers["Connection"] = "close"
                await response(scope, receive, watched)
            elif known:
                scope["state"] |= {"tenant": tenant or "", DESK: self._gateway.desk}
                if path not in OPEN_TO_ALL:
                    await self._gateway.ready.wait()
                await self._app(scope, counted, watched)
            else:
                error = Refused(401, "expected the server's token: Authorization: Bearer TOKEN")
                await error_response(Request(scope), error)(scope, receive, watched)
        except Exception:  # a fault, which is answered further out
            status = 500
            raise
        finally:
            self._held[tenant or ""] -= held
            route = getattr(scope.get("route"), "path", "other")
            self._gateway.metrics.requests.labels(route, tenant or "", str(status)).inc()


async def _may_answer(connection: Any, tenant: str | None, known: bool) -> bool:
    """Tell whether a request is to be answered; for one without a token, wait for its turn
    first."""
    crowd = connection.crowd
    if tenant is not None:
        crowd.shows(connection, tenant)
        return True
    wait: float | None = (crowd.open_to_all if known else crowd.refusals).wait()
    if wait:
        await asyncio.sleep(wait)
    return wait is not None


class EventStream(Response):
    """A response of server-sent events. It ends with its last event, or when its client goes away,
    and then closes `stack`."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces, self._stack = pieces, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            if (connection := scope.get("state", {}).get(CONNECTION)) is not None:
                connection.of_events = True
            await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for piece in self._pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

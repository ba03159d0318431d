"""The server: its routes, its start and its end.

SIGTERM, or Ctrl-C, ends it: new requests are refused, open ones have `grace` seconds to end, and
are then answered 503. Left out: TLS, which a proxy in front of the server does.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isobit.engine.engine import Engine
from isobit.errors import IsobitError, RunFailed
from isobit.model.text.tool_formats.table import format_of
from isobit.serve.connections import REFUSED, Connection, most_connections
from isobit.serve.crowd import Crowd
from isobit.serve.desk import SWITCH_SECONDS
from isobit.serve.gateway import Gateway, Refused
from isobit.serve.generating import Generating
from isobit.serve.listening import Listener
from isobit.serve.metrics import CONTENT_TYPE
from isobit.serve.openai import OpenAI
from isobit.serve.requests import Limits
from isobit.serve.responses import Responses
from isobit.serve.state.state import State
from isobit.serve.tinker import Tinker
from isobit.serve.tinker.links import LINKS
from isobit.serve.wire import Guard, error_response

_MOST_HEADER_BYTES = 1 << 16
_SECONDS_TO_START = 60.0
KEEP_ALIVE_SECONDS = 60
"""The time after which an idle connection is closed. Clients close theirs sooner, httpx after 5
seconds: else a request would meet a connection that closes."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server. `grace`: the seconds that open requests have at the end; `folder`: what
    is served, as it was given: a run, or a model's folder."""

    grace: float = 30.0
    folder: Path | None = None
    tool_format: str = "auto"
    limits: Limits = field(default_factory=Limits)


def make_app(gateway: Gateway, tokens: tuple[str, ...]) -> Starlette:
    """Return the application with all routes of a gateway, for clients with one of the tokens;
    without Tinker's where the weights change, since its sampling clients are pinned to theirs."""

    async def health(request: Request) -> Response:
        if gateway.draining or not gateway.device.alive:
            return error_response(request, Refused(503, "the server is ending"))
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(gateway.metrics.text(request.state.tenant), media_type=CONTENT_TYPE)

    openai = OpenAI(gateway)
    routes = [
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *openai.routes(),
        *Responses(openai).routes(),
        *Generating(openai).routes(),
        *(() if gateway.device.weights_change else Tinker(gateway).routes()),
    ]
    handlers: Any = dict.fromkeys((IsobitError, Refused, HTTPException, Exception), error_response)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, gateway=gateway, tokens=tokens, links=LINKS)],
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False  # a wrong path is an error in our words
    return app


class Server(uvicorn.Server):
    """uvicorn's server, which lets open requests end within the grace."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, grace: float) -> None:
        super().__init__(config)
        self._gateway, self._grace = gateway, grace
        self.on_start: Callable[[int], None] = lambda port: None
        """Called with the port once the server listens."""

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and start the gateway. Raises IsobitError where its state cannot go on, and
        RunFailed where the server itself fails; a signal meanwhile ends the server."""
        await super().startup(sockets)
        try:
            await self._gateway.start()
        except (Refused, IsobitError) as error:
            if not self.should_exit:
                self._gateway.device.stop()
                for server in self.servers:
                    server.close()
                if isinstance(error, (Refused, RunFailed)):
                    error = RunFailed(f"the server cannot go on where it ended: {error}")
                raise error from None
        else:
            self.on_start(self.servers[0].sockets[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, which is also so where the device has failed."""
        return await super().on_tick(counter) or self._gateway.device.failure is not None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End after a signal; after a second one end at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if not self._gateway.ready.is_set():  # the next server resumes the state
            self._gateway.draining = True
            self._gateway.device.stop()

    async def shutdown(self, sockets: Any = None) -> None:
        """Let open requests end within the grace, then stop the gateway and the device."""
        self._gateway.draining = True
        ending = asyncio.get_running_loop().call_later(self._grace, self._gateway.stop)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            self._gateway.stop()
            await asyncio.to_thread(self._gateway.device.join, 60.0)


class Background:
    """A server in its own thread, on a socket that listens, for a caller that pumps its device; of
    `options` the grace is for connections alone, since the device is ended first."""

    def __init__(
        self, gateway: Gateway, tokens: tuple[str, ...], options: ServerOptions, listener: Listener
    ) -> None:
        config = server_config(gateway, tokens, options)
        config.timeout_graceful_shutdown = int(options.grace) + 1  # a slow reader is cut off
        self._socket = listener
        self.port = int(listener.getsockname()[1])
        self._server, self._started = Server(config, gateway, options.grace), threading.Event()
        self._server.on_start = lambda port: self._started.set()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until the server listens."""
        self._thread.start()
        self._started.wait(_SECONDS_TO_START)

    def seconds(self) -> float:
        """Return the seconds of the processor that the server's event loop has taken."""
        if self._thread.ident is None or not self._thread.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        """End the server; requests that the device has not answered are cut off."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(_SECONDS_TO_START)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[cast(Any, self._socket)]))


def run(
    engine: Engine,
    name: str,
    adapters: dict[str, Path],
    tokens: tuple[str, ...],
    options: ServerOptions,
    listener: Listener,
    on_start: Callable[[int], None] = lambda port: None,
    state: State | None = None,
) -> None:
    """Serve an engine's model, which serves adapters, on a socket that listens, until a signal ends
    it; with a `state` it also trains them. Raises IsobitError for an adapter that cannot be served,
    RunFailed if the device thread failed."""
    tools = format_of(options.tool_format, engine.model.tokenizer.chat_template)
    gateway = Gateway(engine, name, tools, options.limits, state)
    if options.folder is not None:
        gateway.name_by(options.folder)
    for adapter, folder in adapters.items():
        gateway.device.snapshots.put(adapter, folder)
    config = server_config(gateway, tokens, options)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    server = Server(config, gateway, options.grace)
    server.on_start = on_start
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    server.run(sockets=[cast(Any, listener)])
    if gateway.device.failure is not None:
        raise RunFailed(
            f"the server ended: {gateway.device.failure!r:.500}"
        ) from gateway.device.failure


def server_config(
    gateway: Gateway, tokens: tuple[str, ...], options: ServerOptions
) -> uvicorn.Config:
    """Return uvicorn's configuration for a gateway."""
    limits = gateway.limits
    return uvicorn.Config(
        make_app(gateway, tokens),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=cast(
            Any, partial(Connection, limits=limits, crowd=Crowd(most_connections(limits), REFUSED))
        ),
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(options.grace) + 10,
        server_header=False,
    )

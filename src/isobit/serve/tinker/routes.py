"""Tinker's routes, put together, as its official client asks them: sampling from the base and from
adapters.

Left out, each refused in one line: training (`create_model`, `forward_backward`, `optim_step`,
saved weights).
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isobit.errors import brief
from isobit.serve.gateway import Gateway
from isobit.serve.requests import BadRequest
from isobit.serve.tinker.futures import Futures
from isobit.serve.tinker.sampling import Samplers
from isobit.serve.tinker.sessions import Sessions

PREFIX = "/api/v1"
Handler = Callable[[Request], Awaitable[Response]]


class Tinker:
    """The routes of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions, self._futures = Sessions(gateway), Futures(gateway)
        self._samplers = Samplers(gateway, self._sessions, self._futures)

    def routes(self) -> list[Route]:
        """All of them, and last the one that refuses all others."""
        found: list[tuple[str, str, Handler]] = [
            ("GET", "healthz", _always({"status": "ok"})),
            ("POST", "client/config", _always({})),
            ("POST", "client/dynamic_config", _always({"sample_cancel_enabled": True})),
            ("POST", "telemetry", _always({"status": "accepted"})),
            ("GET", "get_server_capabilities", self.capabilities),
            ("POST", "create_session", self._sessions.create),
            ("POST", "session_heartbeat", self._sessions.heartbeat),
            ("POST", "sessions/{name}/finish", self._sessions.finish),
            ("POST", "create_sampling_session", self._samplers.create),
            ("GET", "samplers/{name}", self._samplers.show),
            ("POST", "asample", self._samplers.sample),
            ("POST", "retrieve_future", self._futures.retrieve),
            ("POST", "cancel_future", self._futures.cancel),
        ]
        routes = [
            Route(f"{PREFIX}/{path}", handler, methods=[method]) for method, path, handler in found
        ]
        return [
            *routes,
            Route(f"{PREFIX}/{{path:path}}", self.refuse, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    async def refuse(self, request: Request) -> Response:
        """What is not offered."""
        path = brief(request.path_params["path"])
        raise BadRequest(
            f"this server does not offer {path} of Tinker's routes: it samples, and does not train"
        )

    async def capabilities(self, request: Request) -> Response:
        """The model, by its name and by its folder, from which clients read the tokenizer."""
        names = dict.fromkeys((str(self._gateway.model.directory), self._gateway.name))
        length = self._gateway.model.config.max_positions
        models = [
            {
                "model_name": name,
                "max_context_length": length,
                "trainable": False,
                "sampleable": True,
            }
            for name in names
        ]
        return JSONResponse({"supported_models": models})


def _always(value: dict[str, Any]) -> Handler:
    async def answer(request: Request) -> Response:
        return JSONResponse(value)

    return answer

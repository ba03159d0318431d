"""Tinker's routes, put together, as its official client calls them: sampling from the base and from
adapters, and training of adapters where the server was begun with a state to keep them in."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from isobit.errors import brief
from isobit.serve.gateway import Gateway
from isobit.serve.requests import BadRequest
from isobit.serve.tinker.archive import Archive
from isobit.serve.tinker.futures import Futures
from isobit.serve.tinker.links import FILES
from isobit.serve.tinker.resume import Resume
from isobit.serve.tinker.runs import Runs
from isobit.serve.tinker.sampling import Samplers
from isobit.serve.tinker.sessions import Sessions
from isobit.serve.tinker.training import Training
from isobit.serve.tinker.wire import PREFIX

TRAINING = (
    "create_model",
    "get_info",
    "unload_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "weights_info",
)
_CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"
KEPT = (
    ("GET", "training_runs", "runs"),
    ("GET", "training_runs/{run}", "run"),
    ("GET", "training_runs/{run}/checkpoints", "checkpoints"),
    ("GET", "checkpoints", "all_checkpoints"),
    ("PUT", f"{_CHECKPOINT}/ttl", "set_ttl"),
    ("GET", f"{_CHECKPOINT}/archive", "download"),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", "urls"),
    ("GET", f"{FILES}/{{checkpoint}}/{{file:path}}", "file"),
    ("DELETE", _CHECKPOINT, "delete"),
    ("GET", "sessions", "sessions"),
    ("GET", "sessions/{name}", "session"),
)
_CHUNK_BYTES = 5_000_000  # the client's own: of data that it sends in one request
Handler = Callable[[Request], Awaitable[Response]]


class Tinker:
    """Tinker's routes of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._routes = list[Route]()
        self._sessions, self._futures = Sessions(gateway), Futures(gateway)
        self._samplers = Samplers(gateway, self._sessions, self._futures)
        self._training: list[tuple[str, Handler]] = [(path, _no_training) for path in TRAINING]
        self._kept: list[tuple[str, str, Handler]] = [(*route[:2], _no_training) for route in KEPT]
        if gateway.state is not None:
            archive = Archive(gateway, gateway.state)
            self._kept = [(*route[:2], getattr(archive, route[2])) for route in KEPT]
            runs = Runs(gateway, self._sessions, self._futures, gateway.state)
            training = Training(gateway, self._sessions, self._samplers, runs, gateway.state)
            handlers = {"get_info": runs.info, "unload_model": runs.unload}
            self._training = [
                (path, handlers.get(path) or getattr(training, path)) for path in TRAINING
            ]
            services = (self._sessions, self._samplers, runs, self._futures)
            gateway.resume = Resume(gateway, gateway.state, *services, dict(self._training)).all

    def routes(self) -> list[Route]:
        """Return all routes, the last of which refuses all other paths."""
        chunk = min(_CHUNK_BYTES, self._gateway.limits.body_bytes // 2)
        paths: list[tuple[str, str, Handler]] = [
            ("GET", "healthz", _always({"status": "ok"})),
            ("POST", "client/config", _always({"fwdbwd_max_chunk_bytes_count": chunk})),
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
            *(("POST", path, handler) for path, handler in self._training),
            *self._kept,
        ]
        self._routes = [
            Route(f"{PREFIX}/{path}", handler, methods=[method]) for method, path, handler in paths
        ]
        return [
            *self._routes,
            Route(f"{PREFIX}/{{path:path}}", self.refuse, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    async def refuse(self, request: Request) -> Response:
        """Refuse a path that is not offered (404), or not by this method (405)."""
        for route in self._routes:
            named = "{" not in route.path  # others take what may be the name of another route
            if named and route.matches(request.scope)[0] is Match.PARTIAL:
                allowed = ", ".join(sorted(route.methods or ()))
                raise HTTPException(405, headers={"Allow": allowed})
        path = brief(request.path_params["path"])
        raise BadRequest(f"this server does not offer {path} of Tinker's routes", status=404)

    async def capabilities(self, request: Request) -> Response:
        """Answer with the model, by its name and by its folder, from which clients read the
        tokenizer."""
        names = dict.fromkeys((self._gateway.folder, self._gateway.name))
        length = self._gateway.model.config.max_positions
        models = [
            {
                "model_name": name,
                "max_context_length": length,
                "trainable": self._gateway.state is not None,
                "sampleable": True,
            }
            for name in names
        ]
        return JSONResponse({"supported_models": models})


def _always(value: dict[str, Any]) -> Handler:
    async def answer(request: Request) -> Response:
        return JSONResponse(value)

    return answer


async def _no_training(request: Request) -> Response:
    raise BadRequest("this server does not train: it was begun without --train")

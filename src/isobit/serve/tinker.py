"""Tinker's routes, as its official client asks them: sampling from the base and from adapters.

A sampling client is pinned to a snapshot: what it samples from never changes under it. A request is
a future that is done once, whoever asks for it again by its sequence number; its result is kept for
a while, and gone after that (410). Messages are those of the `tinker` package, which is the
format's home.

Left out, each refused in one line: training (`create_model`, `forward_backward`, `optim_step`,
saved weights), images, log-probabilities of other tokens than the given ones, and stability
records.
"""

import asyncio
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isobit.engine.prompts import encode_prompt
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError, brief
from isobit.serve.gateway import Gateway, in_thread
from isobit.serve.jobs import Done
from isobit.serve.requests import BadRequest, Fields, sampling_of, token_list
from isobit.serve.snapshots import Snapshot
from isobit.serve.wire import error_value, read_fields

PREFIX = "/api/v1"
IDLE_SECONDS = 1800.0
"""After so long without a heartbeat a session, and what its sampling clients hold, is dropped."""
POLL_SECONDS = 20.0
_MOST_RESULTS, _MOST_RESULT_BYTES, _MOST_SESSIONS, _MOST_SAMPLERS = 4096, 1 << 28, 1024, 256
_PROTOBUF = "application/x-protobuf"
_NOTHING = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}
"""Keys of a sample that are taken where they ask for nothing."""


@dataclass(frozen=True)
class Sampler:
    """A sampling client's session: the model's name as it was given, and what it is pinned to."""

    model: str
    path: str | None
    snapshot: Snapshot


@dataclass
class Session:
    """A client's session. `seen`: when it was last heard of, by the monotonic clock."""

    tenant: str
    seen: float
    samplers: dict[int, tuple[str, Sampler]] = field(default_factory=dict)
    ended: bool = False


class Tinker:
    """The routes of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._snapshots = gateway, gateway.device.snapshots
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, tuple[str, Sampler]] = {}  # by id: whose, and the sampler
        self._futures: OrderedDict[tuple[str, str], asyncio.Task[Response]] = OrderedDict()

    def routes(self) -> list[Route]:
        """All of them, and last the one that refuses all others."""
        found = [
            ("GET", "healthz", self._always({"status": "ok"})),
            ("POST", "client/config", self._always({})),
            ("POST", "client/dynamic_config", self._always({"sample_cancel_enabled": True})),
            ("POST", "telemetry", self._always({"status": "accepted"})),
            ("GET", "get_server_capabilities", self.capabilities),
            ("POST", "create_session", self.create_session),
            ("POST", "session_heartbeat", self.heartbeat),
            ("POST", "sessions/{name}/finish", self.finish),
            ("POST", "create_sampling_session", self.create_sampling_session),
            ("GET", "samplers/{name}", self.sampler),
            ("POST", "asample", self.asample),
            ("POST", "retrieve_future", self.retrieve_future),
            ("POST", "cancel_future", self.cancel_future),
        ]
        routes = [
            Route(f"{PREFIX}/{path}", handler, methods=[method]) for method, path, handler in found
        ]
        return [
            *routes,
            Route(f"{PREFIX}/{{path:path}}", self.refuse, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    def _always(self, value: dict[str, Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return JSONResponse(value)

        return answer

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

    async def create_session(self, request: Request) -> Response:
        """A client begins."""
        await read_fields(request, self._gateway.limits)
        await self._drop_idle()
        if len(self._sessions) >= _MOST_SESSIONS:
            raise BadRequest(f"{_MOST_SESSIONS:,} sessions are open; finish some", status=429)
        name = secrets.token_hex(16)
        self._sessions[name] = Session(request.state.tenant, time.monotonic())
        return JSONResponse({"type": "create_session", "session_id": name})

    async def heartbeat(self, request: Request) -> Response:
        """A client is there."""
        fields = await read_fields(request, self._gateway.limits)
        self._session(request, fields.text("session_id")).seen = time.monotonic()
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """A client ends."""
        name = request.path_params["name"]
        self._session(request, name)
        await self._end(name)
        return JSONResponse({"status": "ok"})

    async def create_sampling_session(self, request: Request) -> Response:
        """A sampling client of a session, pinned to what its model is now. Asked again by the same
        number, it is the same."""
        fields = await read_fields(request, self._gateway.limits)
        session = self._session(request, fields.text("session_id"))
        number = fields.whole("sampling_session_seq_id", 0, 0, 2**62)
        base, path = fields.text("base_model"), fields.text("model_path")
        if number not in session.samplers:
            if len(session.samplers) >= _MOST_SAMPLERS:
                raise BadRequest(f"a session may have {_MOST_SAMPLERS} sampling clients")
            adapter = self._gateway.adapter_of(
                base if path is None else path.removeprefix("tinker://")
            )
            snapshot = await self._gateway.work(
                session.tenant, partial(self._snapshots.hold, adapter)
            )
            if number in session.samplers or session.ended:  # meanwhile
                await self._gateway.work(session.tenant, partial(self._snapshots.release, snapshot))
            else:
                sampler = secrets.token_hex(16), Sampler(base or self._gateway.name, path, snapshot)
                session.samplers[number] = sampler
                self._samplers[sampler[0]] = (session.tenant, sampler[1])
        if session.ended:
            raise BadRequest("the session has ended", status=410)
        name, _ = session.samplers[number]
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request) -> Response:
        """What a sampling client samples from."""
        name = request.path_params["name"]
        found = self._sampler(request, name)
        return JSONResponse(
            {"sampler_id": name, "base_model": found.model, "model_path": found.path}
        )

    async def asample(self, request: Request) -> Response:
        """Begin to sample: the future's name, which the sampling session and the request's number
        make."""
        fields = await read_fields(request, self._gateway.limits)
        name, number = fields.text("sampling_session_id"), fields.whole("seq_id", 0, 0, 2**62)
        found = self._sampler(request, name)
        future = f"{name}:{number}"
        count = fields.whole("num_samples", 1, 1, self._gateway.limits.samples)
        asked = self._asked(fields, count)
        if (request.state.tenant, future) not in self._futures:
            self._gateway.check_room(count)
            task = asyncio.create_task(self._answer(request.state.tenant, found.snapshot, *asked))
            self._futures[request.state.tenant, future] = task
            self._forget_old()
        ids = [f"{future}:{place}" for place in range(count)]
        return JSONResponse({"request_id": future, "sample_sequence_ids": ids})

    async def retrieve_future(self, request: Request) -> Response:
        """The result of a future, an error, or that it is to be asked for again."""
        fields = await read_fields(request, self._gateway.limits)
        name = fields.text("request_id") or ""
        task = self._futures.get((request.state.tenant, name))
        if task is None:
            raise BadRequest(f"no future {brief(name)}: it was forgotten", status=410)
        await asyncio.wait({task}, timeout=POLL_SECONDS)
        if not task.done():
            return JSONResponse(
                {"type": "try_again", "request_id": name, "queue_state": "active"}, 408
            )
        if task.cancelled():
            return JSONResponse({"error": "the request was cancelled", "category": "user"})
        return task.result()

    async def cancel_future(self, request: Request) -> Response:
        """Nobody waits for a future."""
        fields = await read_fields(request, self._gateway.limits)
        task = self._futures.get((request.state.tenant, fields.text("request_id") or ""))
        if task is not None and not task.done():
            task.cancel()
        return JSONResponse({})

    def _asked(self, fields: Fields, count: int) -> tuple[list[int], Sampling, int]:
        """(prompt, how to sample, of how many tokens at the prompt's end log-probabilities are
        asked)."""
        chunks = fields.inner("prompt").take("chunks")
        tokens = list[int]()
        for chunk in chunks if isinstance(chunks, list) else [None]:
            inner = Fields(chunk, "prompt.chunks")
            if inner.take("type") != "encoded_text":
                raise BadRequest(
                    "prompt: only chunks of type encoded_text are offered, which are tokens",
                    "prompt",
                )
            tokens += token_list(inner.take("tokens"), "prompt")
        prompt = encode_prompt(
            "prompt", tokens, self._gateway.tokenizer, self._gateway.model.config.vocab_size
        )
        for key, value in _NOTHING.items():
            if fields.take(key, value) != value:
                raise BadRequest(f"{key}: not offered", key)
        given = fields.take("sampling_params", {})
        if not isinstance(given, dict):
            raise BadRequest("sampling_params: expected an object", "sampling_params")
        stop = given.get("stop")
        if stop == []:
            given = {**given, "stop": None, "ignore_eos": True}
        elif isinstance(stop, list) and all(type(token) is int for token in stop):
            given = {**given, "stop": None, "stop_token_ids": stop}
        params = Fields({**given, "n": count}, "sampling_params")
        sampling = sampling_of(
            params, self._gateway.limits, self._gateway.model.config.max_positions
        )
        params.finish()
        scored = 0
        if fields.flag("prompt_logprobs"):
            scored = fields.whole("prompt_logprobs_last_n", len(prompt), 1, len(prompt))
        for key in ("base_model", "model_path", "type"):
            fields.take(key)
        fields.finish()
        return prompt, sampling, scored

    async def _answer(
        self, tenant: str, snapshot: Snapshot, prompt: list[int], sampling: Sampling, scored: int
    ) -> Response:
        """The response to a future: the answer, or what went wrong, in Tinker's categories."""
        try:
            completions = list[Completion]()
            async with self._gateway.ask(
                tenant, [prompt], sampling, snapshot, streamed=False
            ) as events:
                async for _, event in events:
                    if isinstance(event, Done):
                        completions.append(event.completion)
            score = partial(self._score, prompt, snapshot, scored)
            logprobs = await self._gateway.work(tenant, score) if scored else None
            completions.sort(key=lambda completion: completion.sample_index)
            return Response(await in_thread(encoded, completions, logprobs), media_type=_PROTOBUF)
        except Exception as error:
            status, value = error_value(error)
            category = "user" if status < 500 else "server"
            return JSONResponse({"error": value["error"]["message"], "category": category})

    def _score(self, prompt: list[int], snapshot: Snapshot, scored: int) -> list[float]:
        """On the device thread: log-probabilities of a prompt's last tokens; NaN before them."""
        found = [
            math.nan,
            *self._gateway.model.logprobs([prompt], adapter=snapshot.served)[0].tolist(),
        ]
        return [math.nan] * (len(prompt) - scored) + found[len(prompt) - scored :]

    def _session(self, request: Request, name: str | None) -> Session:
        found = self._sessions.get(name or "")
        if found is None or found.tenant != request.state.tenant:
            raise BadRequest(f"no session {brief(name)}: it has ended", status=410)
        return found

    def _sampler(self, request: Request, name: str | None) -> Sampler:
        tenant, found = self._samplers.get(name or "", (None, None))
        if found is None or tenant != request.state.tenant:
            raise BadRequest(f"no sampling session {brief(name)}: it has ended", status=404)
        return found

    async def _drop_idle(self) -> None:
        for name, session in list(self._sessions.items()):
            if time.monotonic() - session.seen > IDLE_SECONDS:
                await self._end(name)

    async def _end(self, name: str) -> None:
        """Drop a session, and let go of what its sampling clients held."""
        session = self._sessions.pop(name)
        session.ended = True
        for sampler, _ in session.samplers.values():
            del self._samplers[sampler]
        for _, found in session.samplers.values():
            await self._gateway.work(
                session.tenant, partial(self._snapshots.release, found.snapshot)
            )

    def _forget_old(self) -> None:
        """Keep the newest results; what is not done yet stays."""
        done = {
            key: task for key, task in self._futures.items() if task.done() and not task.cancelled()
        }
        size = sum(len(task.result().body) for task in done.values())
        for key, task in done.items():
            if len(self._futures) <= _MOST_RESULTS and size <= _MOST_RESULT_BYTES:
                return
            size -= len(task.result().body)
            del self._futures[key]


def encoded(completions: list[Completion], prompt_logprobs: list[float] | None) -> bytes:
    """A sample's response in Tinker's protobuf. Raises IsobitError where the package is missing."""
    try:
        from tinker.proto import tinker_public_pb2 as messages
    except ModuleNotFoundError:
        raise IsobitError(
            "Tinker's routes need its package: pip install 'isobit[tinker]'"
        ) from None
    found = messages.SampleResponse()
    for completion in completions:
        stopped = completion.finish_reason == "stop"
        found.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if stopped else messages.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        found.prompt_logprobs = np.asarray(prompt_logprobs, np.float32).tobytes()
    return found.SerializeToString()

"""Training runs: each has an adapter of its own over the frozen model, and a line for its requests;
or there is one, of all the weights of the model (`--train full`).

A request to a run is a future, done once: its name is the run's and its number. In its turn it is
a piece of work of its tenant, so the device does one request of a run, and then those of others.
What is wrong with a request fails that one alone, and nothing has changed.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.errors import IsobitError, brief
from isobit.model.adapters.low_rank import factor_shapes
from isobit.model.adapters.targets import NewAdapter, projections, targeted
from isobit.model.hub.config import ModelConfig
from isobit.options.projections import MLP_PROJECTIONS
from isobit.rl.stepwise import StepwiseLearner
from isobit.serve.gateway import Gateway, Refused, in_thread
from isobit.serve.requests import BadRequest, Fields
from isobit.serve.state.rows import Answer, Checkpoint, StoredRun, StoredSampler
from isobit.serve.state.state import State
from isobit.serve.tinker.futures import Futures, answered
from isobit.serve.tinker.lines import Line
from isobit.serve.tinker.sessions import Session, Sessions
from isobit.serve.tinker.wire import number_of
from isobit.serve.wire import read_fields

ALPHA = 32.0
"""Of every adapter, whatever its rank, as Tinker's are: a learning rate then fits all ranks."""
PARTS = ("train_attn", "train_mlp", "train_unembed")
SILENT_SECONDS = 120.0
"""After so long without a word of its client, which sends one every ten seconds, a run of all weights
ends where another one is asked for."""
_COPIES = 4  # of a run's factors: masters, gradients and two moments
UNLOADED = BadRequest("the training run was unloaded", status=410)


@dataclass(eq=False)
class Run:
    """A run. `rank`: None of one that trains the model itself; `learner` is the device thread's
    alone; `factor_bytes`: of its factors in FP32; `waiting_bytes`: of bodies of requests that are
    not done."""

    name: str
    session: Session
    base: str
    rank: int | None
    trained: Mapping[str, bool]
    factor_bytes: int
    line: Line = field(default_factory=lambda: Line(1))
    learner: StepwiseLearner | None = None
    waiting_bytes: int = 0
    steps: int = 0
    kept: "asyncio.Future[None] | None" = None
    """Done when the state has the request that began it."""
    again: int | None = None
    """The number of the request that is done again, while those of an earlier server are."""
    unnamed: deque[str] = field(default_factory=deque)
    """Its sampling clients whose weights have no name, the oldest first."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.session.tenant

    @property
    def trains(self) -> StepwiseLearner:
        """Its learner, on the device thread."""
        if self.learner is None:
            raise UNLOADED
        return self.learner


class Runs:
    """All of a server, and what every request to one of them has in common."""

    def __init__(
        self, gateway: Gateway, sessions: Sessions, futures: Futures, state: State
    ) -> None:
        self._gateway, self._sessions, self._futures = gateway, sessions, futures
        self.state = state
        self._runs: dict[str, Run] = {}

    async def create(
        self,
        request: Request,
        session: Session,
        number: int,
        stored: Callable[[str], StoredRun],
        make: Callable[[str], StepwiseLearner],
        answer: Callable[[str], Mapping[str, Any]],
    ) -> str:
        """The future of a new run: the `number` that it has in its session, and the first request
        to it. The run is kept as it begins."""
        name = f"{session.name}:train:{number}"
        future = f"{name}:0"
        if self._futures.knows(session.tenant, future):
            if name in self._runs and (kept := self._runs[name].kept) is not None:
                await asyncio.wait({kept})
            return future
        if name in self._runs:
            raise BadRequest(f"the training run {name} is there already", status=410)
        described = stored(name)
        if described.rank is None:
            await self._end_silent()
        run = self.opened(session, described)
        kept = asyncio.ensure_future(in_thread(self._keep_first, described, *as_it_came(request)))
        run.kept = kept

        def first() -> Response:
            learner, response = make(name), JSONResponse(answer(name))
            save = partial(learner.save, optimizer=True)
            weights = self._gateway.device.snapshots.present
            self.state.keep_present(name, 0, save, answer_of(response), weights)
            run.learner = learner
            return response

        async def work() -> Response:
            try:
                await kept
                whole = self._gateway.whole
                response: Response = await self._gateway.work(run.tenant, first, alone=whole)
                if session.ended:
                    raise UNLOADED
            except BaseException as error:
                await self._drop(run)
                if not (isinstance(error, Refused) and error.status == 503):
                    await in_thread(self.state.end_run, name)
                raise
            return response

        self._futures.begin(session.tenant, future, work())
        await asyncio.wait({kept})
        return future

    def _keep_first(self, described: StoredRun, kind: str, body: bytes) -> None:
        self.state.add_run(described)
        self.state.accept(described.id, 0, kind, body)

    def opened(self, session: Session, described: StoredRun) -> Run:
        """A run of a session, whose learner is to come. Raises BadRequest where there is no
        room."""
        size = self._room_for(session.tenant, described.rank, described.targets)
        rank, targets = described.rank, described.targets
        run = Run(described.id, session, described.base, rank, targets, size)
        self._runs[run.name] = run
        session.closers.append(partial(self._unload, run))
        return run

    async def ask(
        self, request: Request, kind: str, work: Callable[[Run, int, Fields], Awaitable[Response]]
    ) -> Response:
        """A request in JSON, which is done with its run and its number: the future's name."""
        fields = await read_fields(request, self._gateway.limits)
        if fields.text("type", kind) != kind:
            raise BadRequest(f"type: expected {kind}", "type")
        run = self.find(request, fields.text("model_id"))
        number = number_of(fields)
        return await self.begin(request, run, number, lambda: work(run, number, fields))

    async def begin(
        self, request: Request, run: Run, number: int, work: Callable[[], Awaitable[Response]]
    ) -> Response:
        """A request to a run: it is kept, and done in its turn, once. While requests of an earlier
        server are done again, their turn is now."""
        if run.again is not None:
            return await work() if number == run.again else JSONResponse({})
        limits = self._gateway.limits
        future = f"{run.name}:{number}"
        kind, body = as_it_came(request)
        size = len(body)
        if not self._futures.knows(run.tenant, future):
            if number < run.line.next:
                raise BadRequest(
                    f"request {number} of this run was done, and its result is forgotten", "", 410
                )
            if number > run.line.next + limits.run_requests or (
                number != run.line.next and run.waiting_bytes + size > limits.run_bytes
            ):
                raise Refused(429, "too many requests to this run are waiting; ask again later")
            self._gateway.check_room(run.tenant, 0)
            await in_thread(self.state.accept, run.name, number, kind, body)
        if not self._futures.knows(run.tenant, future):  # nor came again meanwhile
            run.waiting_bytes += size

            async def in_turn() -> Response:
                try:
                    async with run.line.turn(number):
                        return await work()
                finally:
                    run.waiting_bytes -= size

            async def kept() -> Response:
                response = await answered(in_turn())
                await in_thread(self.state.answer, run.name, number, answer_of(response))
                return response

            self._futures.begin(run.tenant, future, kept())
        return JSONResponse({"request_id": future, "model_id": run.name})

    def find(self, request: Request, name: str | None) -> Run:
        """The run that a request names; its session is heard of. Raises BadRequest for what is none
        of its tenant."""
        found = self._runs.get(name or "")
        if found is None or found.tenant != request.state.tenant or found.learner is None:
            raise BadRequest(f"no training run {brief(name)}: it was unloaded", status=404)
        found.session.seen = time.monotonic()
        return found

    async def work(self, run: Run, function: Callable[[], Any]) -> Any:
        """What the device thread makes of a function, for a run."""
        return await self._gateway.work(run.tenant, function)

    async def change(
        self,
        run: Run,
        number: int,
        function: Callable[[], Mapping[str, Any]],
        *,
        always: bool,
        loaded: Checkpoint | None = None,
    ) -> Response:
        """What the device thread makes of a function that leaves a run without gradients, with
        weights that are new, or those of a checkpoint that it has `loaded`. The run is kept after
        it: `always`, or as often as the state asks."""
        model, snapshots = self._gateway.model, self._gateway.device.snapshots

        def changed() -> Response:
            before = model.weights_version
            response = JSONResponse(function())
            if model.weights_version != before:
                new = f"{run.name}:{number}"
                snapshots.present = new if loaded is None else loaded.weights
            run.steps += 1
            if always or run.steps % self.state.every == 0:
                save = partial(run.trains.save, optimizer=True)
                kept = answer_of(response)
                self.state.keep_present(run.name, number, save, kept, snapshots.present)
            return response

        found: Response = await self._gateway.work(run.tenant, changed, alone=self._gateway.whole)
        return found

    async def info(self, request: Request) -> Response:
        """What a run trains."""
        fields = await read_fields(request, self._gateway.limits)
        run = self.find(request, fields.text("model_id"))
        config, folder = self._gateway.model.config, self._gateway.folder
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": run.name,
                "model_name": run.base,
                "model_data": {
                    "arch": config.family,
                    "model_name": run.base,
                    "tokenizer_id": folder,
                },
                "is_lora": run.rank is not None,
                "lora_rank": run.rank,
            }
        )

    def count_unnamed(self, sampler: StoredSampler) -> None:
        """A sampling client is there again, perhaps one of a run's weights without a name."""
        if sampler.snapshot is None or sampler.path is not None:
            return
        if self._gateway.whole:
            name = sampler.snapshot.rpartition(":")[0]
        else:
            kept = self.state.by_id(sampler.snapshot)
            name = kept.run if kept is not None and kept.kind == "snapshot" else ""
        if name in self._runs and sampler.id not in self._runs[name].unnamed:
            self._runs[name].unnamed.append(sampler.id)

    async def unload(self, request: Request) -> Response:
        """A run ends: what it has not saved is dropped, and requests that wait fail."""
        fields = await read_fields(request, self._gateway.limits)
        run = self.find(request, fields.text("model_id"))
        future = f"{run.name}:unload"

        async def work() -> Response:
            await self._unload(run)
            return JSONResponse({"type": "unload_model", "model_id": run.name})

        if not self._futures.knows(run.tenant, future):
            self._futures.begin(run.tenant, future, work())
        return JSONResponse({"request_id": future, "model_id": run.name})

    async def _end_silent(self) -> None:
        """Make room for a run of all weights: the client of the present one may have gone away
        without a word."""
        for run in list(self._runs.values()):
            if time.monotonic() - run.session.seen > SILENT_SECONDS:
                await self._sessions.end(run.session)

    async def _unload(self, run: Run) -> None:
        if self._runs.get(run.name) is run:
            await self._drop(run)
            await in_thread(self.state.end_run, run.name)

    async def _drop(self, run: Run) -> None:
        """Let go of a run's memory."""
        self._runs.pop(run.name, None)
        run.line.end(UNLOADED)

        def forget() -> None:
            run.learner = None

        await self._gateway.work(run.tenant, forget)

    def _room_for(self, tenant: str, rank: int | None, trained: Mapping[str, bool]) -> int:
        """Bytes of the factors of one more run. Raises BadRequest where there is no room for it."""
        limits = self._gateway.limits
        if rank is None:
            if self._runs:
                raise BadRequest(
                    "a run trains all weights of the model, and there is room for one; unload it "
                    f"first, or wait until its client was silent for {SILENT_SECONDS:g} seconds"
                )
            return 0
        if sum(run.tenant == tenant for run in self._runs.values()) >= limits.runs:
            raise BadRequest(
                f"{limits.runs} training runs of yours are open, which is the most; unload one",
                status=429,
            )
        config = self._gateway.model.config
        shapes = factor_shapes(targeted(config, targets_of(config, trained)), rank)
        size = 4 * sum(map(math.prod, shapes.values()))
        held = sum(run.factor_bytes for run in self._runs.values())
        if _COPIES * (held + size) > limits.adapter_bytes:
            raise BadRequest(
                f"an adapter of rank {rank:,} trains in {_COPIES * size:,} bytes, and all that "
                f"train may have {limits.adapter_bytes:,}, of which {_COPIES * held:,} are taken; "
                "choose a lower rank, or unload a run"
            )
        return size


def as_it_came(request: Request) -> tuple[str, bytes]:
    """A request's kind, and its body; of a packed one the encoding stands behind the kind."""
    kind = request.url.path.rpartition("/")[2]
    encoding = request.headers.get("content-encoding", "")
    return f"{kind}:{encoding}" if encoding else kind, request.state.body


def answer_of(response: Response) -> Answer:
    """What is kept of a response."""
    return Answer(response.status_code, response.media_type or "", bytes(response.body))


def new_adapter_of(
    config: ModelConfig, rank: int, seed: int, trained: Mapping[str, bool]
) -> NewAdapter:
    """A new run's adapter. Raises IsobitError as `targets_of`."""
    return NewAdapter(rank, ALPHA, targets_of(config, trained), seed)


def targets_of(config: ModelConfig, trained: Mapping[str, bool]) -> list[str]:
    """The names of the matrices that a run trains. Raises IsobitError for none."""
    names = dict.fromkeys(one.name.rpartition(".")[2] for one in projections(config))
    found = [
        name for name in names if trained["train_mlp" if name in MLP_PROJECTIONS else "train_attn"]
    ]
    if not found:
        raise IsobitError(
            "lora_config: an adapter of the unembedding alone is not offered; set train_attn or "
            "train_mlp"
        )
    return found

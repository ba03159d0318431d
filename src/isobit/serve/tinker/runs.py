"""Training runs: each has its adapter over the frozen model, and a line for its requests; or there
is a single run, of all the weights of the model (`--train full`).

A request to a run is a future, done once: its name is the run's and its number. In its turn it is a
piece of work of its tenant, so the device does one request of a run, and then those of others. A
request that fails changes nothing, and others do not fail with it. A request that was done is
answered so, also where the disk does not take the run's new state: its requests are on the disk,
and the next server does them again. A request waits on the disk alone, and is read from there in
turn.
"""

import asyncio
import logging
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.errors import IsobitError, brief
from isobit.model.adapters.low_rank import factor_shapes
from isobit.model.adapters.targets import NewAdapter, projections, targeted
from isobit.model.hub.config import ModelConfig
from isobit.options.projections import MLP_PROJECTIONS
from isobit.rl.stepwise import StepwiseLearner
from isobit.serve.gateway import Gateway, Refused, in_thread
from isobit.serve.requests import BadRequest, parse_body, read
from isobit.serve.state.rows import Checkpoint, StoredRun, StoredSampler
from isobit.serve.state.state import State
from isobit.serve.tinker.arrived import answer_of, as_it_came, digest_of, taken_before
from isobit.serve.tinker.futures import Futures, answered
from isobit.serve.tinker.lines import Line
from isobit.serve.tinker.protocol import Named, OfRun, RunHead
from isobit.serve.tinker.room import Waiting, training_bytes
from isobit.serve.tinker.sessions import Session, Sessions
from isobit.serve.wire import read_request

ALPHA = 32.0
"""The alpha of every adapter, of any rank, as in Tinker: a learning rate then fits all ranks."""
PARTS = ("train_attn", "train_mlp", "train_unembed")
SILENT_SECONDS = 120.0
"""The time without a word of its client, which sends one every ten seconds, after which a run of
all weights ends where another one is asked for."""
_COPIES = 4  # of a run's factors: masters, gradients and two moments
_MOST_FIELD_BYTES = 1 << 20  # of a request to a run in JSON
_RUN_NAME = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,19}")
UNLOADED = BadRequest("the training run was unloaded", status=410)
_LOG = logging.getLogger("isobit.serve")
_Schema = TypeVar("_Schema")
_OfRun = TypeVar("_OfRun", bound=OfRun)
Work = Callable[[bytes], Awaitable[Response]]
"""The function of a request to a run that is called in its turn, with its body as it came."""


@dataclass(eq=False)
class Run:
    """A training run. `rank`: None where it trains the model itself; `learner`: used by the device
    thread alone; `factor_bytes`: of its factors in FP32; `unkept`: its last state is not kept."""

    name: str
    session: Session
    base: str
    rank: int | None
    trained: Mapping[str, bool]
    factor_bytes: int
    line: Line = field(default_factory=lambda: Line(1))
    learner: StepwiseLearner | None = None
    steps: int = 0
    unkept: bool = False
    saving: "asyncio.Future[None] | None" = None
    """Done when the state has the request that began the run."""
    close: Callable[[], Awaitable[None]] | None = None
    """Ends the run with its session."""
    unnamed: deque[str] = field(default_factory=deque)
    """The ids of its sampling clients whose weights have no name, the oldest first."""

    @property
    def tenant(self) -> str:
        """The tenant of the run's session."""
        return self.session.tenant

    @property
    def trains(self) -> StepwiseLearner:
        """The run's learner, for the device thread. Raises BadRequest (410) if it was unloaded."""
        if self.learner is None:
            raise UNLOADED
        return self.learner


class Runs:
    """The training runs of a server, with the steps that all requests to runs have in common."""

    def __init__(
        self, gateway: Gateway, sessions: Sessions, futures: Futures, state: State
    ) -> None:
        self._gateway, self._sessions, self._futures = gateway, sessions, futures
        self.state = state
        self._runs: dict[str, Run] = {}
        self._lost: dict[str, tuple[str, str]] = {}  # by name: its tenant, and why it cannot go on
        self._waiting = Waiting(gateway.limits)
        self._training_bytes = training_bytes(gateway.limits, gateway.model, state.tenants)
        gateway.device.snapshots.tenants = state.tenants

    async def create(
        self,
        request: Request,
        session: Session,
        row: StoredRun,
        make: Callable[[], StepwiseLearner],
        answer: Mapping[str, Any],
    ) -> Response:
        """Begin a new run; return a response with the name of its future, which is the first
        request to the run. The state keeps the run as it begins."""
        name, (kind, body) = row.id, as_it_came(request)
        future = f"{name}:0"
        response = JSONResponse({"request_id": future})
        digest = digest_of(kind)
        if self._futures.knows(session.tenant, future, digest):
            if name in self._runs and (saving := self._runs[name].saving) is not None:
                await asyncio.wait({saving})
            return response
        if name in self._runs:
            raise BadRequest(f"the training run {name} is there already", status=410)
        if row.rank is None:
            await self._end_silent()
        run = self.opened(session, row, again=taken_before(request) is not None)
        saving = asyncio.ensure_future(in_thread(self._keep_first, row, kind, body))
        run.saving = saving

        def first() -> Response:
            learner, response = make(), JSONResponse({**answer, "model_id": name})
            save = partial(learner.save, optimizer=True)
            weights = self._gateway.device.snapshots.present
            self.state.keep_present(name, 0, save, answer_of(response), weights)
            run.learner = learner
            return response

        async def work() -> Response:
            try:
                await saving
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

        self._futures.begin(session.tenant, future, work(), digest=digest)
        await asyncio.wait({saving})
        return response

    def _keep_first(self, row: StoredRun, kind: str, body: bytes) -> None:
        self.state.add_run(row)
        self.state.accept(row.id, 0, kind, body, always=True)

    def opened(self, session: Session, described: StoredRun, *, again: bool = False) -> Run:
        """Add a run to a session, and return it, without its learner. Raises BadRequest for lack
        of room, except for one that goes on `again`, which had room before."""
        rank, targets = described.rank, described.targets
        size = self._room_for(session.tenant, rank, targets, again)
        run = Run(described.id, session, described.base, rank, targets, size)
        self._runs[run.name] = run
        run.close = partial(self._unload, run)
        session.closers.append(run.close)
        return run

    async def lose(self, tenant: str, name: str, why: str) -> None:
        """Drop a run of an earlier server that cannot go on; requests to it are answered `why`."""
        self._lost[name] = tenant, why
        if name in self._runs:
            await self._drop(self._runs[name])

    async def ask(
        self,
        request: Request,
        kind: str,
        schema: type[_OfRun],
        work: Callable[[Run, _OfRun], Awaitable[Response]],
    ) -> Response:
        """Begin a request in JSON, for which `work` is called with its run and its keys in its
        turn; return a response with the future's name."""
        head = await self.read(request, RunHead)
        if head.type not in (None, kind):
            raise BadRequest(f"type: expected {kind}", "type")
        run = self.find(request, head.model_id)

        async def parsed(body: bytes) -> Response:
            return await work(run, read(schema, parse_body(body), self._gateway.limits))

        return await self.begin(request, run, head.seq_id, parsed)

    async def read(self, request: Request, schema: type[_Schema]) -> _Schema:
        """Read the JSON of a request to a run, which is short. Raises BadRequest."""
        most = min(self._gateway.limits.body_bytes, _MOST_FIELD_BYTES)
        return await read_request(request, schema, replace(self._gateway.limits, body_bytes=most))

    async def begin(
        self, request: Request, run: Run, number: int, work: Work, size: int | None = None
    ) -> Response:
        """Keep a request to a run, and do it once, in its turn; return a response with the future's
        name. `size`: its bytes, unpacked. One that an earlier server has done is done again now."""
        kind, body = as_it_came(request)
        taken = taken_before(request)
        if taken is not None and taken.done:
            return await work(body)
        future, digest = f"{run.name}:{number}", digest_of(kind)
        size = len(body) if size is None else size
        if not self._futures.knows(run.tenant, future, digest) and taken is None:
            work = await self._accepted(run, number, kind, body, work, size)
        if not self._futures.knows(run.tenant, future, digest):  # nor came again meanwhile
            answer = self._answer(run, number, work, size)
            self._futures.begin(run.tenant, future, answer, digest=digest)
        return JSONResponse({"request_id": future, "model_id": run.name})

    async def _accepted(
        self, run: Run, number: int, kind: str, body: bytes, work: Work, size: int
    ) -> Work:
        """Write a request to the disk, and return the function to call in its turn. The request
        whose turn is now is never asked to come again, since later ones wait for it: where it has
        no room, its answer is an error. Raises BadRequest and Refused."""
        limits, line = self._gateway.limits, run.line
        if number < line.next:
            raise BadRequest(_too_late(run, number), "", 410)
        if number > line.next + limits.run_requests:
            raise Refused(429, "too many requests to this run are waiting; ask again later")
        if number != line.next:
            self._waiting.check(run.tenant, size)
        self._gateway.check_room(run.tenant, 0)
        small = kind.partition(":")[0] != "forward_backward"
        always = small and number == line.next
        try:
            with self._waiting.of(run.tenant, size):
                accept = partial(self.state.accept, run.name, number, kind, body, always=always)
                await in_thread(accept)
        except BadRequest as error:
            if error.status != 429 or number != line.next:
                raise
            refused = error
            await in_thread(partial(self.state.accept, run.name, number, kind, b"", always=True))

            async def refuse(_: bytes) -> Response:
                raise refused

            return refuse
        return work

    async def _answer(self, run: Run, number: int, work: Work, size: int) -> Response:
        """Answer a request to a run: do it in its turn, with the body that is on the disk."""

        async def in_turn() -> Response:
            async with run.line.turn(number):
                stored = await in_thread(self.state.request, run.name, number)
                if stored is None:
                    raise UNLOADED
                return await work(stored.body)

        with self._waiting.of(run.tenant, size):
            response = await answered(in_turn())
        await in_thread(self.state.answer, run.name, number, answer_of(response))
        return response

    async def refuse(self, run: Run, number: int, kind: str, error: BadRequest) -> None:
        """Answer a request of an earlier server, in its turn, with an error that this server found
        in it before."""

        async def refused(_: bytes) -> Response:
            raise error

        future = f"{run.name}:{number}"
        answer = self._answer(run, number, refused, 0)
        self._futures.begin(run.tenant, future, answer, digest=digest_of(kind))

    def find(self, request: Request, name: str | None) -> Run:
        """Return the run that a request names, and note that its session's client was heard. Raises
        BadRequest (404) for a name that is not of a run of the request's tenant."""
        run = self._runs.get(name or "")
        if run is None or run.tenant != request.state.tenant or run.learner is None:
            whose, why = self._lost.get(name or "", ("", ""))
            why = why if whose == request.state.tenant else "it was unloaded"
            raise BadRequest(f"no training run {brief(name)}: {why}", status=404)
        run.session.seen = time.monotonic()
        return run

    async def work(self, run: Run, function: Callable[[], Any]) -> Any:
        """Return the result of a function, which the device thread calls, for a run."""
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
        """Return the response of a function, called by the device thread, that leaves a run without
        gradients, with new weights or those of a checkpoint that it has `loaded`. The run is kept
        after it: `always`, or as often as the state asks, or where its requests have many bytes."""
        model, snapshots = self._gateway.model, self._gateway.device.snapshots

        def changed() -> Response:
            version = model.weights_version
            response = JSONResponse(function())
            if model.weights_version != version:
                new = f"{run.name}:{number}"
                snapshots.present = new if loaded is None else loaded.weights
            run.steps += 1
            if loaded is not None:
                self.state.pin(run.name, loaded.id)
            often = always or run.unkept or run.steps % self.state.every == 0
            if often or self.state.is_heavy(run.name):
                self._keep(run, number, response)
            return response

        result: Response = await self._gateway.work(run.tenant, changed, alone=self._gateway.whole)
        return result

    def _keep(self, run: Run, number: int, response: Response) -> None:
        """Keep the state of a run after a request, which has changed the run even if the disk takes
        no more. Then the run's requests stay on the disk, and its next step tries again."""
        save, present = (
            partial(run.trains.save, optimizer=True),
            self._gateway.device.snapshots.present,
        )
        run.unkept = True
        try:
            self.state.keep_present(run.name, number, save, answer_of(response), present)
            run.unkept = False
        except Exception as error:
            _LOG.warning(
                "training run %s is not kept as it is after request %d, and will be at its next "
                "step: %s",
                *(run.name, number, error),
            )

    async def info(self, request: Request) -> Response:
        """Answer with the description of a run: its model, and the rank of its adapter."""
        keys = await read_request(request, Named, self._gateway.limits)
        run = self.find(request, keys.model_id)
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
        """Add a restored sampling client to its run's unnamed ones, if its weights have no name."""
        if sampler.snapshot is None or sampler.path is not None:
            return
        if self._gateway.whole:
            name = sampler.snapshot.rpartition(":")[0]
        else:
            saved = self.state.by_id(sampler.snapshot)
            name = saved.run if saved is not None and saved.kind == "snapshot" else ""
        if name in self._runs and sampler.id not in self._runs[name].unnamed:
            self._runs[name].unnamed.append(sampler.id)

    async def unload(self, request: Request) -> Response:
        """End a run: its unsaved weights are dropped, and requests that wait fail. A second request
        for it, where the answer did not reach the client, is answered so too, without an error."""
        name, tenant = (await self.read(request, Named)).model_id or "", request.state.tenant
        if not _RUN_NAME.fullmatch(name):
            raise BadRequest(f"no training run {brief(name)}", status=404)
        future = f"{name}:unload"

        async def work() -> Response:
            if (run := self._runs.get(name)) is not None and run.tenant == tenant:
                await self._unload(run)
            return JSONResponse({"type": "unload_model", "model_id": name})

        if not self._futures.knows(tenant, future):
            self._futures.begin(tenant, future, work())
        return JSONResponse({"request_id": future, "model_id": name})

    async def _end_silent(self) -> None:
        """End sessions of silent clients to make room for a run of all weights: the client of the
        present run may have gone away without a word."""
        for run in list(self._runs.values()):
            if time.monotonic() - run.session.seen > SILENT_SECONDS:
                await self._sessions.end(run.session)

    async def _unload(self, run: Run) -> None:
        if self._runs.get(run.name) is run:
            await self._drop(run)
            await in_thread(self.state.end_run, run.name)

    async def _drop(self, run: Run) -> None:
        """Remove a run, end its line, and free its memory."""
        self._runs.pop(run.name, None)
        if run.close in run.session.closers:
            run.session.closers.remove(run.close)
        run.line.end(UNLOADED)

        def forget() -> None:
            run.learner = None

        await self._gateway.work(run.tenant, forget)

    def _room_for(
        self, tenant: str, rank: int | None, trained: Mapping[str, bool], again: bool
    ) -> int:
        """Return the bytes of the factors of one more run, in FP32. Raises BadRequest where it does
        not fit, except for one of an adapter that had room before (`again`)."""
        limits = self._gateway.limits
        if rank is None:
            if self._runs:
                raise BadRequest(
                    "a run trains all weights of the model, and there is room for one; unload it "
                    f"first, or wait until its client was silent for {SILENT_SECONDS:g} seconds"
                )
            return 0
        open_runs = [run for run in self._runs.values() if run.tenant == tenant]
        if len(open_runs) >= limits.runs and not again:
            raise BadRequest(
                f"{limits.runs} training runs of yours are open, which is the most; unload one",
                status=429,
            )
        config = self._gateway.model.config
        shapes = factor_shapes(targeted(config, targets_of(config, trained)), rank)
        size = 4 * sum(map(math.prod, shapes.values()))
        held = sum(run.factor_bytes for run in open_runs)
        if _COPIES * (held + size) > self._training_bytes and not again:
            raise BadRequest(
                f"an adapter of rank {rank:,} trains in {_COPIES * size:,} bytes, and yours may have "
                f"{self._training_bytes:,} of the memory, of which {_COPIES * held:,} are taken; "
                "choose a lower rank, or unload a run of yours"
            )
        return size


def _too_late(run: Run, number: int) -> str:
    if run.line.was_skipped(number):
        return (
            f"request {number} of this run came too late, and was not done: later ones had waited"
        )
    return f"request {number} of this run was done, and its result is forgotten"


def new_adapter_of(
    config: ModelConfig, rank: int, seed: int, trained: Mapping[str, bool]
) -> NewAdapter:
    """Return the description of a new run's adapter. Raises IsobitError as `targets_of`."""
    return NewAdapter(rank, ALPHA, targets_of(config, trained), seed)


def targets_of(config: ModelConfig, trained: Mapping[str, bool]) -> list[str]:
    """Return the names of the matrices that a run trains. Raises IsobitError for no matrices."""
    names = dict.fromkeys(projection.name.rpartition(".")[2] for projection in projections(config))
    targets = [
        name for name in names if trained["train_mlp" if name in MLP_PROJECTIONS else "train_attn"]
    ]
    if not targets:
        raise IsobitError(
            "lora_config: an adapter of the unembedding alone is not offered; set train_attn or "
            "train_mlp"
        )
    return targets

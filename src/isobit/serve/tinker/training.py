"""The requests to a training run: gradients, steps, and weights that are saved, loaded and sampled
from.

A server trains adapters, or all the weights of its model (`Gateway.whole`). Left out, each refused
in one line: optimizers other than AdamW, sampling clients whose weights change under them, and
weights of other accounts.
"""

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.errors import IsobitError, RunFailed
from isobit.model.adapters.targets import NewAdapter
from isobit.rl.stepwise import Parts, StepwiseLearner
from isobit.serve.gateway import Gateway, in_thread
from isobit.serve.requests import BadRequest
from isobit.serve.snapshots import Snapshot
from isobit.serve.state.rows import Checkpoint, Kind, StoredRun, StoredSampler
from isobit.serve.state.state import State
from isobit.serve.tinker.arrived import answer_of
from isobit.serve.tinker.protocol import (
    CreateModel,
    LoadWeights,
    Named,
    NewRun,
    OptimStep,
    Save,
    SaveToSample,
    SaveToTrain,
    metadata_of,
)
from isobit.serve.tinker.runs import PARTS, Run, Runs, new_adapter_of
from isobit.serve.tinker.sampling import Sampler, Samplers
from isobit.serve.tinker.sessions import Session, Sessions
from isobit.serve.tinker.wire import (
    PROTOBUF,
    Batch,
    plain,
    read_batch,
    read_head,
    read_message,
    write_outputs,
)
from isobit.serve.wire import read_body, read_request

_MOST_UNNAMED = 16
"""The most sampling clients of a run whose weights have no name: the newest are kept."""
_SAVES: Mapping[Kind, str] = {
    "training": "save_weights",
    "sampler": "save_weights_for_sampler",
    "external": "save_weights_external",
}


class Training:
    """The routes of a gateway that trains, for requests to runs."""

    def __init__(
        self, gateway: Gateway, sessions: Sessions, samplers: Samplers, runs: Runs, state: State
    ) -> None:
        self._gateway, self._sessions, self._samplers = gateway, sessions, samplers
        self._runs, self._state = runs, state

    async def create_model(self, request: Request) -> Response:
        """Begin a run with a new adapter, or one of all weights as they were read; answer with its
        future."""
        keys = await self._runs.read(request, CreateModel)
        session = self._sessions.find(request, keys.session_id)
        whole, lora = self._gateway.whole, keys.lora_config
        rank, seed = self._rank_of(lora.rank), lora.seed
        if seed is None:
            chosen = hashlib.sha256(f"{session.name}:{keys.model_seq_id}".encode()).digest()
            seed = int.from_bytes(chosen[:7], "big")
        trained = {name: getattr(lora, name) for name in PARTS}
        if not whole:
            trained["train_unembed"] = False  # which no adapter trains, even if it is asked for
        elif not all(trained.values()):
            raise BadRequest("lora_config: all weights are trained here, none left out")
        adapter = (
            None
            if rank is None
            else new_adapter_of(self._gateway.model.config, rank, seed, trained)
        )
        row, make = self._row(session, keys, rank, seed, trained), partial(self._learner, adapter)
        return await self._runs.create(request, session, row, make, {"type": "create_model"})

    async def load_weights(self, request: Request) -> Response:
        """Load saved weights into a run, or begin a new run with them; answer with the future."""
        keys = await self._runs.read(request, LoadWeights)
        path, optimizer = keys.path, keys.optimizer
        if keys.session_id is not None:
            return await self._create_from(request, keys)
        run = self._runs.find(request, keys.model_id)
        if (number := keys.seq_id) is None:
            raise BadRequest("seq_id: required, but not given", "seq_id")

        async def work(_: bytes) -> Response:
            checkpoint, folder = await self._saved(run.tenant, path, optimizer)

            def load() -> Mapping[str, Any]:
                with _called(folder, path):
                    run.trains.load(folder, optimizer=optimizer)
                return {"type": "load_weights", "path": path, "model_id": run.name}

            return await self._runs.change(run, number, load, always=True, loaded=checkpoint)

        return await self._runs.begin(request, run, number, work)

    async def forward_backward(self, request: Request) -> Response:
        """Compute the gradients of a loss, which add up until a step, or the loss alone; answer
        with the future."""
        limits = self._gateway.limits
        body = await read_body(request, limits)
        encoding = request.headers.get("content-encoding", "identity")
        tenant = request.state.tenant
        head = await self._gateway.desk.do(tenant, read_head, body, encoding, limits.body_bytes)
        run = self._runs.find(request, head.run)
        request.state.digest = head.digest

        def read(packed: bytes) -> Batch:
            return read_batch(read_message(plain(packed, encoding, limits.body_bytes)))

        async def work(packed: bytes) -> Response:
            batch = await in_thread(read, packed)

            def compute() -> Parts[bytes]:
                arguments, learner = (batch.data, batch.loss, batch.options), run.trains
                if batch.forward_only:
                    return write_outputs((yield from learner.forward_in_parts(*arguments)))
                return write_outputs((yield from learner.forward_backward_in_parts(*arguments)))

            return Response(await self._runs.work(run, compute), media_type=PROTOBUF)

        return await self._runs.begin(request, run, head.number, work, head.bytes)

    async def optim_step(self, request: Request) -> Response:
        """Take one optimizer step by the gradients so far; answer with the future."""
        return await self._runs.ask(request, "optim_step", OptimStep, self._optim_step)

    async def _optim_step(self, run: Run, keys: OptimStep) -> Response:
        def step() -> Mapping[str, Any]:
            metrics = run.trains.optim_step(keys.adam_params)
            return {"type": "optim_step", "metrics": dict(metrics)}

        return await self._runs.change(run, keys.seq_id, step, always=False)

    async def save_weights(self, request: Request) -> Response:
        """Save a checkpoint to train from, with the optimizer's state; answer with the future."""
        save = partial(self._save, "training")
        return await self._runs.ask(request, "save_weights", SaveToTrain, save)

    async def save_weights_for_sampler(self, request: Request) -> Response:
        """Save a checkpoint to sample from, or, where a sampling client is asked for, begin one of
        the present weights; answer with the future."""

        async def save(run: Run, keys: SaveToSample) -> Response:
            if keys.sampling_session_seq_id is None:
                return await self._save("sampler", run, keys)
            return await self._unnamed(run, keys.seq_id, keys.sampling_session_seq_id)

        return await self._runs.ask(request, "save_weights_for_sampler", SaveToSample, save)

    async def save_weights_external(self, request: Request) -> Response:
        """Save a checkpoint to take away: the files that PEFT loads, each behind its own link;
        answer with the future."""
        save = partial(self._save, "external")
        return await self._runs.ask(request, "save_weights_external", Save, save)

    async def _unnamed(self, run: Run, asked: int, number: int) -> Response:
        """Return the response to request `asked`: a new sampling client of a run's present weights,
        which are kept as long as the client is; the run's oldest such clients are dropped."""
        snapshots = self._gateway.device.snapshots
        while len(run.unnamed) >= _MOST_UNNAMED:
            await self._samplers.drop(
                run.session,
                run.unnamed.popleft(),
                f"it was of weights without a name, and {_MOST_UNNAMED} newer ones of its run were "
                "made; save weights by a name to keep them",
            )
        self._samplers.check_room(run.session)
        name = secrets.token_hex(16)
        kind = "save_weights_for_sampler"
        response = JSONResponse({"type": kind, "sampling_session_id": name})
        if self._gateway.whole:  # no copy is made: the weights are there until the next step
            snapshot = Snapshot(None, 0, 1, weights=snapshots.present)
            made = Sampler(run.tenant, run.base, None, snapshot)
            name = await self._samplers.add(run.session, number, made)
            if name not in run.unnamed:
                run.unnamed.append(name)
            return JSONResponse({"type": kind, "sampling_session_id": name})

        def keep() -> Snapshot:
            def row(checkpoint: Checkpoint) -> StoredSampler:
                whose = (name, run.tenant, run.session.name, number, run.base)
                return StoredSampler(*whose, snapshot=checkpoint.id)

            checkpoint = self._state.save(
                run.name,
                "snapshot",
                f"sampler-{number}",
                partial(run.trains.save, optimizer=False),
                overwrite=True,
                answer=lambda _: (asked, answer_of(response)),
                sampler=row,
            )
            try:
                return snapshots.open(checkpoint.id, run.trains.adapter, run.tenant)
            except IsobitError:  # where there is no room for it, nothing of it is kept
                self._state.drop_sampler(name)
                raise

        snapshot = await self._runs.work(run, keep)
        made = Sampler(run.tenant, run.base, None, snapshot)
        run.unnamed.append(await self._samplers.add(run.session, number, made, name))
        return response

    async def weights_info(self, request: Request) -> Response:
        """Answer with the model, the rank and the trained parts of a checkpoint."""
        path = (await read_request(request, Named, self._gateway.limits)).tinker_path or ""
        checkpoint = await in_thread(self._state.checkpoint, request.state.tenant, path)
        run = await in_thread(self._state.run, checkpoint.run)
        assert run is not None
        return JSONResponse(
            {
                "base_model": run.base,
                "is_lora": run.rank is not None,
                "lora_rank": run.rank,
                **run.targets,
            }
        )

    async def _create_from(self, request: Request, keys: LoadWeights) -> Response:
        session = self._sessions.find(request, keys.session_id)
        path, optimizer = keys.path, keys.optimizer
        checkpoint, folder = await self._saved(session.tenant, path, optimizer)
        old = await in_thread(self._state.run, checkpoint.run)
        assert old is not None
        whole, of_whole = self._gateway.whole, old.rank is None
        if whole != of_whole:
            weights, train = ("all weights", "full") if of_whole else ("an adapter", "adapters")
            raise BadRequest(f"{path}: it is of {weights}; serve the model with --train {train}")

        def make() -> StepwiseLearner:
            with _called(folder, path):
                learner = StepwiseLearner(self._gateway.model) if whole else self._learner(folder)
                if optimizer or whole:
                    learner.load(folder, optimizer=optimizer)
            if whole:
                self._gateway.device.snapshots.present = checkpoint.weights
            return learner

        row = self._row(session, keys, old.rank, old.seed, old.targets)
        answer = {"type": "load_weights", "path": path}
        return await self._runs.create(request, session, row, make, answer)

    def _rank_of(self, rank: int) -> int | None:
        """Return the rank of a new run's adapter; None: all weights are trained, which rank 0, or
        no `lora_config` at all, asks for. Raises BadRequest for a run that this server does not
        train."""
        if self._gateway.whole and rank:
            raise BadRequest(
                "lora_config: all weights of the model are trained here, and no adapters; ask for "
                "rank 0",
                "lora_config",
            )
        if not self._gateway.whole and not rank:
            raise BadRequest(
                "lora_config: only adapters are trained here, of rank 1 or more; all weights are "
                "trained by a server that was begun with --train full",
                "lora_config",
            )
        return rank or None

    def _learner(self, adapter: NewAdapter | Path | None) -> StepwiseLearner:
        """Return a new run's learner, of an adapter, or, for None, of all weights as they were
        read. Called on the device thread."""
        model, snapshots = self._gateway.model, self._gateway.device.snapshots
        if adapter is not None:
            return StepwiseLearner(model.adapted(adapter))
        learner = StepwiseLearner(model)
        if snapshots.present:
            assert model.directory is not None
            learner.load(model.directory, optimizer=False)
            snapshots.present = ""
        return learner

    def _row(
        self,
        session: Session,
        keys: NewRun,
        rank: int | None,
        seed: int,
        trained: Mapping[str, bool],
    ) -> StoredRun:
        """Return the row of a new run. Raises BadRequest for a run of another model than ours."""
        base, number, now = keys.base_model or self._gateway.name, keys.model_seq_id, time.time()
        if self._gateway.adapter_of(base) is not None:
            raise BadRequest(f"base_model: {base} is an adapter; train the model", "base_model")
        return StoredRun(
            *(f"{session.name}:train:{number}", session.tenant, session.name, number),
            *(base, rank, seed, trained),
            created=now,
            requested=now,
            metadata=metadata_of(keys.user_metadata),
        )

    async def _save(self, kind: Kind, run: Run, keys: Save) -> Response:
        optimizer, route = kind == "training", _SAVES[kind]
        name, metadata = keys.path or f"request-{keys.seq_id}", metadata_of(keys.user_metadata)

        def shown(saved: Checkpoint) -> Response:
            size = {"size_bytes": saved.bytes} if kind == "external" else {}
            return JSONResponse({"type": route, "path": saved.path, **size})

        def save() -> Response:
            saved = self._state.save(
                run.name,
                kind,
                name,
                partial(run.trains.save, optimizer=optimizer),
                optimizer=optimizer,
                ttl=keys.ttl_seconds,
                overwrite=not isinstance(keys, SaveToTrain) or keys.overwrite,
                metadata=metadata,
                weights=self._gateway.device.snapshots.present,
                answer=lambda saved: (keys.seq_id, answer_of(shown(saved))),
            )
            return shown(saved)

        response: Response = await self._runs.work(run, save)
        return response

    async def _saved(self, tenant: str, path: str, optimizer: bool) -> tuple[Checkpoint, Path]:
        """Return (a tenant's checkpoint, its folder). Raises BadRequest, also for a checkpoint
        without the optimizer's state where that is asked for."""
        checkpoint = await in_thread(self._state.loadable, tenant, path)
        if optimizer and not checkpoint.optimizer:
            raise BadRequest(
                f"{path}: it was saved for sampling, without the optimizer's state", "optimizer"
            )
        return checkpoint, await in_thread(self._state.folder_of, checkpoint)


@contextmanager
def _called(folder: Path, path: str) -> Iterator[None]:
    """Replace a folder in the messages of errors with the path by which its tenant names it; raise
    them as BadRequest, except RunFailed."""
    try:
        yield
    except RunFailed:
        raise
    except IsobitError as error:
        raise BadRequest(str(error).replace(str(folder), path)) from None

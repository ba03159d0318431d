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
from dataclasses import fields as names_of
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.errors import IsobitError, RunFailed
from isobit.model.adapters.targets import NewAdapter
from isobit.rl.stepwise import Adam, Parts, StepwiseLearner
from isobit.serve.gateway import Gateway, in_thread
from isobit.serve.requests import BadRequest, Fields
from isobit.serve.snapshots import Snapshot
from isobit.serve.state.rows import Checkpoint, Kind, StoredRun, StoredSampler
from isobit.serve.state.state import State
from isobit.serve.tinker.arrived import answer_of
from isobit.serve.tinker.runs import PARTS, Run, Runs, new_adapter_of
from isobit.serve.tinker.sampling import Sampler, Samplers
from isobit.serve.tinker.sessions import Session, Sessions
from isobit.serve.tinker.wire import (
    PROTOBUF,
    Batch,
    metadata_of,
    number_of,
    plain,
    read_batch,
    read_head,
    read_message,
    ttl_of,
    write_outputs,
)
from isobit.serve.wire import read_body, read_fields

_MOST_UNNAMED = 16
"""The most sampling clients of a run whose weights have no name: the newest are kept."""
_HIGHEST_RANK = 1 << 16
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
        fields = await self._runs.read(request)
        session = self._sessions.find(request, fields.text("session_id"))
        number = number_of(fields, "model_seq_id", 0)
        base = self._base_of(fields)
        self._check_optimizer(fields, "optimizer_config")
        whole, lora = self._gateway.whole, fields.inner("lora_config")
        rank = self._rank_of(lora)
        chosen = int.from_bytes(
            hashlib.sha256(f"{session.name}:{number}".encode()).digest()[:7], "big"
        )
        seed = lora.whole("seed", chosen, -(2**63), 2**63 - 1)
        trained = {part: lora.flag(part, True) for part in PARTS}
        lora.finish()
        metadata = metadata_of(fields)
        fields.take("type")
        fields.finish()
        if not whole:
            trained["train_unembed"] = False  # which no adapter trains, even if it is asked for
        elif not all(trained.values()):
            raise BadRequest("lora_config: all weights are trained here, none left out")
        given = (
            None
            if rank is None
            else new_adapter_of(self._gateway.model.config, rank, seed, trained)
        )

        def stored(name: str) -> StoredRun:
            return self._stored(session, number, name, base, rank, seed, trained, metadata)

        future = await self._runs.create(
            request,
            session,
            number,
            stored,
            lambda _: self._learner(given),
            lambda name: {"type": "create_model", "model_id": name},
        )
        return JSONResponse({"request_id": future})

    async def load_weights(self, request: Request) -> Response:
        """Load saved weights into a run, or begin a new run with them; answer with the future."""
        fields = await self._runs.read(request)
        path, optimizer = fields.text("path") or "", fields.flag("optimizer")
        if fields.text("weights_access_token") is not None:
            raise BadRequest("weights_access_token: weights of other accounts are not offered")
        self._check_optimizer(fields, "optimizer_config")
        if fields.text("session_id") is not None:
            return await self._create_from(request, fields, path, optimizer)
        run = self._runs.find(request, fields.text("model_id"))
        number = number_of(fields)

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
                given, learner = (batch.data, batch.loss, batch.options), run.trains
                if batch.forward_only:
                    return write_outputs((yield from learner.forward_in_parts(*given)))
                return write_outputs((yield from learner.forward_backward_in_parts(*given)))

            return Response(await self._runs.work(run, compute), media_type=PROTOBUF)

        return await self._runs.begin(request, run, head.number, work, head.bytes)

    async def optim_step(self, request: Request) -> Response:
        """Take one optimizer step by the gradients so far; answer with the future."""
        return await self._runs.ask(request, "optim_step", self._optim_step)

    async def _optim_step(self, run: Run, number: int, fields: Fields) -> Response:
        if fields.take("optimizer_params") is not None:
            raise BadRequest("optimizer_params: only AdamW is offered", "optimizer_params")
        adam = _adam_of(fields.inner("adam_params"))
        fields.finish()

        def step() -> Mapping[str, Any]:
            return {"type": "optim_step", "metrics": dict(run.trains.optim_step(adam))}

        return await self._runs.change(run, number, step, always=False)

    async def save_weights(self, request: Request) -> Response:
        """Save a checkpoint to train from, with the optimizer's state; answer with the future."""
        return await self._runs.ask(request, "save_weights", self._save_weights)

    async def _save_weights(self, run: Run, number: int, fields: Fields) -> Response:
        return await self._save(run, number, fields, "training", fields.flag("overwrite"))

    async def save_weights_for_sampler(self, request: Request) -> Response:
        """Save a checkpoint to sample from, or, where a sampling client is asked for, begin one of
        the present weights; answer with the future."""
        return await self._runs.ask(
            request, "save_weights_for_sampler", self._save_weights_for_sampler
        )

    async def save_weights_external(self, request: Request) -> Response:
        """Save a checkpoint to take away: the files that PEFT loads, each behind its own link;
        answer with the future."""
        return await self._runs.ask(request, "save_weights_external", self._save_weights_external)

    async def _save_weights_external(self, run: Run, number: int, fields: Fields) -> Response:
        if fields.take("age_encryption_recipients"):
            raise BadRequest(
                "age_encryption_recipients: encrypted files are not offered; leave it out, or take "
                "the checkpoint's archive",
                "age_encryption_recipients",
            )
        return await self._save(run, number, fields, "external", True)

    async def _save_weights_for_sampler(self, run: Run, asked: int, fields: Fields) -> Response:
        if fields.text("kind", "snapshot") != "snapshot":
            raise BadRequest("kind: only snapshot is offered, whose weights never change", "kind")
        if fields.take("sampling_session_seq_id") is None:
            return await self._save(run, asked, fields, "sampler", True)
        number = number_of(fields, "sampling_session_seq_id", 0)
        for key in ("ttl_seconds", "user_metadata"):
            fields.take(key)
        fields.finish()
        return await self._unnamed(run, asked, number)

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
            def row(kept: Checkpoint) -> StoredSampler:
                whose = (name, run.tenant, run.session.name, number, run.base)
                return StoredSampler(*whose, snapshot=kept.id)

            kept = self._state.save(
                run.name,
                "snapshot",
                f"sampler-{number}",
                partial(run.trains.save, optimizer=False),
                overwrite=True,
                answer=lambda _: (asked, answer_of(response)),
                sampler=row,
            )
            try:
                return snapshots.open(kept.id, run.trains.adapter, run.tenant)
            except IsobitError:  # where there is no room for it, nothing of it is kept
                self._state.drop_sampler(name)
                raise

        snapshot = await self._runs.work(run, keep)
        made = Sampler(run.tenant, run.base, None, snapshot)
        run.unnamed.append(await self._samplers.add(run.session, number, made, name))
        return response

    async def weights_info(self, request: Request) -> Response:
        """Answer with the model, the rank and the trained parts of a checkpoint."""
        fields = await read_fields(request, self._gateway.limits)
        path = fields.text("tinker_path") or ""
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

    async def _create_from(
        self, request: Request, fields: Fields, path: str, optimizer: bool
    ) -> Response:
        session = self._sessions.find(request, fields.text("session_id"))
        number = number_of(fields, "model_seq_id", 0)
        metadata = metadata_of(fields)
        base = self._base_of(fields)
        fields.take("type")
        fields.finish()
        checkpoint, folder = await self._saved(session.tenant, path, optimizer)
        old = await in_thread(self._state.run, checkpoint.run)
        assert old is not None
        whole, of_whole = self._gateway.whole, old.rank is None
        if whole != of_whole:
            what, train = ("all weights", "full") if of_whole else ("an adapter", "adapters")
            raise BadRequest(f"{path}: it is of {what}; serve the model with --train {train}")

        def stored(name: str) -> StoredRun:
            assert old is not None
            return self._stored(
                session, number, name, base, old.rank, old.seed, old.targets, metadata
            )

        def make(name: str) -> StepwiseLearner:
            with _called(folder, path):
                learner = StepwiseLearner(self._gateway.model) if whole else self._learner(folder)
                if optimizer or whole:
                    learner.load(folder, optimizer=optimizer)
            if whole:
                self._gateway.device.snapshots.present = checkpoint.weights
            return learner

        def answer(name: str) -> Mapping[str, Any]:
            return {"type": "load_weights", "path": path, "model_id": name}

        future = await self._runs.create(request, session, number, stored, make, answer)
        return JSONResponse({"request_id": future})

    def _rank_of(self, lora: Fields) -> int | None:
        """Return the rank of a new run's adapter; None: all weights are trained, which rank 0, or
        no `lora_config` at all, asks for. Raises BadRequest for a run that this server does not
        train."""
        rank = lora.whole("rank", 0, 0, _HIGHEST_RANK)
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

    def _stored(
        self,
        session: Session,
        number: int,
        name: str,
        base: str,
        rank: int | None,
        seed: int,
        trained: Mapping[str, bool],
        metadata: Mapping[str, str],
    ) -> StoredRun:
        now = time.time()
        return StoredRun(
            *(name, session.tenant, session.name, number, base, rank, seed, trained),
            created=now,
            requested=now,
            metadata=metadata,
        )

    async def _save(
        self, run: Run, number: int, fields: Fields, kind: Kind, overwrite: bool
    ) -> Response:
        optimizer, asked = kind == "training", _SAVES[kind]
        name = fields.text("path") or f"request-{number}"
        ttl = ttl_of(fields)
        metadata = metadata_of(fields)
        fields.finish()

        def shown(saved: Checkpoint) -> Response:
            size = {"size_bytes": saved.bytes} if kind == "external" else {}
            return JSONResponse({"type": asked, "path": saved.path, **size})

        def save() -> Response:
            saved = self._state.save(
                run.name,
                kind,
                name,
                partial(run.trains.save, optimizer=optimizer),
                optimizer=optimizer,
                ttl=ttl,
                overwrite=overwrite,
                metadata=metadata,
                weights=self._gateway.device.snapshots.present,
                answer=lambda saved: (number, answer_of(shown(saved))),
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

    def _base_of(self, fields: Fields) -> str:
        """Return the model's name, as a client gives it. Raises BadRequest for another's name."""
        base = fields.text("base_model") or self._gateway.name
        if self._gateway.adapter_of(base) is not None:
            raise BadRequest(f"base_model: {base} is an adapter; train the model", "base_model")
        return base

    def _check_optimizer(self, fields: Fields, key: str) -> None:
        config = fields.inner(key)
        if config.text("type", "adamw") != "adamw":
            raise BadRequest(f"{key}: only adamw is offered", key)
        config.finish()


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


def _adam_of(given: Fields) -> Adam:
    given.check_numbers(*(each.name for each in names_of(Adam)))
    taken = {each.name: given.take(each.name, each.default) for each in names_of(Adam)}
    given.finish()
    return Adam(**taken)

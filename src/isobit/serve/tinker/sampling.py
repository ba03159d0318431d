"""Sampling clients: each is pinned to a snapshot, so the weights that it samples from never change.

Left out, each refused in one line: images, alternative tokens of prompts, log-probabilities of
tokens that a request names, and stability records.
"""

import asyncio
import hashlib
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.engine.prompts import encode_prompt
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError, brief
from isobit.serve.gateway import Gateway, in_thread
from isobit.serve.jobs import Done, Scored
from isobit.serve.protocol import sampling_of, token_list
from isobit.serve.requests import BadRequest, check_whole
from isobit.serve.scoring import Scoring, check_top
from isobit.serve.snapshots import Snapshot
from isobit.serve.state.rows import SCHEME, Checkpoint, StoredSampler
from isobit.serve.state.state import deleted
from isobit.serve.tinker.futures import Futures
from isobit.serve.tinker.protocol import CreateSampler, Sample
from isobit.serve.tinker.sessions import Session, Sessions
from isobit.serve.tinker.wire import PROTOBUF, encoded
from isobit.serve.wire import read_request

_MOST_SAMPLERS, _MOST_AWAKE, _MOST_DROPPED = 4096, 32, 4096
"""The most sampling clients of a session; the most of them whose saved weights are in memory (those
of others are read again for a request); the most dropped clients of a server for which the reason
is remembered."""


@dataclass(eq=False)
class Sampler:
    """A sampling client: the model's name as it was given, and the weights to which the client is
    pinned. `snapshot`: None while it rests, its weights not in memory; `checkpoint`: of the
    weights, None: there is none, and it never rests; `number`: in its session; `open`: its requests
    that are not answered, by their futures' names."""

    tenant: str
    model: str
    path: str | None
    snapshot: Snapshot | None
    checkpoint: Checkpoint | None = None
    number: int = -1
    open: set[str] = field(default_factory=set)
    ended: bool = False
    waking: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Gone(NamedTuple):
    """A sampling client that samples no more: its tenant, why, and whether it stays in the state,
    so that the next server may have its weights."""

    tenant: str
    why: str
    stays: bool = False


class Samplers:
    """The sampling clients of a server."""

    def __init__(self, gateway: Gateway, sessions: Sessions, futures: Futures) -> None:
        self._gateway, self._snapshots = gateway, gateway.device.snapshots
        self._sessions, self._futures = sessions, futures
        self._samplers: dict[str, Sampler] = {}
        self._numbered: dict[tuple[str, int], str] = {}  # by the session and the number in it
        self._of_session: dict[str, list[str]] = {}
        self._gone = dict[str, _Gone]()  # by id, the oldest first

    async def create(self, request: Request) -> Response:
        """Begin a sampling client of a session, pinned to the present weights of its model; answer
        with its id. A second request of the same number is answered with the same client."""
        keys = await read_request(request, CreateSampler, self._gateway.limits)
        session = self._sessions.find(request, keys.session_id)
        number, base, path = keys.sampling_session_seq_id, keys.base_model, keys.model_path
        called = base or self._gateway.name
        known = self._samplers.get(self._numbered.get((session.name, number), ""))
        if known is None:
            self.check_room(session)
            snapshot, checkpoint = await self._snapshot(session.tenant, base, path)
            made = Sampler(session.tenant, called, path, snapshot, checkpoint)
            await self.add(session, number, made)
        elif (known.model, known.path) != (called, path):
            raise BadRequest(
                f"sampling_session_seq_id: sampling client {number} of this session is of another "
                "model or path; give each a number of its own",
                "sampling_session_seq_id",
            )
        name = self._numbered[session.name, number]
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    def check_room(self, session: Session) -> None:
        """Raise BadRequest unless a session may have one more sampling client."""
        if len(self._of_session.get(session.name, ())) >= _MOST_SAMPLERS:
            raise BadRequest(f"a session may have {_MOST_SAMPLERS} sampling clients")

    async def add(
        self, session: Session, number: int, sampler: Sampler, name: str | None = None
    ) -> str:
        """Add a sampling client, which holds its snapshot, to a session, and return its name; if
        the number was taken meanwhile, return the name of the client that has it. `name`: the one
        that it has in the state already. Raises BadRequest if the session has ended."""
        if name is None:
            name = secrets.token_hex(16)
            if self._gateway.state is not None and not session.ended:
                row = StoredSampler(
                    *(name, session.tenant, session.name, number, sampler.model),
                    path=sampler.path,
                    snapshot=_kept_as(sampler),
                )
                try:
                    name = (await in_thread(self._gateway.state.add_sampler, row)).id
                except BaseException:
                    await self._release(sampler)
                    raise
        if name in self._gone:
            await self._release(sampler)
            raise BadRequest(f"no sampling session {name}: {self._gone[name].why}", status=404)
        if session.ended or (session.name, number) in self._numbered:
            await self._release(sampler)
            if session.ended:
                raise BadRequest("the session has ended", status=410)
            return self._numbered[session.name, number]
        if session.name not in self._of_session:
            session.closers.append(partial(self._close, session))
        self._of_session.setdefault(session.name, []).append(name)
        self._numbered[session.name, number], self._samplers[name] = name, sampler
        sampler.number = number
        await self._rest(session)
        return name

    async def begin_again(self, session: Session, row: StoredSampler) -> None:
        """Restore a sampling client of an earlier server. Raises IsobitError where its weights are
        not kept."""
        state = self._gateway.state
        checkpoint = None if state is None or row.snapshot is None else state.by_id(row.snapshot)
        if self._gateway.whole:
            snapshot, checkpoint = Snapshot(None, 0, 1, weights=row.snapshot or ""), None
        elif row.snapshot is None:
            snapshot, checkpoint = await self._snapshot(row.tenant, row.base, row.path)
        elif checkpoint is None:
            raise IsobitError(f"the weights of sampling client {row.id} are not kept")
        else:
            snapshot = await self._read(row.tenant, checkpoint)
        made = Sampler(row.tenant, row.base, row.path, snapshot, checkpoint)
        await self.add(session, row.number, made, row.id)

    def leave(self, session: Session, row: StoredSampler, why: str) -> None:
        """Note that a sampling client of an earlier server cannot go on; its requests are answered
        `why`. It is kept until its session ends: the next server may have its weights."""
        self._gone[row.id] = _Gone(session.tenant, why, stays=True)

    async def drop(self, session: Session, name: str, why: str) -> None:
        """Drop a sampling client, whose weights are kept no more; its requests are answered
        `why`."""
        if self._gateway.state is not None:
            await in_thread(self._gateway.state.drop_sampler, name)
        self._gone[name] = _Gone(session.tenant, why)
        dropped = [name for name, gone in self._gone.items() if not gone.stays]
        for oldest in dropped[:-_MOST_DROPPED]:
            del self._gone[oldest]
        self._of_session[session.name].remove(name)
        sampler = self._samplers.pop(name)
        del self._numbered[session.name, sampler.number]
        await self._end(sampler)

    async def show(self, request: Request) -> Response:
        """Answer with the model and the path from which a sampling client samples."""
        name = request.path_params["name"]
        sampler = self._find(request, name)
        return JSONResponse(
            {"sampler_id": name, "base_model": sampler.model, "model_path": sampler.path}
        )

    async def sample(self, request: Request) -> Response:
        """Begin to sample; answer with the future's name, which is made of the sampling client and
        the request's number."""
        keys = await read_request(request, Sample, self._gateway.limits)
        sampler, count = self._find(request, keys.sampling_session_id), keys.num_samples
        future = f"{keys.sampling_session_id}:{keys.seq_id}"
        parameters = self._asked(keys)
        digest = hashlib.sha256(request.state.body).hexdigest()
        if not self._futures.knows(sampler.tenant, future, digest):
            with ExitStack() as held:  # also while the weights are read
                held.enter_context(self._gateway.room(sampler.tenant, count))
                answer, over = self._answer(sampler, future, *parameters), held.pop_all().close
            self._futures.begin(sampler.tenant, future, answer, over, digest)
        ids = [f"{future}:{index}" for index in range(count)]
        return JSONResponse({"request_id": future, "sample_sequence_ids": ids})

    def _asked(self, keys: Sample) -> tuple[list[int], Sampling, Scoring | None]:
        """Return (prompt, how to sample, the scores to compute of the prompt itself, None: none).
        Raises BadRequest."""
        chunks, limits, tokens = keys.prompt.get("chunks"), self._gateway.limits, list[int]()
        for chunk in chunks if isinstance(chunks, list) else [None]:
            if not isinstance(chunk, dict) or chunk.get("type") != "encoded_text":
                raise BadRequest(
                    "prompt: only chunks of type encoded_text are offered, which are tokens",
                    "prompt",
                )
            tokens += token_list(chunk.get("tokens"), "prompt")
        prompt = encode_prompt(
            "prompt", tokens, self._gateway.tokenizer, self._gateway.model.config.vocab_size
        )
        params, stop = keys.sampling_params, keys.sampling_params.stop
        if stop == []:
            params = replace(params, stop=None, ignore_eos=True)
        elif isinstance(stop, list) and all(type(token) is int for token in stop):
            params = replace(params, stop=None, stop_token_ids=stop)
        longest = self._gateway.model.config.max_positions
        params, top = replace(params, n=keys.num_samples), keys.topk_sample_logprobs
        sampling = sampling_of(params, limits, longest, top)
        scored, top = 0, keys.topk_prompt_logprobs
        if keys.prompt_logprobs or top:
            scored = len(prompt)
            if keys.prompt_logprobs_last_n is not None:
                check_whole("prompt_logprobs_last_n", keys.prompt_logprobs_last_n, 1, scored)
                scored = keys.prompt_logprobs_last_n
        fewer = "ask for fewer tokens by prompt_logprobs_last_n"
        check_top(scored, top, "topk_prompt_logprobs", fewer)
        return prompt, sampling, Scoring(scored, top) if scored else None

    async def _answer(
        self,
        sampler: Sampler,
        name: str,
        prompt: list[int],
        sampling: Sampling,
        scoring: Scoring | None,
    ) -> Response:
        """Return the response with the answers to a prompt, for the future of this name."""
        completions, scores = list[Completion](), None
        sampler.open.add(name)
        try:
            arguments = sampler.tenant, [prompt], sampling, await self._awake(sampler)
            stream = self._gateway.ask(*arguments, streamed=False, scorings=[scoring], counted=True)
            async with stream as events:
                async for _, event in events:
                    if isinstance(event, Done):
                        completions.append(event.completion)
                    elif isinstance(event, Scored):
                        scores = event.scores
        finally:
            sampler.open.discard(name)
        completions.sort(key=lambda completion: completion.sample_index)
        return Response(await in_thread(encoded, completions, scores), media_type=PROTOBUF)

    async def _snapshot(
        self, tenant: str, base: str | None, path: str | None
    ) -> tuple[Snapshot, Checkpoint | None]:
        """Return (the snapshot of a new client, held: of the base, of an adapter by its name, or of
        saved weights; the checkpoint of saved weights, else None)."""
        name, state = (path or "").removeprefix(SCHEME), self._gateway.state
        if path is None or state is None or name in self._snapshots.names:
            adapter = self._gateway.adapter_of(base if path is None else name)
            held = Snapshot(None, 0) if self._gateway.whole else adapter
            return await self._gateway.work(tenant, partial(self._snapshots.hold, held)), None
        checkpoint = await in_thread(state.loadable, tenant, path)
        if self._gateway.whole:
            saved = Snapshot(None, 0, weights=checkpoint.weights)
            return await self._gateway.work(tenant, partial(self._snapshots.hold, saved)), None
        return await self._read(tenant, checkpoint), checkpoint

    async def _read(self, tenant: str, checkpoint: Checkpoint) -> Snapshot:
        """Read saved weights, and return their snapshot, held. Raises IsobitError where they are
        gone."""
        state = self._gateway.state
        assert state is not None
        if await in_thread(state.by_id, checkpoint.id) is None:
            raise deleted(checkpoint)
        folder = await in_thread(state.folder_of, checkpoint)
        opened = partial(self._snapshots.open, checkpoint.id, lambda: folder, tenant)
        return await self._gateway.work(tenant, opened)

    async def _awake(self, sampler: Sampler) -> Snapshot:
        """Return the snapshot of a client, whose weights are read if they are not in memory. Raises
        BadRequest (404) where the client was dropped meanwhile."""
        if sampler.snapshot is None:
            await asyncio.shield(self._wake(sampler))
        if sampler.snapshot is None:
            raise BadRequest("the sampling client was dropped", status=404)
        return sampler.snapshot

    async def _wake(self, sampler: Sampler) -> None:
        """Read a client's weights. The caller lets this run to its end even where the request is
        cancelled: weights that are read and not registered would never be released."""
        async with sampler.waking:
            if sampler.snapshot is None and sampler.checkpoint is not None and not sampler.ended:
                sampler.snapshot = await self._read(sampler.tenant, sampler.checkpoint)
            if sampler.ended:
                await self._release(sampler)

    async def _rest(self, session: Session) -> None:
        """Release the weights of a session's oldest clients of saved weights, except of the newest
        `_MOST_AWAKE` that are in memory."""
        samplers = [self._samplers[name] for name in self._of_session[session.name]]
        awake = [s for s in samplers if s.checkpoint is not None and s.snapshot is not None]
        for sampler in awake[:-_MOST_AWAKE]:
            if not sampler.open and not sampler.waking.locked():
                await self._release(sampler)

    def _find(self, request: Request, name: str | None) -> Sampler:
        sampler = self._samplers.get(name or "")
        if sampler is None or sampler.tenant != request.state.tenant:
            gone = self._gone.get(name or "")
            is_own = gone is not None and gone.tenant == request.state.tenant
            why = gone.why if gone is not None and is_own else "it has ended"
            raise BadRequest(f"no sampling session {brief(name)}: {why}", status=404)
        return sampler

    async def _close(self, session: Session) -> None:
        """End a session's sampling clients, cancel their samples, for which no client waits, and
        release their snapshots."""
        for name in self._of_session.pop(session.name):
            sampler = self._samplers.pop(name)
            del self._numbered[session.name, sampler.number]
            for future in sampler.open:
                self._futures.give_up(sampler.tenant, future)
            await self._end(sampler)

    async def _end(self, sampler: Sampler) -> None:
        sampler.ended = True
        await self._release(sampler)

    async def _release(self, sampler: Sampler) -> None:
        held, sampler.snapshot = sampler.snapshot, None
        if held is not None:
            await self._gateway.work(sampler.tenant, partial(self._snapshots.release, held))


def _kept_as(sampler: Sampler) -> str | None:
    """Return a state's name of the weights of a sampling client that are kept for it; None: the
    weights are the base's, or an adapter's of the server."""
    if sampler.checkpoint is not None:
        return sampler.checkpoint.id
    return None if sampler.snapshot is None else sampler.snapshot.weights or None

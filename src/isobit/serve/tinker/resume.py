"""What a server does first: it goes on where an earlier one of the same state ended, however that
was.

Sessions and sampling clients are there again, and each training run as it was last kept. Requests
that it had answered since are done again, in their order, and have the same bits; then those that
it had taken and not answered are done. So a client that asks for its answer again gets it, and
nothing is done twice (tests/serve/test_kills.py). Left out: samples that were open, which the
client asks for again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from isobit.errors import IsobitError, RunFailed, brief
from isobit.rl.stepwise import StepwiseLearner
from isobit.serve.gateway import Gateway, Refused, in_thread
from isobit.serve.requests import BadRequest
from isobit.serve.state.rows import Answer, StoredRequest, StoredRun
from isobit.serve.state.state import State
from isobit.serve.tinker.futures import Futures
from isobit.serve.tinker.lines import Line
from isobit.serve.tinker.runs import Run, Runs
from isobit.serve.tinker.sampling import Samplers
from isobit.serve.tinker.sessions import Session, Sessions
from isobit.serve.tinker.wire import PREFIX

Handler = Callable[[Request], Awaitable[Response]]
_LOG = logging.getLogger("isobit.serve")
_CHANGING = ("forward_backward", "optim_step", "load_weights")
"""Kinds of requests that leave a run other than it was."""


class Resume:
    """Brings back what a state has kept. `handlers`: of requests to a run, by their kind."""

    def __init__(
        self,
        gateway: Gateway,
        state: State,
        sessions: Sessions,
        samplers: Samplers,
        runs: Runs,
        futures: Futures,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._gateway, self._state, self._sessions = gateway, state, sessions
        self._samplers, self._runs, self._futures = samplers, runs, futures
        self._handlers = handlers

    async def all(self) -> None:
        """All of it. Raises IsobitError for a run that cannot go on, such as one of another model,
        unless the state may drop it, which the log tells; Refused and RunFailed where it is the
        server that cannot do it. Nothing is dropped then."""
        sessions = dict[str, Session]()
        for row in await in_thread(self._state.all_sessions):
            sessions[row.id] = self._sessions.begin(row.id, row.tenant)
        runs = list[Awaitable[None]]()
        for stored in await in_thread(self._state.live_runs):
            if stored.session in sessions:
                runs.append(self._run(sessions[stored.session], stored))
            else:
                await self._drop(stored, IsobitError("its session is gone"))
        await asyncio.gather(*runs)
        for name, session in sessions.items():
            for sampler in await in_thread(self._state.samplers, name):
                try:
                    self._state.check_model(sampler)
                    await self._samplers.begin_again(session, sampler)
                except IsobitError as error:
                    if isinstance(error, RunFailed):
                        raise
                    _LOG.warning("sampling client %s cannot go on: %s", sampler.id, error)
                    self._samplers.leave(session, sampler, str(error))
                    continue
                self._runs.count_unnamed(sampler)
        await in_thread(self._state.adopt)

    async def _run(self, session: Session, stored: StoredRun) -> None:
        try:
            requests = await in_thread(self._state.requests, stored.id)
            self._state.check_model(stored)
            if (stored.rank is None) != self._gateway.whole:
                kind = "--train" if self._gateway.whole else "--train full"
                raise IsobitError(f"it goes on with {kind}")
            if stored.applied < 0:  # nobody has seen its weights: it begins once more
                for request in requests[:1]:
                    try:
                        await self._handle(session, request)
                    except BadRequest as error:  # as it would have been answered
                        _LOG.warning("training run %s does not begin: %s", stored.id, error)
                        await in_thread(self._state.end_run, stored.id)
                return
            run = await self._opened(session, stored)
            await self._do_again(run, [each for each in requests if each.number > stored.applied])
        except Refused as error:
            raise Refused(error.status, f"training run {stored.id}: {error}") from None
        except IsobitError as error:
            await self._drop(stored, error)
            return
        for request in requests:
            if request.answer is not None:
                name = f"{stored.id}:{request.number}"
                self._futures.done(session.tenant, name, _response(request.answer))

    async def _drop(self, run: StoredRun, why: IsobitError) -> None:
        """End a run that cannot go on. Raises IsobitError where nobody has asked for that."""
        if isinstance(why, RunFailed):  # a full disk, and nothing of the run's
            raise why
        if not self._state.drops:
            raise IsobitError(
                f"--state {self._state.folder}: training run {run.id} cannot go on: {why}; mend "
                "that, or end what cannot go on with --drop-runs"
            ) from None
        _LOG.warning("training run %s cannot go on, and is dropped: %s", run.id, why)
        await in_thread(self._state.end_run, run.id)

    async def _opened(self, session: Session, stored: StoredRun) -> Run:
        """A run as it was last kept."""
        present = await in_thread(self._state.present, stored.id)
        if present is None:
            raise IsobitError("its weights are not kept")
        folder = await in_thread(self._state.folder_of, present)
        run = self._runs.opened(session, stored)

        whole, model = self._gateway.whole, self._gateway.model

        def load() -> None:
            learner = StepwiseLearner(model if whole else model.adapted(folder))
            learner.load(folder, optimizer=True)
            self._gateway.device.snapshots.present = present.weights
            run.learner = learner

        await self._gateway.work(run.tenant, load, alone=whole)
        return run

    async def _do_again(self, run: Run, requests: list[StoredRequest]) -> None:
        """Those with an answer now, one after the other; then others wait for their turns."""
        for request in requests:
            if (kind := request.kind.partition(":")[0]) not in self._handlers:
                what = f"request {request.number} is none that a server keeps"
                raise IsobitError(f"{what}: {brief(kind)}; was it another isobit's?")
        last = max((each.number for each in requests if each.answer is not None), default=-1)
        for request in requests:
            kind, answer = request.kind.partition(":")[0], request.answer
            if request.number > last or answer is None or kind not in _CHANGING or _failed(answer):
                continue
            run.again = request.number
            found = await self._handle(run.session, request)
            if bytes(found.body) != answer.body:
                _LOG.warning("request %d of %s has other bits now", request.number, run.name)
        run.again = None
        first = max(last + 1, await in_thread(self._next, run.name))
        run.line = Line(first)
        for request in requests:
            if request.number > last:
                await self._handle(run.session, request)

    def _next(self, run: str) -> int:
        stored = self._state.run(run)
        return 1 if stored is None else stored.applied + 1

    async def _handle(self, session: Session, stored: StoredRequest) -> Response:
        """As if a request came once more."""
        kind, _, encoding = stored.kind.partition(":")

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": stored.body, "more_body": False}

        headers = [(b"content-encoding", encoding.encode())] if encoding else []
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"{PREFIX}/{kind}",
            "query_string": b"",
            "headers": headers,
            "state": {"tenant": session.tenant},
        }
        return await self._handlers[kind](Request(scope, receive))


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, media_type=answer.media_type or None)


def _failed(answer: Answer) -> bool:
    """Whether a request was answered with an error, and has changed nothing."""
    return answer.media_type == "application/json" and answer.body.startswith(b'{"error"')

"""The resumption of a server: it goes on where an earlier server of the same state ended, in
whatever way that one ended.

Sessions and sampling clients are restored, and each training run in its last kept state. Requests
to a run that were answered since are done again, in their order, and have the same bits; then
requests that were taken and not answered are done. So a client that asks for its answer again gets
it, and nothing is done twice (tests/serve/test_kills.py). A request whose answer a full disk has
not taken is done again too if a later one has an answer, since requests were done in the order of
their numbers (tests/serve/test_full_disk.py). Left out: samples that were open, which the client
asks for again.
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
from isobit.serve.state.rows import Answer, StoredRequest, StoredRun, Taken
from isobit.serve.state.state import State
from isobit.serve.state.store import MOST_ANSWERS
from isobit.serve.tinker.arrived import Before, answer_of, digest_of
from isobit.serve.tinker.futures import Futures, failed
from isobit.serve.tinker.lines import Line
from isobit.serve.tinker.runs import Run, Runs
from isobit.serve.tinker.sampling import Samplers
from isobit.serve.tinker.sessions import Session, Sessions
from isobit.serve.tinker.wire import PREFIX

Handler = Callable[[Request], Awaitable[Response]]
_LOG = logging.getLogger("isobit.serve")
_FORGOTTEN = BadRequest("the answer to this request was not kept", status=410)
_CHANGING = ("forward_backward", "optim_step", "load_weights")
"""Kinds of requests that change a run."""


class Resume:
    """The restorer of the sessions, sampling clients and runs of a state. `handlers`: of requests
    to a run, by their kind."""

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
        """Restore the whole state. Raises IsobitError for a run that cannot go on, such as one of
        another model, unless the state may drop it, which is logged; Refused and RunFailed where
        this server fails, though another one might not; then nothing is dropped."""
        sessions = dict[str, Session]()
        for row in await in_thread(self._state.all_sessions):
            sessions[row.id] = self._sessions.begin(row.id, row.tenant)
        runs = list[Awaitable[None]]()
        for stored in await in_thread(self._state.live_runs):
            if stored.session in sessions:
                runs.append(self._run(sessions[stored.session], stored))
            else:
                self._check_drops(stored, IsobitError("its session is gone"))
                await in_thread(self._state.end_run, stored.id)
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
            self._state.check_model(stored)
            if (stored.rank is None) != self._gateway.whole:
                kind = "--train" if self._gateway.whole else "--train full"
                raise IsobitError(f"it goes on with {kind}")
            requests = await in_thread(self._state.requests, stored.id)
            if stored.applied < 0:  # no client has seen its weights: it begins once more
                for number in list(requests)[:1]:
                    await self._begin(session, stored, await self._request(stored.id, number))
                return
            run = await self._opened(session, stored)
            await self._do_again(run, stored.applied, requests)
        except Refused as error:
            raise Refused(error.status, f"training run {stored.id}: {error}") from None
        except IsobitError as error:
            if isinstance(error, RunFailed) or _is_of_the_server(error):
                raise RunFailed(f"training run {stored.id}: {error}") from None
            self._check_drops(stored, error)
            await self._end(session, stored, error)

    def _check_drops(self, run: StoredRun, why: IsobitError) -> None:
        """Log that a run is dropped. Raises IsobitError unless the state may drop it."""
        if not self._state.drops:
            raise IsobitError(
                f"--state {self._state.folder}: training run {run.id} cannot go on: {why}; mend "
                "that, or end what cannot go on with --drop-runs"
            ) from None
        _LOG.warning("training run %s cannot go on, and is dropped: %s", run.id, why)

    async def _begin(self, session: Session, stored: StoredRun, request: StoredRequest) -> None:
        """Create a run anew from its first request; a run that is refused ends, and its client is
        answered with the refusal."""
        try:
            await self._handle(session, request, Before(done=False))
        except BadRequest as error:
            if _is_of_the_server(error):
                raise
            _LOG.warning("training run %s does not begin: %s", stored.id, error)
            await self._end(session, stored, error)

    async def _end(self, session: Session, stored: StoredRun, why: IsobitError) -> None:
        """End a run; requests to it, and for answers of it that were not kept, get an error that
        says why."""
        reason = f"it could not go on when the server began again: {why}"
        await self._runs.lose(session.tenant, stored.id, reason)
        for number in await in_thread(self._state.requests, stored.id):
            request = await self._request(stored.id, number)
            lost = failed(BadRequest(f"training run {stored.id}: {reason}", status=410))
            self._give(session, request, lost)
        await in_thread(self._state.end_run, stored.id)

    async def _request(self, run: str, number: int) -> StoredRequest:
        """Return the kept request of a number to a run, which does not end meanwhile."""
        stored = await in_thread(self._state.request, run, number)
        assert stored is not None
        return stored

    def _give(self, session: Session, request: StoredRequest, otherwise: Response) -> None:
        """Answer a request's future with the answer that was kept, or with `otherwise` where none
        was."""
        if (answer := request.answer) is not None:
            otherwise = Response(answer.body, answer.status, media_type=answer.media_type or None)
        name, digest = f"{request.run}:{request.number}", digest_of(request.kind)
        self._futures.done(session.tenant, name, otherwise, digest)

    async def _opened(self, session: Session, stored: StoredRun) -> Run:
        """Open a run in its last kept state. Raises IsobitError where its weights are not kept."""
        present = await in_thread(self._state.present, stored.id)
        if present is None:
            raise IsobitError("its weights are not kept")
        folder = await in_thread(self._state.folder_of, present)
        run = self._runs.opened(session, stored, again=True)

        whole, model = self._gateway.whole, self._gateway.model

        def load() -> None:
            learner = StepwiseLearner(model if whole else model.adapted(folder))
            learner.load(folder, optimizer=True)
            self._gateway.device.snapshots.present = present.weights
            run.learner = learner

        await self._gateway.work(run.tenant, load, alone=whole)
        return run

    async def _do_again(self, run: Run, applied: int, requests: Mapping[int, Taken]) -> None:
        """Do again, in order, the requests that were done since the run was kept, those behind
        `applied`; then let the others wait for their turns. A request without an answer whose
        number is below that of one with an answer was done too. Raises IsobitError where a request
        cannot be done again, without which the run would be another."""
        later = {number: taken for number, taken in requests.items() if number > applied}
        for number, taken in later.items():
            if (kind := taken.kind.partition(":")[0]) not in self._handlers:
                problem = f"request {number} is none that a server keeps: {brief(kind)}"
                raise IsobitError(f"{problem}; was it another isobit's?")
        last = max((number for number, taken in later.items() if taken.answered), default=applied)
        there = {applied, *requests}
        for number in requests:
            if number > last:
                break
            request = await self._request(run.name, number)
            await self._give_again(run, request, applied, number - 1 in there)
        oldest = max(1, last - MOST_ANSWERS)
        run.line = Line(last + 1, (n for n in range(oldest, last + 1) if n not in there))
        for number in later:
            if number > last:
                request = await self._request(run.name, number)
                try:
                    await self._handle(run.session, request, Before(done=False))
                except BadRequest as error:
                    if _is_of_the_server(error):
                        raise
                    await self._runs.refuse(run, number, request.kind, error)

    async def _give_again(
        self, run: Run, request: StoredRequest, applied: int, follows: bool
    ) -> None:
        """Do a request again that was done, and answer its future. `follows`: the request before it
        is kept; else the line had given up waiting for that one."""
        kind, answer = request.kind.partition(":")[0], request.answer
        changed = answer is None or (kind in _CHANGING and not _failed(answer))
        if request.number <= applied or not changed:
            self._give(run.session, request, failed(_FORGOTTEN))
            return
        if not follows:
            error: Exception = BadRequest("the request before this one never came", status=410)
            response = failed(error)
        else:
            try:
                response = await self._handle(run.session, request, Before(done=True))
            except Exception as error:
                if answer is not None or _is_of_the_server(error):
                    raise
                response = failed(error)
        if answer is None:
            await in_thread(self._state.answer, run.name, request.number, answer_of(response))
        elif bytes(response.body) != answer.body:
            _LOG.warning("request %d of %s has other bits now", request.number, run.name)
        self._give(run.session, request, response)

    async def _handle(self, session: Session, stored: StoredRequest, before: Before) -> Response:
        """Call the handler of a kept request, as if the request came once more."""
        kind, encoding, *_ = [*stored.kind.split(":"), ""]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": stored.body, "more_body": False}

        headers = [(b"content-encoding", encoding.encode())] if encoding else []
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"{PREFIX}/{kind}",
            "query_string": b"",
            "headers": headers,
            "state": {"tenant": session.tenant, "before": before},
        }
        return await self._handlers[kind](Request(scope, receive))


def _is_of_the_server(error: Exception) -> bool:
    """Tell whether an error is the server's, so that another server might do the request."""
    if not isinstance(error, IsobitError):
        return True
    return isinstance(error, BadRequest) and (error.status == 429 or error.status >= 500)


def _failed(answer: Answer) -> bool:
    """Tell whether a request was answered with an error, and so has changed nothing."""
    return answer.media_type == "application/json" and answer.body.startswith(b'{"error"')

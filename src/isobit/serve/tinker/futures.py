"""Requests that are answered later: the work of a future is done once, however often clients ask
for the future by its name.

Its result is kept for a while, and is gone after that (410). An error is the future's result, in
Tinker's categories: `user`, or `server`.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isobit.errors import brief
from isobit.serve.gateway import Gateway, Refused
from isobit.serve.requests import BadRequest
from isobit.serve.tinker.protocol import Named
from isobit.serve.wire import error_value, read_request

POLL_SECONDS = 20.0
_MOST_RESULTS, _MOST_RESULT_BYTES = 4096, 1 << 28
"""How many results of a tenant are kept, and their bytes. Many results of one tenant do not make
those of another one forgotten."""
_Key = tuple[str, str]  # tenant, name


class Futures:
    """The futures of a server, each of one tenant. A name says what was requested: a sampling
    session or a run, and the request's number in it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: dict[_Key, asyncio.Task[Response]] = {}
        self._digests: dict[_Key, str] = {}  # of the requests' content
        self._kept = set[asyncio.Task[Response]]()  # work that cannot be cancelled
        self._done = defaultdict[str, deque[tuple[_Key, int]]](deque)
        """The finished futures of each tenant, the oldest first, each with its result's bytes."""
        self._bytes = Counter[str]()

    def knows(self, tenant: str, name: str, digest: str = "") -> bool:
        """Tell whether a request of this name has come before, and its future is not forgotten.
        Raises BadRequest where its content, known by its `digest`, was another one then; an empty
        digest: the content is not known."""
        known = self._digests.get((tenant, name), "")
        if known and digest and known != digest:
            raise BadRequest(
                f"request {brief(name, 200)} came before with other content; give each request a "
                "number of its own"
            )
        return (tenant, name) in self._tasks

    def begin(
        self,
        tenant: str,
        name: str,
        work: Awaitable[Response],
        over: Callable[[], None] | None = None,
        digest: str = "",
    ) -> None:
        """Begin `work`, whose response answers the future of this name, which must not be
        known. `over`: called when the
        work has ended, whether it had begun or not; only work that has an `over` can be cancelled.
        `digest`: of the content of the request for it; empty: not known."""
        assert not self.knows(tenant, name)
        task = asyncio.create_task(answered(work))
        self._tasks[tenant, name] = task
        if digest:
            self._digests[tenant, name] = digest
        if over is None:
            self._kept.add(task)
        else:
            task.add_done_callback(lambda _: over())
        task.add_done_callback(partial(self._over, (tenant, name)))

    def done(self, tenant: str, name: str, response: Response, digest: str = "") -> None:
        """Register the response of a future whose work an earlier server has done, unless a future
        of this name is known."""
        if not self.knows(tenant, name):
            self.begin(tenant, name, _at_once(response), digest=digest)

    async def retrieve(self, request: Request) -> Response:
        """Answer a request for a future: with its result, with an error that it has ended with, or,
        while it is not done after `POLL_SECONDS`, with 408, which asks the client to try again.
        Raises BadRequest (410) for a future that is not known."""
        name = (await read_request(request, Named, self._gateway.limits)).request_id or ""
        task = self._tasks.get((request.state.tenant, name))
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

    async def cancel(self, request: Request) -> Response:
        """Answer a client that no longer waits for a future: sampling ends, while a request to a
        training run is done all the same."""
        keys = await read_request(request, Named, self._gateway.limits)
        self.give_up(request.state.tenant, keys.request_id or "")
        return JSONResponse({})

    def give_up(self, tenant: str, name: str) -> None:
        """Cancel the work of a future for which no client waits any more, if it can be
        cancelled."""
        task = self._tasks.get((tenant, name))
        if task is not None and not task.done() and task not in self._kept:
            task.cancel()

    def _over(self, key: _Key, task: asyncio.Task[Response]) -> None:
        """Note that a future is done, and forget the tenant's oldest results where the tenant has
        too many or they have too many bytes."""
        self._kept.discard(task)
        tenant, _ = key
        done = self._done[tenant]
        answers = not task.cancelled() and task.exception() is None
        size = len(task.result().body) if answers else 0
        done.append((key, size))
        self._bytes[tenant] += size
        while len(done) > _MOST_RESULTS or (
            self._bytes[tenant] > _MOST_RESULT_BYTES and len(done) > 1
        ):
            oldest, size = done.popleft()
            self._bytes[tenant] -= size
            del self._tasks[oldest]
            self._digests.pop(oldest, None)


async def _at_once(response: Response) -> Response:
    return response


async def answered(work: Awaitable[Response]) -> Response:
    """Return the response to a future: the one that `work` returns, or one that tells its error.
    Raises Refused (503) where the server ends: this is not an answer, and the client asks the next
    server again."""
    try:
        return await work
    except Exception as error:
        if isinstance(error, Refused) and error.status == 503:
            raise
        return failed(error)


def failed(error: Exception) -> Response:
    """Return the response that tells of an error as the result of a future."""
    status, value = error_value(error)
    category = "user" if status < 500 else "server"
    return JSONResponse({"error": value["error"]["message"], "category": category})

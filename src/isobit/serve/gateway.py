"""The main thread's side of a server: routes ask the device through it, within the limits.

A request is a few jobs whose events arrive in one queue. Leaving the context of a request, because
all is done, because something failed or because the client went away, cancels the jobs that are
still open.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import listed
from isobit.model.text.tool_formats.base import ToolFormat
from isobit.serve.desk import Desk
from isobit.serve.device import STOPPING, Deliver, Device
from isobit.serve.jobs import Begun, Done, Event, Failed, Post, SampleJob, Scored, WorkJob
from isobit.serve.metrics import Metrics
from isobit.serve.requests import BadRequest, Limits
from isobit.serve.scoring import Scoring
from isobit.serve.sessions import Sessions
from isobit.serve.snapshots import Snapshot
from isobit.serve.state.state import State
from isobit.serve.structured import Grammars

_T = TypeVar("_T")
Indexed = tuple[int, Event]


class Refused(Exception):
    """An error of a valid request that the server does not do, with a `status` of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Events:
    """The events of the jobs of a request, each with the index of its prompt, until all jobs are
    done. `left`: by prompts, the number of answers that are to come, plus 1 where scores are;
    `begun` is called at the first token or answer."""

    def __init__(
        self, queue: "asyncio.Queue[Indexed]", left: dict[int, int], begun: Callable[[], None]
    ) -> None:
        self._queue, self._left, self._begun = queue, left, begun
        self._first = True

    @property
    def waiting(self) -> bool:
        """Whether the next event has arrived already."""
        return not self._queue.empty()

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> Indexed:
        if not any(self._left.values()):
            raise StopAsyncIteration
        index, event = await self._queue.get()
        if isinstance(event, Failed):
            self._left[index] = 0
            raise _error(event)
        if self._first and not isinstance(event, (Begun, Scored)):
            self._begun()
            self._first = False
        if isinstance(event, (Done, Scored)):
            self._left[index] -= 1
        return index, event


class Gateway:
    """A server: a device, made by `device`, the `name` of its model, and the objects that all
    requests share."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        tools: ToolFormat,
        limits: Limits,
        state: State | None = None,
        device: Callable[[Engine, Deliver], Device] = Device,
    ) -> None:
        """`state`: the database that keeps training runs; None: nothing is trained."""
        self.device = device(engine, self._deliver)
        self.device.snapshots.most_bytes = limits.snapshot_bytes
        self.name, self.tools, self.limits, self.state = name, tools, limits, state
        self.model, self.tokenizer = engine.model, engine.model.tokenizer
        self.whole = state is not None and bool(engine.model.named_parameters())
        """Whether training runs train the weights of the model itself, so that there is one run."""
        self.folder = os.path.abspath(self.model.directory or name)
        """The model's whole path, by which clients may ask for it too."""
        self._paths = set[str]()
        self.name_by(self.folder)
        self.metrics = Metrics(self.device)
        self.desk = Desk()
        self.grammars = Grammars(self.tokenizer, self.model.config.vocab_size)
        self.sessions = Sessions()
        self.ready = asyncio.Event()
        """Set when requests may come: the runs that a state has kept of an earlier server go on."""
        self.resume: Callable[[], Awaitable[None]] | None = None
        self.started = int(time.time())
        self.draining = False
        self._open_samples = Counter[str]()  # of each tenant
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the device in the running event loop, and go on where an earlier server of this
        state ended."""
        self._loop = asyncio.get_running_loop()
        self.device.start()
        if self.resume is not None:
            await self.resume()
        self.ready.set()

    def stop(self) -> None:
        """Answer all open requests with an error (503), and end. Called in the event loop's
        thread."""
        self.device.stop()
        self.desk.end(Refused(STOPPING.status, STOPPING.message))

    def name_by(self, path: str | Path) -> None:
        """Let clients ask for the model by a path too, such as that of the run that is served."""
        self._paths |= {os.path.abspath(path), os.path.realpath(path)}

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's `model` names; None: it names the base. Raises
        BadRequest (404) for a name of neither."""
        if model is None or model == self.name:
            return None
        if model in self.device.snapshots.names:
            return model
        if (
            model and os.path.abspath(model) in self._paths
        ):  # of its text alone: no file is looked at
            return None
        known = listed([self.name, *self.device.snapshots.names])
        raise BadRequest(f"model {model!r} is not served; there are {known}", "model", 404)

    @asynccontextmanager
    async def ask(
        self,
        tenant: str,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        adapter: str | Snapshot | None,
        streamed: bool,
        scorings: Sequence[Scoring | None] = (),
        sampled: bool = True,
        counted: bool = False,
        salt: bytes | None = None,
    ) -> "AsyncIterator[Events]":
        """Ask the device for answers to some prompts, in a context that gives their events, each
        with the index of its prompt. `scorings`: the scores to compute of each prompt itself; only
        these, unless answers are `sampled`. `counted`: the answers are counted as open already
        (`room`). `salt`: of the prompts' cached pages. Raises Refused and BadRequest, here or from
        the events."""
        scorings = scorings or [None] * len(prompts)
        count = 0 if counted else len(prompts) * (sampling.n if sampled else 1)
        if len(prompts) > 1 and self.device.weights_change:
            raise BadRequest(
                "prompt: give one at a time to a run that trains, so that a response is of one "
                "version of the weights",
                "prompt",
            )
        events: asyncio.Queue[Indexed] = asyncio.Queue()
        jobs = [
            SampleJob(
                *(tenant, tuple(prompt), sampling, adapter, streamed),
                *(partial(_put, events, index), scoring, sampled, salt),
            )
            for index, (prompt, scoring) in enumerate(zip(prompts, scorings, strict=True))
        ]
        left = {
            index: job.num_answers + (job.scoring is not None) for index, job in enumerate(jobs)
        }
        with self.room(tenant, count):
            began = time.monotonic()
            for job in jobs:
                self.device.submit(job)
            try:
                yield Events(
                    events, left, lambda: self.metrics.first_token.observe(time.monotonic() - began)
                )
            finally:
                for index, job in enumerate(jobs):
                    if left[index]:
                        self.device.cancel(job)
                self.metrics.whole.observe(time.monotonic() - began)

    async def work(self, tenant: str, work: Callable[[], _T], alone: bool = False) -> _T:
        """Return the result of `work`, which the device thread does between two steps; `alone` as
        in `WorkJob`. Raises Refused and BadRequest."""
        self.check_room(tenant, 0)
        happened: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

        def post(event: Event) -> None:
            if not happened.done():
                happened.set_result(event)

        self.device.submit(WorkJob(tenant, work, post, alone))
        event = await happened
        if isinstance(event, Failed):
            raise _error(event)
        assert isinstance(event, Done)
        return event.value

    @property
    def num_samples(self) -> int:
        """The number of answers that are open, of all tenants."""
        return self._open_samples.total()

    @contextmanager
    def room(self, tenant: str, count: int) -> Iterator[None]:
        """Count `count` more answers of a tenant as open while the context is. Raises as
        `check_room`."""
        self.check_room(tenant, count)
        self._open_samples[tenant] += count
        try:
            yield
        finally:
            self._open_samples[tenant] -= count

    def check_room(self, tenant: str, count: int) -> None:
        """Raise Refused or BadRequest unless `count` more answers of a tenant may be open. Open
        answers of one tenant do not keep another tenant from asking."""
        if self.draining or not self.device.alive:
            raise Refused(STOPPING.status, STOPPING.message)
        if count > self.limits.samples:
            raise BadRequest(
                f"n: a request may ask for {self.limits.samples:,} answers, prompts times n", "n"
            )
        if self._open_samples[tenant] + count > self.limits.open_samples:
            raise Refused(
                429,
                f"{self._open_samples[tenant]:,} answers of yours are open, and "
                f"{self.limits.open_samples:,} may be; ask again when some are there",
            )

    def _deliver(self, events: Sequence[tuple[Post, Event]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_post_all, events)
        except RuntimeError:  # the loop is closed: no client waits any more
            return


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Return the result of a function that reads or writes files or a database, called in a thread,
    so that the event loop does not wait for it. Work on clients' texts is done in `desk.py`."""
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, *arguments))


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Awaitable[_T]) -> _T | None:
    """Return the result of `work`, or None where the client goes away first, which cancels the
    work. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _put(events: "asyncio.Queue[Indexed]", index: int, event: Event) -> None:
    events.put_nowait((index, event))


def _post_all(events: Sequence[tuple[Post, Event]]) -> None:
    for post, event in events:
        post(event)


def _error(failed: Failed) -> Exception:
    if failed.status < 500:
        return BadRequest(failed.message, status=failed.status)
    return Refused(failed.status, failed.message)

"""The device thread: it owns model and engine, and no other thread touches them.

Jobs come in by a queue and wait in turns of their tenants (`jobs.py`). Between two steps of the
engine the thread does one piece of work, if there is any that need not wait for samples, and gives
the engine as many requests as it can run at once, so that the line in which others wait is the
tenants' and not the engine's. What a step has sampled is posted together. A request that asks for
scores of its prompt has these first, a part between two steps (`scoring.py`). Long work is done in
parts, too: after each of them, samples have as much time as it took before the next one begins, and
work of other tenants has its turn (tests/serve/test_turns.py).

A step that fails because logits are not finite does not say of which request they were. All open
requests are then begun again, one at a time: results do not depend on requests that run at the same
time, so each goes on where it was, and the one at fault fails alone (tests/serve/test_device.py).
"""

import logging
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from isobit.engine.engine import Engine
from isobit.engine.shaping import Forbidden
from isobit.engine.types import Request, Top
from isobit.errors import IsobitError, NonFiniteError, RunFailed
from isobit.serve.jobs import (
    Begun,
    Done,
    Event,
    Failed,
    Post,
    SampleJob,
    Scored,
    Token,
    Turns,
    WorkJob,
)
from isobit.serve.scoring import Scores, scores_in_parts
from isobit.serve.snapshots import Snapshot, Snapshots

Deliver = Callable[[Sequence[tuple[Post, Event]]], None]
_LOG = logging.getLogger("isobit.serve")
STOPPING = Failed(503, "the server is shutting down; ask another one, or again later")
_FAULT = Failed(500, "the server failed; its log says why")


@dataclass(frozen=True)
class _Stop:
    failed: Failed


@dataclass(frozen=True)
class _Cancel:
    job: SampleJob


@dataclass(eq=False)
class _Open:
    """A request in the engine, or on its way to it while its prompt is scored by steps of `scoring`,
    until there are `scores`. `drawn`: tokens of each sample since it was begun, of which `posted` are
    known to its client; `done`: samples that are complete; `cached`: tokens of the prompt that were
    found in the cache."""

    job: SampleJob
    snapshot: Snapshot
    request: Request | None = None
    drawn: Counter[int] = field(default_factory=Counter)
    posted: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)
    scoring: Iterator[Scores | None] = field(default_factory=lambda: iter(()))
    scores: Scores | None = None
    cached: int = 0

    @property
    def complete(self) -> bool:
        """Whether the scores and answers that the request asked for are all done."""
        scored = self.job.scoring is None or self.scores is not None
        return scored and len(self.done) == self.job.num_answers


@dataclass
class Totals:
    """Counts of a tenant since the server began: tokens sampled, prompt tokens, and prompt tokens
    that were found in the cache."""

    sampled: int = 0
    prompt: int = 0
    cached: int = 0


class Device:
    """An engine that runs in a thread. `deliver` is called there with pairs of a `post` and an
    event, and brings them to the main thread."""

    weights_change = False
    """Whether the weights of the model itself change while it serves."""

    def __init__(
        self, engine: Engine, deliver: Deliver, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine, self._deliver, self._clock = engine, deliver, clock
        self.snapshots = Snapshots(engine.model)
        self.totals = defaultdict[str, Totals](Totals)
        self.steps = 0
        """The number of steps that the engine has done."""
        self.failure: BaseException | None = None
        """The error that ended the thread, if `stop` did not: a fault of the server's."""
        self._inbox: queue.SimpleQueue[SampleJob | WorkJob | _Cancel | _Stop] = queue.SimpleQueue()
        self._samples, self._work = Turns[SampleJob](), Turns[WorkJob]()
        self._open: dict[SampleJob, _Open] = {}
        self._by_request: dict[Request, _Open] = {}
        self._scoring = deque[_Open]()  # requests whose prompts are scored, which take turns
        self._alone = deque[_Open]()  # to be run again, each without the others
        self._begun = dict[WorkJob, Generator[None, None, object]]()  # work, and what is left of it
        self._samples_until = 0.0  # no work begins before this time while there are samples
        self._barrier: WorkJob | None = None  # the work that samples of `_later` came after
        self._later = list[SampleJob]()
        self._outbox: list[tuple[Post, Event]] = []
        self._stopped: Failed | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    # the main thread's side

    def start(self) -> None:
        """Start the thread of the engine."""
        self._thread.start()

    def submit(self, job: SampleJob | WorkJob) -> None:
        """Give the thread a job, whose events are posted by its `post`."""
        self._inbox.put(job)

    def cancel(self, job: SampleJob) -> None:
        """Cancel a request for which no client waits any more; its memory is freed before the next
        step."""
        self._inbox.put(_Cancel(job))

    def stop(self, failed: Failed = STOPPING) -> None:
        """Answer all jobs that are open or wait with `failed`, and end the thread."""
        self._inbox.put(_Stop(failed))

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and has not failed."""
        return self._thread.is_alive() and self.failure is None

    @property
    def num_open(self) -> int:
        """The number of requests in the engine, or on their way to it."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """The number of jobs that wait for their turn."""
        return len(self._samples) + len(self._later) + len(self._work) + self._inbox.qsize()

    # the thread

    def _run(self) -> None:
        try:
            while self._stopped is None:
                self._receive(wait=True)
                self._do_work()
                self._admit()
                self._score()
                self._step()
                self._send()
        except BaseException as error:
            self.failure, self._stopped = error, _FAULT
            raise
        finally:
            self._end()

    def _receive(self, wait: bool) -> None:
        """Take in the jobs that came; where there is nothing to do, and it may `wait`, wait for
        one."""
        idle = wait and not (self._open or self._samples or self._work)
        while idle or not self._inbox.empty():
            job, idle = self._inbox.get(), False
            if isinstance(job, SampleJob):
                if self._barrier is None:
                    self._samples.put(job)
                else:
                    self._later.append(job)
            elif isinstance(job, WorkJob):
                self._work.put(job)
                self._barrier = self._barrier or (job if job.alone else None)
            elif isinstance(job, _Cancel):
                self._drop(job.job)
            else:
                self._stopped = job.failed
                return

    def _drop(self, job: SampleJob) -> None:
        if job in self._later:
            self._later.remove(job)
        elif not self._samples.remove(job) and (open_request := self._open.get(job)) is not None:
            self._close(open_request)

    def _do_work(self) -> None:
        """Do a piece of work, or a part of one, unless samples have had less time than the last
        piece or part took."""
        if not self._work or self._stopped is not None:
            return
        sampling, began = bool(self._open or self._samples), self._clock()
        if sampling and began < self._samples_until:
            return
        if not self._work.first().alone or not (self._begun or sampling):
            job = self._work.take()
        elif self._begun:
            job = next(iter(self._begun))
            self._work.remove(job)
        else:
            return
        if not self._do(job):
            self._work.put_first(job)
        now = self._clock()
        if sampling or not self._inbox.empty():  # what has waited meanwhile
            self._samples_until = now + (now - began)
        if job is self._barrier:
            self._barrier = next((work for work in self._work if work.alone), None)
            for sample in self._later:
                self._samples.put(sample)
            self._later = []

    def _do(self, job: WorkJob) -> bool:
        """Do a piece of work, or its next part; return whether all of it is done."""
        try:
            result = self._begun.pop(job, None) or job.work()
            if isinstance(result, Generator):
                try:
                    next(result)
                except StopIteration as end:
                    result = end.value
                else:
                    self._begun[job] = result
                    return False
            self._post(job.post, Done(result))
        except Exception as error:  # a fault of this piece of work, and of nothing else
            self._post(job.post, _failed(error))
        return True

    def _admit(self) -> None:
        """Give the engine as many requests as it can run at once."""
        if self._stopped is not None:
            return
        if self._alone:
            if not self._by_request:
                self._begin(self._alone.popleft())
            return
        running = sum(_room_of(opened.job) for opened in self._open.values())
        while self._samples:
            running += _room_of(self._samples.first())
            if self._open and running > self.engine.max_sequences:
                return
            job = self._samples.take()
            try:
                opened = _Open(job, self.snapshots.hold(job.adapter))
            except IsobitError as error:  # the adapter was removed meanwhile
                self._post(job.post, Failed(404, str(error)))
                continue
            self._open[job] = opened
            if job.scoring is not None:
                served = opened.snapshot.served
                opened.scoring = scores_in_parts(self.engine.model, job.prompt, served, job.scoring)
                self._scoring.append(opened)
            elif self._begin(opened):
                self._post(job.post, Begun(opened.snapshot.version))

    def _score(self) -> None:
        """Compute a part of the scores of one prompt; after the last part, begin its request."""
        if self._stopped is not None or not self._scoring:
            return
        opened = self._scoring.popleft()
        job = opened.job
        try:
            opened.scores = opened.scores or next(opened.scoring)
        except Exception as error:  # a fault of this request, and of no other
            self._close(opened)
            self._post(job.post, _failed(error))
            return
        if opened.scores is None or (job.sampled and self._alone):
            self._scoring.append(opened)
        elif not job.sampled or self._begin(opened):
            self._post(job.post, Begun(opened.snapshot.version))
            self._post(job.post, Scored(opened.scores))
            if not job.sampled:
                self._close(opened)

    def _begin(self, opened: _Open) -> bool:
        """Give the engine a request; return whether it took it. A refusal is posted."""
        job = opened.job
        try:
            request = self.engine.submit(
                *(list(job.prompt), job.sampling),
                adapter=opened.snapshot.served,
                salt=(job.tenant, job.salt),
            )
        except IsobitError as error:
            self._close(opened)
            self._post(job.post, Failed(400, str(error)))
            return False
        opened.request, self._by_request[request] = request, opened
        opened.drawn.clear()
        return True

    def _step(self) -> None:
        if self._stopped is not None or not self._by_request:
            return
        try:
            finished = self.engine.step(self._heard)
        except NonFiniteError as error:
            self._isolate(error)
            return
        except Forbidden as error:  # nothing of the step was computed
            opened = next(o for request, o in self._by_request.items() if request is error.request)
            self._count_prompts()
            self._close(opened)
            self._post(opened.job.post, Failed(400, str(error)))
            return
        self.steps += 1
        self._count_prompts()
        for request, completion in finished:
            opened = self._by_request[request]
            if completion.sample_index in opened.done:
                continue
            opened.done.add(completion.sample_index)
            self._post(opened.job.post, Done(completion, opened.cached))
            if opened.complete:
                self._close(opened)

    def _count_prompts(self) -> None:
        """Count the prompts that were begun in the last step."""
        for request, cached in self.engine.scheduler.begun:
            opened = self._by_request[request]
            opened.cached = cached
            self.totals[opened.job.tenant].prompt += len(opened.job.prompt)
            self.totals[opened.job.tenant].cached += cached

    def _heard(self, request: Request, sample: int, token: int, logprob: float, top: Top) -> None:
        opened = self._by_request[request]
        self.totals[opened.job.tenant].sampled += 1
        opened.drawn[sample] += 1
        if opened.job.streamed and opened.drawn[sample] > opened.posted[sample]:
            opened.posted[sample] += 1
            self._post(opened.job.post, Token(sample, token, logprob, top))

    def _isolate(self, error: NonFiniteError) -> None:
        """Begin all open requests again, each alone; a request that ran alone already is at fault,
        and fails."""
        running = dict(self._by_request)
        if len(running) == 1:
            (opened,) = running.values()
            self._close(opened)
            self._post(opened.job.post, Failed(500, str(error)))
            return
        for request, opened in running.items():
            self.engine.cancel(request)
            del self._by_request[request]
            self._alone.append(opened)

    def _close(self, opened: _Open) -> None:
        """Close a request: cancel it in the engine, and release its snapshot."""
        if opened.request is not None:
            self.engine.cancel(opened.request)
            self._by_request.pop(opened.request, None)
        for waiting in (self._scoring, self._alone):
            if opened in waiting:
                waiting.remove(opened)
        del self._open[opened.job]
        self.snapshots.release(opened.snapshot)

    def _post(self, post: Post, event: Event) -> None:
        self._outbox.append((post, event))

    def _send(self) -> None:
        if self._outbox:
            self._deliver(self._outbox)
            self._outbox = []

    def _end(self) -> None:
        """Answer all jobs that are left with an error."""
        failed = self._stopped or STOPPING
        while not self._inbox.empty():
            job = self._inbox.get()
            if isinstance(job, (SampleJob, WorkJob)):
                self._post(job.post, failed)
        for job in (*self._samples, *self._later, *self._work):
            self._post(job.post, failed)
        while self._begun:
            self._begun.popitem()[1].close()
        for opened in list(self._open.values()):
            if self.failure is None:
                self._close(opened)
            self._post(opened.job.post, failed)
        self._send()


def _room_of(job: SampleJob) -> int:
    """Return how many of the sequences that run at once a request takes."""
    return max(job.num_answers, 1)


def _failed(error: Exception) -> Failed:
    """Return the event for an error that ended a job; a fault of the server's is logged, and not
    shown."""
    if isinstance(error, IsobitError):  # a full disk is not the client's
        return Failed(500 if isinstance(error, RunFailed) else 400, str(error))
    _LOG.error("a piece of work failed", exc_info=error)
    return _FAULT

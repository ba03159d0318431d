"""A device without a thread: the owner of the engine runs it, a step at a time, between its own
work; for a model whose weights change meanwhile, as those of a training run do.

Nothing of a request is sent before it is complete. So one that is open when the weights change can
begin again with the new ones, and every response is of one version of the weights
(tests/training/test_serve.py). One that was begun `MOST_BEGINNINGS` times fails, since it takes
longer than the weights last.
"""

import logging
from collections import Counter

from isobit.engine.engine import Engine
from isobit.serve.device import STOPPING, Deliver, Device, _Open
from isobit.serve.jobs import Begun, Done, Event, Failed, Post, SampleJob, Turns, WorkJob

MOST_BEGINNINGS = 8
_LOG = logging.getLogger("isobit.serve")
_TOO_LONG = Failed(
    503,
    f"the weights changed {MOST_BEGINNINGS} times before the answer was complete; ask for fewer "
    "tokens, or give requests a larger part of the run's time (serve.share)",
)


class PumpedDevice(Device):
    """A device that its owner runs, a step at a time. All but `submit`, `cancel` and `stop` is for
    the owner's thread."""

    weights_change = True

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        super().__init__(engine, deliver)
        self.version = 0
        """Of the weights, which responses tell; the owner sets it with new ones."""
        self.answered = Counter[str]()
        """Requests and tokens of complete answers."""
        self._kept: dict[Post, list[Event]] = {}  # of requests that are not complete
        self._beginnings = Counter[SampleJob]()
        self._started = False

    def start(self) -> None:
        """Accept requests from now on."""
        self._started = True

    def join(self, seconds: float | None = None) -> None:
        """Return at once: the device has no thread."""

    def submit(self, job: SampleJob | WorkJob) -> None:
        """Ask for something. Work between steps is refused: its result would name no version."""
        if isinstance(job, WorkJob):
            job.post(Failed(400, "this is not offered by a run that trains"))
        else:
            super().submit(job)

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._started and self._stopped is None

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return self.alive and bool(self._open or self._samples or not self._inbox.empty())

    def pump(self, admit: bool = True) -> None:
        """Do a step of the open requests, and of waiting ones where these may begin. A fault ends
        serving, and nothing else."""
        try:
            self._receive(wait=False)
            if admit:
                self._admit()
            self._score()
            self._step()
            self._send()
        except Exception as error:
            _LOG.error("requests are not answered any more", exc_info=error)
            self.failure = error
            self.end(Failed(500, "the server failed; its log says why"))

    def begin_again(self) -> None:
        """Begin all open requests again, with the next weights: these are about to change."""
        if not self._open:
            return
        begun = {job: self._beginnings[job] + 1 for job in self._open}
        waiting = list(self._samples)
        for opened in list(self._open.values()):
            self._close(opened)
        self._samples = Turns[SampleJob]()
        for job in (*begun, *waiting):
            self._beginnings[job] = begun.get(job, 0) or self._beginnings[job]
            if self._beginnings[job] < MOST_BEGINNINGS:
                self._samples.put(job)
            else:
                del self._beginnings[job]
                self._post(job.post, _TOO_LONG)
        self._send()

    def end(self, failed: Failed = STOPPING) -> None:
        """Answer all that is left with `failed`; nothing is begun after it."""
        self._stopped = self._stopped or failed
        for request in list(self._by_request):
            self.engine.cancel(request)
        self._end()
        self._open.clear()
        self._samples = Turns[SampleJob]()

    def stop(self, failed: Failed = STOPPING) -> None:
        """Answer requests that came after `end` too: the server has ended."""
        if self._stopped is None:
            super().stop(failed)
        else:
            self._end()

    def _drop(self, job: SampleJob) -> None:
        super()._drop(job)
        self._beginnings.pop(job, None)

    def _post(self, post: Post, event: Event) -> None:
        if isinstance(event, Failed):
            self._kept.pop(post, None)
            super()._post(post, event)
            return
        sent = Begun(self.version) if isinstance(event, Begun) else event
        self._kept.setdefault(post, []).append(sent)

    def _close(self, opened: _Open) -> None:
        super()._close(opened)
        job = opened.job
        events = self._kept.pop(job.post, [])
        del self._beginnings[job]
        if not opened.complete:
            return
        self.answered["requests"] += 1
        for event in events:
            if isinstance(event, Done):
                self.answered["tokens"] += len(event.completion.token_ids)
            super()._post(job.post, event)

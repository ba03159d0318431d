"""Requests to worker processes and their replies, in a thread, while more requests are still made.

Which request goes to which worker, and when, depends on time; the replies do not. Left out: what a
request means.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from isobit.errors import IsobitError
from isobit.tasks.rewards.worker_process import Reply, WorkerProcess, collect

_MOMENT_S = 0.001


class Exchange:
    """Requests and their replies, in a thread that runs from the first request to `finish` or
    `cancel`.

    The thread mostly waits: the work is the processes'. `submit`, `finish` and `cancel` are for one
    other thread.
    """

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self.workers = workers
        self.replies: dict[int, Reply] = {}
        self._requests: list[tuple[bytes, float]] = []
        self._waiting: deque[int] = deque()
        self._busy: dict[WorkerProcess, int] = {}
        self._queue: SimpleQueue[tuple[bytes, float] | None] = SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._cancelled = False
        self._error: IsobitError | None = None
        self._periods: list[tuple[float, float]] = []
        # before `join`, after which CPython 3.11 takes a thread for ended where Ctrl-C interrupts it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="isobit-rewards", daemon=True)
        self._thread.start()

    def submit(self, request: bytes, deadline_s: float) -> None:
        """Queue a request, to be answered within `deadline_s` seconds from when a worker begins it.
        Returns at once."""
        self._queue.put((request, deadline_s))
        os.write(self._wake, b"+")

    def finish(self, meanwhile: Callable[[], None] | None = None) -> tuple[list[Reply], float]:
        """Wait for all replies: (replies in the order of the requests, seconds of work before this
        call); `meanwhile` is called over and over until they are there.

        Raises IsobitError if a worker that died could not be replaced.
        """
        began = time.monotonic()
        self._queue.put(None)
        os.write(self._wake, b"+")
        while meanwhile is not None and not self._ended.is_set():
            meanwhile()
            self._ended.wait(_MOMENT_S)
        self._ended.wait()
        self._thread.join()
        if self._error is not None:
            raise self._error
        replies = [self.replies[i] for i in range(len(self._requests))]
        return replies, sum(max(0.0, min(end, began) - start) for start, end in self._periods)

    def cancel(self) -> None:
        """Stop the thread, killing the workers that are at work. May be called again, and after
        `finish`."""
        if self._wake < 0:
            return
        self._cancelled = True
        with contextlib.suppress(BrokenPipeError):
            os.write(self._wake, b"+")
        self._ended.wait()
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)
        self._wake = self._woken = -1

    def _run(self) -> None:
        last, began = False, None
        try:
            while True:
                last = self._take() or last
                if (
                    self._cancelled
                ):  # looked at after what woke this thread was read, before it waits again
                    break
                if self._waiting or self._busy:
                    began = time.monotonic() if began is None else began
                    self._turn()
                    continue
                if began is not None:
                    self._periods.append((began, time.monotonic()))
                    began = None
                if last:
                    break
                select.select([self._woken], [], [])
        except IsobitError as error:
            self._error = error
        finally:
            for worker in self._busy:  # it still owes a reply
                worker.kill()
            self._ended.set()

    def _turn(self) -> None:
        """Give idle workers requests, and wait until one replies, is late or dies, or this thread
        is woken.

        A worker that dies on the way is replaced. Raises IsobitError if the replacement cannot load
        its functions.
        """
        for worker in self.workers:
            if self._waiting and worker not in self._busy:
                worker.revive()
                index = self._waiting.popleft()
                worker.begin(*self._requests[index])
                self._busy[worker] = index
        for worker, reply in collect(list(self._busy), self._woken):
            self.replies[self._busy.pop(worker)] = reply

    def _take(self) -> bool:
        """Move what was submitted into the queue of calls. Return whether the last request has
        come."""
        if select.select([self._woken], [], [], 0)[0]:
            os.read(self._woken, 4096)
        with contextlib.suppress(Empty):
            while (request := self._queue.get_nowait()) is not None:
                self._waiting.append(len(self._requests))
                self._requests.append(request)
            return True
        return False

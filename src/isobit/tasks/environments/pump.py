"""The thread between a rollout and its environments' processes: it passes questions on, takes
replies, and kills a process that does not come back.

An episode stays with one worker. The choice of the worker and the time of a reply depend on timing;
the contents of replies do not. A worker itself answers a question that is late; if a worker is
silent for GRACE_S seconds more, dies, or writes something that is not a reply, each of its episodes
gets a reply with this problem, and another worker replaces it. Any other error ends the thread, and
is raised where replies are taken. Left out: what questions and replies mean.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from isobit.data.turns import Reply, Step
from isobit.errors import IsobitError
from isobit.tasks.environments.replies import MOST_BYTES, message_of, reply_of
from isobit.tasks.workers.process import Process

START_DEADLINE_S = 300.0  # importing an environment may import a large library
GRACE_S = 5.0
"""Seconds after its deadline in which a worker may still answer by itself."""


@dataclass
class Worker:
    """A process, the episodes that are open in it, and the questions that it has not answered:
    `owed` has their deadlines by serial number. `ready`: the process has loaded everything; `lost`:
    a call in it has not come back, so that it gets new episodes last, and is replaced when it has
    no episodes."""

    process: Process
    load: bytes
    open: set[int] = field(default_factory=set)
    owed: dict[int, float] = field(default_factory=dict)
    received: bytearray = field(default_factory=bytearray)
    ready: bool = False
    lost: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def due(self) -> float | None:
        """The time (`time.monotonic`) after which the worker is late; None if it owes nothing."""
        if not self.ready:
            return self.started + START_DEADLINE_S
        return min(self.owed.values()) + GRACE_S if self.owed else None

    def restart(self) -> None:
        """Kill the process and start another in its place. Raises IsobitError."""
        self.process.kill()
        self.open, self.owed, self.lost, self.ready = set(), {}, False, False
        self.started = time.monotonic()
        self.received.clear()
        self.process.start()
        self.process.send(self.load)


@dataclass(frozen=True)
class Question:
    """A question about the episode with a serial number. `first`: the question opens the episode;
    `last`: it ends the episode."""

    serial: int
    body: bytes
    first: bool = False
    last: bool = False


class Pump:
    """The thread, from its making to `close`. `replies`: pairs of a reply, whose key is the serial
    number, and whether it replaces the reply of a worker that has died; an exception: the error
    that ended the thread."""

    def __init__(self, workers: Sequence[Worker], deadline_s: float) -> None:
        self.replies: SimpleQueue[tuple[Reply, bool] | BaseException] = SimpleQueue()
        self._workers, self._deadline_s = workers, deadline_s
        self._questions: deque[Question] = deque()
        self._places: dict[int, Worker | None] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="isobit-environments", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Pass a question on to its worker. Returns at once."""
        self._questions.append(question)
        self._signal()

    def close(self) -> None:
        """Stop the thread. The workers stay."""
        if self._closed:
            return
        self._closed = True
        self._signal()
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will wake
            os.write(self._wake, b"+")

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wait()
                while self._questions and not self._closed:
                    self._pass_on(self._questions.popleft())
        except BaseException as error:
            self.replies.put(error)

    def _wait(self) -> None:
        """Wait until there is something to do; read what the workers write, and kill workers that
        are late."""
        poll, owners = select.poll(), dict[int, Worker]()
        poll.register(self._woken, select.POLLIN)
        for worker in self._workers:
            owners[worker.process.read_end] = worker
            poll.register(worker.process.read_end, select.POLLIN)
            if worker.process.unsent:
                poll.register(worker.process.write_end, select.POLLOUT)
        due = [worker.due for worker in self._workers if worker.due is not None]
        wait_ms = max(0.0, min(due) - time.monotonic()) * 1000 + 1 if due else None
        happened = {fd for fd, _ in poll.poll(wait_ms)}
        if self._woken in happened:
            os.read(self._woken, 65536)
        for descriptor, worker in owners.items():
            worker.process.push()
            if descriptor in happened:
                self._take(worker)
            elif worker.due is not None and time.monotonic() > worker.due:
                reason = f"its process did not answer within {self._deadline_s + GRACE_S:g} s"
                self._died(worker, f"{reason} and was killed{worker.process.last_output()}")

    def _take(self, worker: Worker) -> None:
        """Read what a worker has written and handle its whole lines; each byte is searched once."""
        try:
            arrived = worker.process.receive()
        except EOFError:
            self._died(worker, worker.process.bury())
            return
        worker.received += arrived
        if b"\n" not in arrived and len(worker.received) <= MOST_BYTES:
            return
        *lines, rest = bytes(worker.received).split(b"\n")
        worker.received = bytearray(rest)
        try:
            if len(rest) > MOST_BYTES:
                raise ValueError("too long")
            for line in lines:
                self._heard(worker, line)
        except ValueError:  # code in the worker wrote into the pipe
            wrote = "its process wrote what is not a reply into the pipe of its replies"
            self._died(worker, f"{wrote}, and was killed{worker.process.last_output()}")

    def _heard(self, worker: Worker, line: bytes) -> None:
        """Handle a line of a worker: put its reply among `replies`, or note that it has loaded.
        Raises ValueError for a line that is not a reply, and IsobitError if a worker that was
        started again cannot load its code."""
        message = message_of(line)
        if worker.ready:
            reply, lost = reply_of(message)
            worker.lost |= lost
            if worker.owed.pop(reply.key, None) is not None:
                self.replies.put((reply, False))
        elif "error" in message:
            raise IsobitError(str(message["error"]))
        elif "loaded" in message:
            worker.ready = True
            due = time.monotonic() + self._deadline_s
            worker.owed = dict.fromkeys(worker.owed, due)
        elif "loading" not in message:
            raise ValueError("not a reply")

    def _died(self, worker: Worker, why: str) -> None:
        """Start another worker in the place of a dead one, and put a reply with the reason `why`
        for each episode that waits; its other episodes get theirs when they ask. Raises IsobitError
        if the worker died before it had loaded everything."""
        if not worker.ready:
            raise IsobitError(f"environment: {why} while it was loaded")
        for serial in worker.open:
            self._places[serial] = None
        owed = list(worker.owed)
        worker.restart()
        for serial in owed:
            self._say_lost(serial, why)

    def _pass_on(self, question: Question) -> None:
        if question.first:
            chosen = min(self._workers, key=lambda worker: (worker.lost, len(worker.open)))
            self._places[question.serial] = chosen
            chosen.open.add(question.serial)
        worker = self._places.get(question.serial)
        if question.last:
            self._places.pop(question.serial, None)
        if worker is None:
            if not question.last:
                self._say_lost(question.serial, "its process has ended")
            return
        if not worker.owed:
            worker.process.mark_output()
        worker.process.send(question.body)
        if not question.last:
            worker.owed[question.serial] = time.monotonic() + self._deadline_s
            return
        worker.open.discard(question.serial)
        worker.owed.pop(question.serial, None)
        if worker.lost and not worker.open:
            worker.restart()

    def _say_lost(self, serial: int, why: str) -> None:
        self.replies.put((Reply(serial, Step(done=True), problem=why), True))

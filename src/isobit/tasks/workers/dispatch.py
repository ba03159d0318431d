"""Requests to worker processes and their replies, in a thread, while more requests are made.

A request opens a place in a worker, belongs to a place that is open, or ends one; a worker has at
most `Program.capacity` places. Which worker, and when, depends on time; the contents of replies do
not. A worker that is late, dies, or writes what is not a reply is killed with everything that it
started: each request that it owes gets a `Death`, and the next place that is opened starts it
again. Left out: what requests and replies mean.

A line is a JSON object, each way:

    {"load": ...}       -> {"loading": what}, any number of them, then {"loaded": ...} or {"error": line}
    {"key": k, ...}     -> {"key": k, ...}, with "lost": true if a call there has not come back
"""

import contextlib
import json
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from isobit.errors import IsobitError
from isobit.tasks.workers.child import MOST_BYTES
from isobit.tasks.workers.process import Process
from isobit.tasks.workers.variables import OF_REWARDS, hint

START_DEADLINE_S = 300.0  # the import of a user's code may import a large library
T = TypeVar("T")


@dataclass(frozen=True)
class Death:
    """The end of a request without a reply: its worker was killed, since nothing came in time, or
    ended by itself."""

    text: str


@dataclass(frozen=True)
class Program(Generic[T]):
    """A module that workers run, and its limits. `noun`, `label`, `imported` (how it is loaded) and
    `late` (that nothing came in a time): words of errors; `load`: the first message;
    `reply_of`: makes a reply of a message, and raises ValueError for another message; `grace_s`:
    after a deadline, in which a worker may still answer; `patience_s`: after which a line on stderr
    says what is still loaded."""

    module: str
    noun: str
    label: str
    load: Any
    reply_of: Callable[[Mapping[str, Any]], T]
    late: str
    imported: str = "loaded"
    variables: Sequence[str] = ()
    option: str = OF_REWARDS
    capacity: float = inf
    grace_s: float = 0.0
    patience_s: float = inf


@dataclass
class Request:
    """A line for a worker. `first`: opens the place `key`; `last`: ends it, after the reply if it
    has one. `deadline_s`: for the reply; None: no reply follows."""

    key: int
    body: bytes
    deadline_s: float | None
    first: bool = False
    last: bool = False
    expires: float = inf


class Worker(Process):
    """A process of a program, the places that are `open` in it, and the requests that it has not
    answered (`owed`). `ready`: it has loaded everything (`loaded`: its word about it); `lost`: a
    call in it has not come back, so that new places come to it last, and it is killed when it has
    none."""

    def __init__(self, program: Program[Any]) -> None:
        super().__init__(program.module, program.noun, program.variables)
        self.program = program
        self._load = json.dumps({"load": program.load}).encode() + b"\n"
        self.loaded: Any = None
        self._reset()

    def _reset(self) -> None:
        self.open: set[int] = set()
        self.owed: dict[int, Request] = {}
        self._received = bytearray()
        self.ready = self.lost = False
        self.loading = "its code"
        self.impatient = self._until = inf

    def spawn(self) -> None:
        """Start the process and ask it to load everything, without waiting for it."""
        self.start()
        self.mark_output()
        self._until = time.monotonic() + START_DEADLINE_S
        self.impatient = time.monotonic() + self.program.patience_s
        self.send(self._load)

    def drop(self) -> dict[int, Request]:
        """Kill the process, and return the requests that it owed."""
        self.kill()
        owed = self.owed
        self._reset()
        return owed

    @property
    def due(self) -> float:
        """The time (`time.monotonic`) after which the worker is late."""
        expires = (request.expires for request in self.owed.values())
        return min(expires, default=inf) if self.ready else self._until

    def put(self, request: Request) -> None:
        """Send a request, once everything is loaded; it is to be answered within its seconds."""
        if self.ready and not self.owed:
            self.mark_output()
        if request.deadline_s is not None:
            request.expires = time.monotonic() + request.deadline_s + self.program.grace_s
            self.owed[request.key] = request
        if self.ready:
            self.send(request.body)

    def lines(self) -> list[bytes]:
        """Read what the process has written, and return the whole lines; each byte is searched
        once. Raises EOFError when it is gone, and ValueError for a line that is too long."""
        arrived = self.receive()
        self._received += arrived
        if b"\n" not in arrived and len(self._received) <= MOST_BYTES:
            return []
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > MOST_BYTES:
            raise ValueError("too long")
        return lines

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of a worker that is loading. Raises IsobitError if it cannot load its
        code, and ValueError for another message."""
        if "error" in message:
            program, text = self.program, str(message["error"])
            self.drop()
            raise IsobitError(text + hint(text, program.variables, option=program.option))
        if "loaded" in message:
            self.ready, self.loaded = True, message["loaded"]
            owed, self.owed = self.owed, {}
            for request in owed.values():
                self.put(request)
        elif "loading" in message:
            self.loading = str(message["loading"])
            self.impatient = time.monotonic() + self.program.patience_s
        else:
            raise ValueError("not a reply")


class Dispatcher(Generic[T]):
    """Requests to workers, in a thread that runs from the first one to `close`. `ask`, `next` and
    `close` are for one other thread."""

    def __init__(self, workers: Sequence[Worker], name: str) -> None:
        self._workers = workers
        self._requests: deque[Request] = deque()
        self._replies: SimpleQueue[tuple[int, T | Death] | BaseException] = SimpleQueue()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._closed = False
        self._work: tuple[float, float | None] = (0.0, None)
        # before `join`, after which CPython 3.11 takes a thread for ended where Ctrl-C interrupts it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def load(self) -> list[Any]:
        """Start the workers, and return what each says that it has loaded; print a line on stderr
        about what takes long. Raises IsobitError."""
        for worker in self._workers:
            worker.spawn()
        # one that has loaded may have died again: it is started when it is next needed
        while slow := next((w for w in self._workers if w.loaded is None), None):
            self._wait(slow.impatient)
            if slow.loaded is None and time.monotonic() > slow.impatient:
                limit = f"within {START_DEADLINE_S:g} s{slow.last_output()}"
                waiting = f"{slow.program.label}: waiting for {slow.loading}"
                print(f"{waiting}; it has to load {limit}", file=sys.stderr)
                slow.impatient = inf
        return [worker.loaded for worker in self._workers]

    def ask(self, request: Request) -> None:
        """Pass a request on to its worker. Returns at once."""
        if self._thread.ident is None:
            self._thread.start()
        self._requests.append(request)
        self._signal()

    def next(self, wait_s: float | None = None) -> tuple[int, T | Death] | None:
        """Return the next (key, reply), or None if none comes within `wait_s` seconds. Raises
        IsobitError if a worker that died cannot be started again, and any other error that ended
        the thread."""
        try:
            reply = self._replies.get(timeout=wait_s)
        except Empty:
            return None
        if isinstance(reply, BaseException):
            self._replies.put(reply)  # for the next call
            raise reply
        return reply

    @property
    def worked_s(self) -> float:
        """The seconds in which some worker owed a reply, until now."""
        seconds, since = self._work
        return seconds if since is None else seconds + time.monotonic() - since

    def close(self) -> None:
        """Stop the thread, killing the workers that owe replies. May be called again."""
        if self._wake < 0:
            return
        self._closed = True
        self._signal()
        if self._thread.ident is not None:
            self._ended.wait()
            self._thread.join()
        os.close(self._wake)
        os.close(self._woken)
        self._wake = self._woken = -1

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will wake
            os.write(self._wake, b"+")

    def _run(self) -> None:
        try:
            while True:
                self._wait(inf)
                if self._closed:  # looked at after what woke this thread was read
                    break
                while self._requests and self._pass_on(self._requests[0]):
                    self._requests.popleft()
                seconds, since = self._work
                if any(worker.owed for worker in self._workers) != (since is not None):
                    now = time.monotonic()
                    self._work = (seconds, now) if since is None else (seconds + now - since, None)
        except BaseException as error:
            self._replies.put(error)
        finally:
            for worker in self._workers:
                if worker.owed:
                    worker.drop()
            self._ended.set()

    def _wait(self, until: float) -> None:
        """Wait until there is something to do, or `until`; read what the workers write, and kill
        workers that are late."""
        alive = [worker for worker in self._workers if worker.alive]
        interests = {fd: mask for worker in alive for fd, mask in worker.interests.items()}
        until = min([until, *(worker.due for worker in alive)])
        happened = _poll({**interests, self._woken: select.POLLIN}, until - time.monotonic())
        if self._woken in happened:
            os.read(self._woken, 65536)
        for worker in alive:
            worker.push()
            if worker.read_end in happened:
                self._read(worker)
            elif time.monotonic() > worker.due:
                self._is_late(worker)

    def _read(self, worker: Worker) -> None:
        try:
            for line in worker.lines():
                message = message_of(line)
                if worker.ready:
                    self._take_reply(worker, message)
                else:
                    worker.take(message)
        except EOFError:
            ended = worker.bury()
            self._died(worker, ended, f"{ended} while it was {worker.program.imported}")
        except ValueError:  # code in the worker wrote into the pipe
            worker.kill()
            wrote = "wrote what is not a reply into the pipe of"
            self._died(
                worker,
                f"its process {wrote} its replies, and was killed{worker.last_output()}",
                f"{worker.loading} {wrote} replies while it was loaded; it may write to stdout and "
                "its own files",
            )

    def _take_reply(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Put a worker's reply among the replies. Raises ValueError for another message."""
        key, lost = message.get("key"), message.get("lost", False)
        if type(key) is not int or not isinstance(lost, bool):
            raise ValueError("not a reply")
        reply = worker.program.reply_of(message)
        worker.lost |= lost
        request = worker.owed.pop(key, None)
        if request is not None:
            if request.last:
                _end(worker, key)
            self._replies.put((key, reply))

    def _is_late(self, worker: Worker) -> None:
        worker.kill()
        deadlines, printed = (
            [r.deadline_s or 0.0 for r in worker.owed.values()],
            worker.last_output(),
        )
        late_s = max(deadlines, default=0.0) + worker.program.grace_s
        self._died(
            worker,
            worker.program.late.format(late_s) + printed,
            f"{worker.loading} was not loaded within {START_DEADLINE_S:g} s{printed}",
        )

    def _died(self, worker: Worker, text: str, loading: str) -> None:
        """Put the death of a worker among the replies, for each that it owed. Raises IsobitError,
        with the text `loading`, if it had not loaded its code."""
        ready, owed = worker.ready, worker.drop()
        if not ready:
            raise IsobitError(f"{worker.program.label}: {loading}")
        for key in owed:
            self._replies.put((key, Death(text)))

    def _pass_on(self, request: Request) -> bool:
        """Send a request to its worker, started again if it has died. Return False if it opens a
        place and no worker has room. Raises IsobitError."""
        if request.first:
            room = [w for w in self._workers if len(w.open) < w.program.capacity]
            if not room:
                return False
            worker = min(room, key=lambda worker: (worker.lost, len(worker.open)))
            if not worker.alive:
                worker.spawn()
            worker.open.add(request.key)
        else:
            homes = [worker for worker in self._workers if request.key in worker.open]
            if not homes:
                if request.deadline_s is not None:
                    self._replies.put((request.key, Death("its process has ended")))
                return True
            worker = homes[0]
        worker.put(request)
        if request.deadline_s is None:
            worker.owed.pop(request.key, None)
            _end(worker, request.key)
        return True


def message_of(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raises ValueError for another line."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def _end(worker: Worker, key: int) -> None:
    worker.open.discard(key)
    if worker.lost and not worker.open:
        worker.drop()


def _poll(interests: Mapping[int, int], timeout_s: float) -> set[int]:
    poll = select.poll()
    for descriptor, mask in interests.items():
        poll.register(descriptor, mask)
    wait_ms = None if timeout_s == inf else max(0.0, math.ceil(max(0.0, timeout_s) * 1000))
    return {descriptor for descriptor, _ in poll.poll(wait_ms)}

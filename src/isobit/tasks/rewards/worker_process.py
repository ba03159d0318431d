"""Workers of reward functions as their parent sees them: fed with one request at a time, held to a
deadline, killed with everything they started.

Whatever a worker does (hang, fork, exit, be killed), its group is killed as a whole and reaped
(`tasks/workers/process.py`), and a new one takes its place before the next request.
"""

import json
import math
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.tasks.workers.process import Process
from isobit.tasks.workers.variables import hint

START_DEADLINE_S = 300.0  # importing a reward function may import a large library


@dataclass(frozen=True)
class Death:
    """A request that has no reply: the worker `hung` past the deadline and was killed, or it ended
    by itself."""

    hung: bool
    text: str


Reply = dict[str, Any] | Death


class WorkerProcess(Process):
    """A worker process that has the given functions loaded; dead between a `kill` and the next
    `revive`."""

    def __init__(self, references: Sequence[str], variables: Sequence[str] = ()) -> None:
        super().__init__("isobit.tasks.rewards.worker", "reward function", variables)
        self._load = json.dumps({"load": list(references)}).encode() + b"\n"
        self._references = references
        self._received = bytearray()
        self.deadline_s = self.expires = 0.0
        self.spawn()

    def spawn(self) -> None:
        """Start the process and ask it to load the functions, without waiting for it."""
        self.start()
        self.begin(self._load, START_DEADLINE_S)

    def loaded(self) -> list[dict[str, Any]]:
        """Wait for a spawned worker; what it says about each function. Raises IsobitError if it
        cannot load them."""
        reply = self._reply()
        if isinstance(reply, Death):
            names = " and ".join(repr(reference) for reference in self._references)
            raise IsobitError(f"reward function {names}: {reply.text} while it was imported")
        if "error" in reply:
            self.kill()
            raise IsobitError(reply["error"] + hint(reply["error"], self._variables))
        return reply["loaded"]

    def revive(self) -> None:
        """Make sure that it can take a request: replace it if it has died, or is not silent. Raises
        IsobitError."""
        if not self.ready:
            self.kill()
            self.spawn()
            self.loaded()

    def answer(self, request: bytes, deadline_s: float) -> Reply:
        """Send a request and return the reply. Raises IsobitError if the worker had died and its
        replacement cannot load the functions."""
        self.revive()
        self.begin(request, deadline_s)
        return self._reply()

    def _reply(self) -> Reply:
        through: list[tuple[WorkerProcess, Reply]] = []
        try:
            while not through:
                through = collect([self])
        finally:
            if not through:  # interrupted: it still owes a reply
                self.kill()
        return through[0][1]

    @property
    def ready(self) -> bool:
        """Whether it can take a request: it runs and its reply pipe is silent (neither ended nor
        written into)."""
        return self.alive and not _poll({self.read_end: select.POLLIN}, 0.0)

    @property
    def interests(self) -> dict[int, int]:
        """The descriptors that the worker waits for, with poll's event masks."""
        return {self.read_end: select.POLLIN} | (
            {self.write_end: select.POLLOUT} if self.unsent else {}
        )

    def begin(self, request: bytes, deadline_s: float) -> None:
        """Send a request, a line of JSON, to be answered within `deadline_s` seconds."""
        self._received.clear()
        self.mark_output()
        self.deadline_s, self.expires = deadline_s, time.monotonic() + deadline_s
        self.send(request)

    def pull(self) -> dict[str, Any] | None:
        """Read what the pipe has; return the reply once it is whole, else None. Raises EOFError
        when the worker is gone."""
        chunk = self.receive()
        self._received += chunk
        if not chunk.endswith(b"\n"):
            return None
        try:
            return json.loads(self._received)
        except ValueError:  # the function wrote into the pipe
            raise EOFError from None


def collect(
    busy: Sequence[WorkerProcess], wake: int | None = None
) -> list[tuple[WorkerProcess, Reply]]:
    """Wait until something happens to the workers, or `wake` can be read; the workers that are
    through, each with its reply. Kills those that are late."""
    wait = min(worker.expires for worker in busy) - time.monotonic()
    interests = {fd: mask for worker in busy for fd, mask in worker.interests.items()}
    happened = _poll(interests if wake is None else {**interests, wake: select.POLLIN}, wait)
    through: list[tuple[WorkerProcess, Reply]] = []
    for worker in busy:
        readable = worker.read_end in happened
        worker.push()
        try:
            reply: Reply | None = worker.pull() if readable else None
        except EOFError:
            reply = Death(False, worker.bury())
        if reply is None and not readable and time.monotonic() > worker.expires:
            worker.kill()
            reply = Death(
                True, f"no answer within {worker.deadline_s:g} s, killed{worker.last_output()}"
            )
        if reply is not None:
            through.append((worker, reply))
    return through


def _poll(interests: dict[int, int], timeout_s: float) -> set[int]:
    poll = select.poll()
    for descriptor, mask in interests.items():
        poll.register(descriptor, mask)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, math.ceil(timeout_s * 1000)))}

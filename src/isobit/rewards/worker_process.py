"""Worker processes as their parent sees them: started, fed, held to a deadline, killed with
everything they started.

A worker leads its own process group. Whatever it does (hang, fork, exit, be killed), the group is
killed as a whole and reaped, and a new one takes its place before the next request. Left out: a
descendant that leaves the group (setsid) is not followed, and nothing here confines malicious code.
"""

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from isobit.errors import IsobitError
from isobit.rewards.environment import environment, hint
from isobit.run.interpreter import module_command

START_DEADLINE_S = 300.0  # importing a reward function may import a large library
MAX_LOG_BYTES = 4 << 20  # of output between two `new_output`; then it is dropped


@dataclass(frozen=True)
class Death:
    """A request that has no reply: the worker `hung` past the deadline and was killed, or it ended
    by itself."""

    hung: bool
    text: str


Reply = dict[str, Any] | Death


class WorkerProcess:
    """One worker that has the given functions loaded; dead between a `kill` and the next
    `revive`."""

    def __init__(self, references: Sequence[str], variables: Sequence[str] = ()) -> None:
        self._load = json.dumps({"load": list(references)}).encode() + b"\n"
        self._references = references
        self._variables = variables
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        flags = fcntl.fcntl(self._log, fcntl.F_GETFL)
        fcntl.fcntl(
            self._log, fcntl.F_SETFL, flags | os.O_APPEND
        )  # or a truncation would leave a hole
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[int] = []
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._log_start = self._passed_on = self._dropped = 0
        self.deadline_s = self.expires = 0.0
        self.spawn()

    def spawn(self) -> None:
        """Start the process and ask it to load the functions, without waiting for it."""
        requests, to_worker = os.pipe()
        from_worker, replies = os.pipe()
        lifeline, held = os.pipe()
        theirs = (requests, replies, lifeline)
        try:
            self._process = subprocess.Popen(
                module_command("isobit.rewards.worker", *map(str, theirs)),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=theirs,
                env=environment(self._variables),
                start_new_session=True,
            )
        except OSError as error:
            for descriptor in (to_worker, from_worker, held):
                os.close(descriptor)
            raise IsobitError(
                f"cannot start a worker for the reward functions: {error.strerror}"
            ) from None
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        os.set_blocking(to_worker, False)
        self._pipes = [to_worker, from_worker, held]
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
        """The reply to one request. Raises IsobitError if the worker had died and its replacement
        cannot load."""
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
        return self._process is not None and not _poll({self.read_end: select.POLLIN}, 0.0)

    @property
    def read_end(self) -> int:
        """The descriptor on which replies come."""
        return self._pipes[1]

    @property
    def interests(self) -> dict[int, int]:
        """The descriptors on which it waits, with poll's event masks."""
        return {self.read_end: select.POLLIN} | (
            {self._pipes[0]: select.POLLOUT} if self._unsent else {}
        )

    def begin(self, request: bytes, deadline_s: float) -> None:
        """Take up a request, a line of JSON, to be answered within so many seconds."""
        self._received.clear()
        self._unsent = memoryview(request)
        self._log_start = os.fstat(self._log.fileno()).st_size
        if self._log_start > MAX_LOG_BYTES:
            self._dropped += self._log_start - self._passed_on
            os.ftruncate(self._log.fileno(), 0)
            self._log_start = self._passed_on = 0
        self.deadline_s, self.expires = deadline_s, time.monotonic() + deadline_s
        self.push()

    def push(self) -> None:
        """Write what the pipe takes of the request."""
        with contextlib.suppress(
            BlockingIOError, BrokenPipeError
        ):  # a broken pipe also ends the other one
            while self._unsent:
                self._unsent = self._unsent[os.write(self._pipes[0], self._unsent) :]

    def pull(self) -> dict[str, Any] | None:
        """Read what the pipe has; the reply once it is whole. Raises EOFError when the worker is
        gone."""
        part = os.read(self.read_end, 1 << 20)
        if not part:
            raise EOFError
        self._received += part
        if not part.endswith(b"\n"):
            return None
        try:
            return json.loads(self._received)
        except ValueError:  # the function wrote into the pipe
            raise EOFError from None

    def kill(self) -> int:
        """Kill the whole group and reap the worker; its exit status as subprocess gives it."""
        if self._process is None:
            return 0
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # the leader is not reaped: the id is ours
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._process = None
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes = []
        return status

    def bury(self) -> str:
        """After the worker ended by itself: clean up, and say how it ended."""
        status = self.kill()  # a process that has ended keeps the status that it ended with
        ended = (
            f"was killed by {_signal_name(-status)}"
            if status < 0
            else f"ended with exit code {status}"
        )
        return f"its process {ended}{self.last_output()}"

    def last_output(self) -> str:
        """The last line that was printed since the request began, as the end of a message; empty if
        there is none."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_start, size - 2000)
        text = os.pread(self._log.fileno(), size - start, start).decode(errors="replace")
        lines = [
            "".join(c if c.isprintable() else " " for c in line).strip()
            for line in text.splitlines()
        ]
        last = next((line[-200:] for line in reversed(lines) if line), "")
        return f" (last output: {last})" if last else ""

    def new_output(self, most: int) -> tuple[int, bytes]:
        """What was printed since the last call: how many bytes are left out, and the last of them,
        at most `most`."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._passed_on, size - most)
        dropped = self._dropped + start - self._passed_on
        self._passed_on, self._dropped = size, 0
        return dropped, os.pread(self._log.fileno(), size - start, start)

    def close(self) -> None:
        """Kill the worker and drop its log."""
        self.kill()
        self._log.close()


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""A worker process as its parent sees it: started, written to, read from, killed with everything it
started.

It leads its own process group. Whatever it does (hang, fork, exit, be killed), the group is killed
as a whole and reaped. Left out: the messages over the pipes; a descendant that leaves the group
(setsid), which is not followed; and a cage, since nothing here confines malicious code.
"""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

from isobit.errors import IsobitError
from isobit.run.interpreter import module_command
from isobit.tasks.workers.variables import environment

MAX_LOG_BYTES = 4 << 20  # of output between two `new_output`; then it is dropped


class Process:
    """A process of `module`, and the three pipes to it; dead between a `kill` and the next
    `start`. `what` it runs, in errors; `variables`: of the environment, besides the usual ones."""

    def __init__(self, module: str, what: str, variables: Sequence[str] = ()) -> None:
        self._module, self._what, self._variables = module, what, variables
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        flags = fcntl.fcntl(self._log, fcntl.F_GETFL)
        fcntl.fcntl(
            self._log, fcntl.F_SETFL, flags | os.O_APPEND
        )  # or a truncation would leave a hole
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[int] = []
        self._unsent = memoryview(b"")
        self._log_start = self._passed_on = self._dropped = 0

    def start(self) -> None:
        """Start the process, without waiting for it. Raises IsobitError."""
        requests, to_worker = os.pipe()
        from_worker, replies = os.pipe()
        lifeline, held = os.pipe()
        theirs = (requests, replies, lifeline)
        try:
            self._process = subprocess.Popen(
                module_command(self._module, *map(str, theirs)),
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
                f"cannot start a worker for the {self._what}s: {error.strerror}"
            ) from None
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        os.set_blocking(to_worker, False)
        self._pipes = [to_worker, from_worker, held]
        self._unsent = memoryview(b"")

    @property
    def alive(self) -> bool:
        """Whether it was started and not killed; it may have ended by itself."""
        return self._process is not None

    @property
    def read_end(self) -> int:
        """The descriptor on which replies come."""
        return self._pipes[1]

    @property
    def interests(self) -> dict[int, int]:
        """The descriptors that it can be read from and, where some of what was sent does not fit
        into the pipe yet, written to, with poll's event masks."""
        writes = {self._pipes[0]: select.POLLOUT} if self._unsent else {}
        return {self.read_end: select.POLLIN, **writes}

    def send(self, request: bytes) -> None:
        """Write a request, or what the pipe takes of it; `push` writes the rest."""
        self._unsent = memoryview(bytes(self._unsent) + request if self._unsent else request)
        self.push()

    def push(self) -> None:
        """Write as many of the unsent bytes as the pipe takes."""
        with contextlib.suppress(
            BlockingIOError, BrokenPipeError
        ):  # a broken pipe also ends the other one
            while self._unsent:
                self._unsent = self._unsent[os.write(self._pipes[0], self._unsent) :]

    def receive(self) -> bytes:
        """Return the bytes in the pipe, after waiting for the first. Raises EOFError when the
        worker is gone."""
        chunk = os.read(self.read_end, 1 << 20)
        if not chunk:
            raise EOFError
        return chunk

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
        """Clean up after a worker that ended by itself, and return how it ended."""
        status = self.kill()  # a process that has ended keeps the status that it ended with
        ended = (
            f"was killed by {_signal_name(-status)}"
            if status < 0
            else f"ended with exit code {status}"
        )
        return f"its process {ended}{self.last_output()}"

    def mark_output(self) -> None:
        """Set the position from which `last_output` looks; a log that has grown large is
        emptied."""
        self._log_start = os.fstat(self._log.fileno()).st_size
        if self._log_start > MAX_LOG_BYTES:
            self._dropped += self._log_start - self._passed_on
            os.ftruncate(self._log.fileno(), 0)
            self._log_start = self._passed_on = 0

    def last_output(self) -> str:
        """Return the last line that was printed since `mark_output`, as the end of a message; empty
        without one."""
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
        """Return what was printed since the last call: (bytes left out at the beginning, the last
        at most `most` bytes)."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._passed_on, size - most)
        dropped = self._dropped + start - self._passed_on
        self._passed_on, self._dropped = size, 0
        return dropped, os.pread(self._log.fileno(), size - start, start)

    def close(self) -> None:
        """Kill the worker and drop its log."""
        self.kill()
        self._log.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

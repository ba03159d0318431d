"""Workers of what a user wrote in forks of one Python that has imported what they run: a process
each, without the tenth of a second of its imports.

The one Python is a child of the test process, has a single thread, and loads no user's code; so a
worker sees no state of another's. Tests of the workers themselves start them from nothing
(`conftest.py`).

    python -m tests.warm_workers DESCRIPTOR    of a socket: requests with descriptors; process ids and exit codes
"""

import array
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVNULL = subprocess.DEVNULL
_PRELOADED = ("isobit.tasks.rewards.worker", "isobit.tasks.environments.worker")
_MOST_BYTES = 1 << 20
_lock = threading.Lock()
_server: tuple[int, socket.socket] | None = None
"""The process that started it, and the socket to it; a fork of a test's has a server of its own."""


class Popen:
    """`subprocess.Popen`, as far as `isobit.tasks.workers.process` uses it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: Any,
        stderr: Any,
        pass_fds: Sequence[int],
        env: dict[str, str],
        start_new_session: bool,
    ) -> None:
        assert command[:2] == [sys.executable, "-c"]
        assert (stdin, stderr, start_new_session) == (DEVNULL, stdout, True)
        request = {
            "code": command[2],
            "arguments": command[3:],
            "numbers": [1, 2, *pass_fds],
            "folder": os.getcwd(),
            "environment": env,
        }
        log = stdout.fileno()
        self.pid = _ask(request, [log, log, *pass_fds])
        self._code: int | None = None

    def wait(self) -> int:
        """Return the exit code, once it has ended."""
        if self._code is None:
            self._code = _ask({"wait": self.pid})
        return self._code


def _ask(request: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
    global _server
    with _lock:
        if _server is None or _server[0] != os.getpid():
            _server = (os.getpid(), _started())
        server = _server[1]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        server.sendmsg([json.dumps(request).encode()], rights if descriptors else [])
        return int(server.recv(64))


def _started() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm_workers", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env={**os.environ, **variables, "PYTHONPATH": paths},
            start_new_session=True,
        )
    return ours


def _serve(number: int) -> None:
    for name in _PRELOADED:
        __import__(name)
        del sys.modules[name]  # it is run as the main program
    client = socket.socket(fileno=number)
    while True:
        data, ancillary, _, _ = client.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * 16))
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            code = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            client.send(str(code).encode())
            continue
        received = array.array("i", ancillary[0][2] if ancillary else b"")
        if os.fork() == 0:
            os.setsid()
            client.send(str(os.getpid()).encode())  # from now on its group can be killed
            client.close()
            _become(list(received), **request)
            return
        for descriptor in received:
            os.close(descriptor)


def _become(
    received: list[int],
    code: str,
    arguments: list[str],
    numbers: list[int],
    folder: str,
    environment: dict[str, str],
) -> None:
    """Be the program: with its files under the numbers that it was told, and nothing else."""
    beyond = max(*received, *numbers) + 1
    for place, descriptor in enumerate(received):
        os.dup2(descriptor, beyond + place)
        os.close(descriptor)
    for place, number in enumerate(numbers):
        os.dup2(beyond + place, number)
        os.close(beyond + place)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = ["-c", *arguments]
    paths = list(dict.fromkeys(filter(None, environment["PYTHONPATH"].split(os.pathsep))))
    sys.path[:] = [*paths, *(path for path in sys.path if path not in {*paths, str(ROOT)})]
    exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

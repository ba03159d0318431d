"""Commands, scripts and workers in forks of a Python that has imported what they import: a process
each, without the seconds of their imports.

The one Python is a child of the test process. It imports, runs nothing of a user's, has a single
thread, and forks for every request; so a process sees no state of another's (`test_warm.py`). There
is one for commands and one for workers, which must not have what commands import, and one more for
each library that is loaded before all others. That an installed command starts from nothing is
tested where it has a process of its own:
`test_docs.py::test_the_readme_commands_run_in_order`,
`test_cli_bad_input.py::test_as_a_process_and_wrong_options`; tests of the workers themselves start
them from nothing (`conftest.py`).

    python -m tests.warm DESCRIPTOR MODULE...    of a socket: requests with descriptors; process ids and exit codes
"""

import array
import json
import os
import random
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVNULL = subprocess.DEVNULL
_LONGEST_S = 600
_COMMANDS = (
    "isobit.training.loop",
    *(f"isobit.training.commands.{name}" for name in ("compare", "evaluate", "inspect")),
)
_WORKERS = ("isobit.tasks.rewards.worker", "isobit.tasks.environments.worker")
_MOST_BYTES = 1 << 20
_lock = threading.Lock()


class _Server:
    """The one Python: its process, and the socket to it."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.socket.sendmsg([json.dumps(request).encode()], rights if descriptors else [])
        reply = self.socket.recv(64)
        assert reply, f"{request}: nothing within {_LONGEST_S} s"
        return int(reply)


_servers: dict[tuple[int, str | None], _Server] = {}
"""By the process that started it, since a fork of a test's has servers of its own, and the library
that is loaded before all others (LD_PRELOAD) or ""; None: for workers."""


def _server(preload: str | None) -> _Server:
    server = _servers.get((os.getpid(), preload))
    if server is None or server.process.poll() is not None:
        if preload is None:
            variables = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
            paths = {"PYTHONHASHSEED": "0", **dict.fromkeys(variables, "1"), "PYTHONPATH": _PATHS}
            server = _Server(_WORKERS, {**os.environ, **paths})
        else:
            library = {"LD_PRELOAD": preload} if preload else {}
            server = _Server(_COMMANDS, _without_ours(os.environ) | library)
        _servers[os.getpid(), preload] = server
    return server


_PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])


def _without_ours(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: threads as the server has them, and no interpreter of
    kernels."""
    kept = {name: value for name, value in variables.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": _PATHS, "OMP_NUM_THREADS": "1"}


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
            "words": command[1:],
            "numbers": [1, 2, *pass_fds],
            "folder": os.getcwd(),
            "environment": env,
        }
        log = stdout.fileno()
        with _lock:
            self.pid = _server(None).ask(request, [log, log, *pass_fds])
        self._code: int | None = None

    def wait(self) -> int:
        """Return the exit code, once it has ended."""
        if self._code is None:
            with _lock:
                self._code = _server(None).ask({"wait": self.pid})
        return self._code


@dataclass(frozen=True)
class Process:
    """A command that runs; `out` and `err`: the files of what it prints."""

    id: int
    words: list[str]
    out: Path
    err: Path
    server: _Server

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.id, number)

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """When it has ended; the whole server is killed after ten minutes, and AssertionError
        raised."""
        timer = threading.Timer(_LONGEST_S, os.killpg, (self.server.process.pid, signal.SIGKILL))
        timer.start()
        try:
            code = self.server.ask({"wait": self.id})
        finally:
            timer.cancel()
        printed = [path.read_text(encoding="utf-8") for path in (self.out, self.err)]
        for path in (self.out, self.err):
            path.unlink()
        return subprocess.CompletedProcess(self.words, code, *printed)


def start(words: list[str], folder: Path, **environment: str) -> Process:
    """`isobit ...` or `python script.py ...` in a separate process, in a folder."""
    files = [tempfile.mkstemp(prefix=f"warm-{name}-") for name in ("out", "err")]
    variables = {"TMPDIR": tempfile.gettempdir(), **os.environ, **environment}
    request = {"words": words, "numbers": [1, 2], "folder": str(folder)}
    server = _server(environment.get("LD_PRELOAD", ""))
    descriptors = [descriptor for descriptor, _ in files]
    number = server.ask({**request, "environment": _without_ours(variables)}, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return Process(number, words, Path(files[0][1]), Path(files[1][1]), server)


def isobit(folder: Path, *words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`isobit words` in a folder, to its end."""
    return start(["isobit", *map(str, words)], folder, **environment).wait()


def plain(command: str) -> "tuple[list[str], dict[str, str]] | None":
    """(words, variables) of a line of shell that needs no shell, and that can be forked; else
    None."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words, variables = list(lexer), dict[str, str]()
    while words and words[0].partition("=")[0].isidentifier() and "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    if any(set(word) <= set("();<>|&") for word in words) or set("$`*~") & set(command):
        return None
    script = words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py")
    return (words, variables) if script or words[:1] == ["isobit"] else None


def _serve(number: int, modules: Sequence[str]) -> None:
    for name in modules:
        __import__(name)
        if name in _WORKERS:
            del sys.modules[name]  # it is run as the main program
    assert len(os.listdir("/proc/self/task")) == 1 or sys.platform != "linux", (
        "a fork copies one thread only"
    )
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
        received = array.array("i", ancillary[0][2])
        if os.fork() == 0:
            if request["words"][0] == "-c":
                os.setsid()
            client.send(str(os.getpid()).encode())  # from now on its group can be killed
            client.close()
            _become(list(received), **request)
            return
        for descriptor in received:
            os.close(descriptor)


def _become(
    received: list[int],
    words: list[str],
    numbers: list[int],
    folder: str,
    environment: dict[str, str],
) -> None:
    """This process, a fork, is the program: with its files under the numbers that it was told, its
    folder, environment and arguments, and nothing else."""
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
    if words[0] == "isobit":
        sys.argv, sys.path[0] = words, folder
        runpy.run_module("isobit", run_name="__main__", alter_sys=True)
    elif words[0] == "python":
        sys.argv, sys.path[0] = words[1:], str(Path(words[1]).resolve().parent)
        runpy.run_path(words[1], run_name="__main__")
    else:
        random.seed()
        sys.argv = ["-c", *words[2:]]
        paths = list(dict.fromkeys(filter(None, environment["PYTHONPATH"].split(os.pathsep))))
        sys.path[:] = [*paths, *(path for path in sys.path if path not in {*paths, str(ROOT)})]
        exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])

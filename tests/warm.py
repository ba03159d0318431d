"""Commands of isobit and scripts in forks of one Python that has imported them: a process each,
without 3 s of imports.

The one Python is a child of the test process. It imports what the commands import, runs nothing,
has a single thread, and forks for every command; so a command sees no state of another's
(`test_warm.py`), which one interpreter for several would not promise. That the installed command
starts from nothing is tested where a command has its own process:
`test_docs.py::test_the_readme_commands_run_in_order`,
`test_cli_bad_input.py::test_as_a_process_and_wrong_options`.

    python -m tests.warm    stdin: lines {"words", "folder", "environment", "out", "err"} or {"wait": process id}
                            stdout: lines with a process id, or with an exit code
"""

import atexit
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LONGEST_S = 600
_PRELOADED = (
    "isobit.training.loop",
    *(f"isobit.training.commands.{name}" for name in ("compare", "evaluate", "inspect")),
)
_servers: dict[str, "subprocess.Popen[str]"] = {}
"""By the library that is loaded before all others (LD_PRELOAD), or ""."""


@dataclass(frozen=True)
class Process:
    """A command that runs; `out` and `err`: the files of what it prints."""

    id: int
    words: list[str]
    out: Path
    err: Path
    preload: str = ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.id, number)

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """When it has ended; the whole server is killed after ten minutes, and AssertionError
        raised."""
        timer = threading.Timer(_LONGEST_S, os.killpg, (_servers[self.preload].pid, signal.SIGKILL))
        timer.start()
        try:
            code = _ask({"wait": self.id}, self.preload)
        finally:
            timer.cancel()
        printed = [path.read_text(encoding="utf-8") for path in (self.out, self.err)]
        for path in (self.out, self.err):
            path.unlink()
        return subprocess.CompletedProcess(self.words, code, *printed)


def start(words: list[str], folder: Path, **environment: str) -> Process:
    """`isobit ...` or `python script.py ...` in a separate process, in a folder."""
    files = [Path(tempfile.mkstemp(prefix=f"warm-{name}-")[1]) for name in ("out", "err")]
    variables = {"TMPDIR": tempfile.gettempdir(), **os.environ, **environment}
    request = {"words": words, "folder": str(folder), "environment": _without_ours(variables)}
    preload = environment.get("LD_PRELOAD", "")
    number = _ask({**request, "out": str(files[0]), "err": str(files[1])}, preload)
    return Process(number, words, files[0], files[1], preload)


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


def _without_ours(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a command: threads as the server has them, and no interpreter of
    kernels."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    kept = {name: value for name, value in variables.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def _ask(request: dict[str, Any], preload: str) -> int:
    server = _servers.get(preload)
    if server is None or server.poll() is not None:
        server = _servers[preload] = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_without_ours(dict(os.environ)) | ({"LD_PRELOAD": preload} if preload else {}),
            start_new_session=True,
        )
        atexit.register(server.stdin.close)  # type: ignore[union-attr]
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    reply = server.stdout.readline()
    assert reply, f"{request}: nothing within {_LONGEST_S} s"
    return int(reply)


def _serve() -> None:
    for name in _PRELOADED:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1 or sys.platform != "linux", (
        "a fork copies one thread only"
    )
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            reply = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            reply = os.fork()
            if reply == 0:
                _become(**request)
                return
        print(reply, flush=True)


def _become(words: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    """This process, a fork, is the command: its files, folder, environment and arguments."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY),
        (2, err, os.O_WRONLY),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "isobit":
        sys.argv, sys.path[0] = words, folder
        runpy.run_module("isobit", run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words[1:], str(Path(words[1]).resolve().parent)
        runpy.run_path(words[1], run_name="__main__")


if __name__ == "__main__":
    _serve()

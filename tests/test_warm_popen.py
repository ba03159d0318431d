"""Forks in the place of new interpreters (`warm.py`): nothing but their start is another."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from isobit.run.interpreter import module_command
from isobit.tasks.workers.variables import environment
from tests import warm

BOTH = pytest.mark.parametrize("popen", [subprocess.Popen, warm.Popen])
LOOKS = """
import json, os, signal, sys
sys.path[:] = filter(None, sys.path)
files = sorted(int(number) for number in os.listdir("/proc/self/fd"))[:-1]
print(json.dumps([
    sys.argv, sys.path, dict(os.environ), os.getcwd(), files, os.getsid(0) == os.getpid(), __name__,
    sys.dont_write_bytecode, sys.flags.hash_randomization, [str(signal.getsignal(2))],
    os.readlink("/proc/self/fd/0"), len(os.listdir("/proc/self/task")),
]))
"""


def ran(popen: Any, code: str, signal_number: int = 0) -> tuple[int, str]:
    """(exit code, what was printed) of a program with one descriptor more."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as log:
        process = popen(
            [sys.executable, "-c", code, str(write)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[write],
            env=environment(()),
            start_new_session=True,
        )
        os.close(write)
        if signal_number:
            os.killpg(process.pid, signal_number)
        status = process.wait()
        assert os.read(read, 1) == b""  # nobody holds the other end
        os.close(read)
        log.seek(0)
        return status, log.read().decode()


@pytest.mark.skipif(sys.platform != "linux", reason="looks through /proc")
def test_a_program_finds_what_it_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    fresh, fork = (json.loads(ran(popen, LOOKS)[1]) for popen in (subprocess.Popen, warm.Popen))
    assert fresh == fork
    assert str(tmp_path) in fork[1]


@BOTH
def test_it_ends_as_it_would_end(popen: Any) -> None:
    assert ran(popen, "raise SystemExit(3)") == (3, "")
    status, text = ran(popen, "1 / 0")
    assert (status, text.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    assert ran(popen, "while True: pass", signal.SIGKILL) == (-signal.SIGKILL, "")
    words = module_command("isobit.run.interpreter")
    assert ran(popen, words[2]) == (0, "")


def test_nothing_of_one_is_seen_by_the_next() -> None:
    code = (
        "import isobit.errors as e, random; print(getattr(e, 'own', 0), random.random()); e.own = 1"
    )
    first, second = (ran(warm.Popen, code)[1].split() for _ in range(2))
    assert (first[0], second[0]) == ("0", "0")
    assert first[1] != second[1]

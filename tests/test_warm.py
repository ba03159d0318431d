"""Forks of a warm interpreter are separate processes, as commands of a shell are; as workers, nothing
but their start is another than that of new interpreters."""

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

SCRIPT = """
import builtins, os, sys
print(getattr(builtins, "seen", None), os.getcwd(), os.environ.get("WORD"), sys.argv, "torch" in sys.modules, __name__)
print("to stderr", file=sys.stderr)
builtins.seen = True
os.environ["WORD"] = "left"
os.chdir("/")
sys.exit(3)
"""
TWICE = """
import runpy
from pathlib import Path

script = Path("script.py").resolve()
for _ in range(2):
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        pass
"""


@pytest.mark.slow
def test_a_fork_sees_nothing_of_the_one_before(tmp_path: Path) -> None:
    """And has its own folder, variables, arguments and exit code."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for word in ("one", None):
        given = {} if word is None else {"WORD": word}
        done = warm.start(["python", "script.py", "x"], tmp_path, **given).wait()
        assert done.returncode == 3
        assert done.stdout == f"None {tmp_path} {word} ['script.py', 'x'] True __main__\n"
        assert done.stderr == "to stderr\n"


def test_two_in_one_process_do(tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "twice.py").write_text(TWICE)
    first, second = warm.start(["python", "twice.py"], tmp_path).wait().stdout.splitlines()
    assert first.startswith(f"None {tmp_path} None ")
    assert second.startswith("True / left ")


def test_an_error_is_a_traceback_and_a_kill_its_signal(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    done = warm.start(["python", "wrong.py"], tmp_path).wait()
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(300)\n")
    slow = warm.start(["python", "slow.py"], tmp_path)
    slow.kill()
    assert slow.wait().returncode == -signal.SIGKILL


@pytest.mark.slow
def test_isobit_is_the_command(tmp_path: Path) -> None:
    done = warm.isobit(tmp_path, "train", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("isobit: cannot read config nowhere.yaml")
    assert "Usage: isobit" in warm.isobit(tmp_path, "--help").stdout


@pytest.mark.parametrize(
    ("line", "forked"),
    [
        (
            "isobit train 'a b.yaml' x=[a,b] \"y={c: d}\"  # comment",
            ["isobit", "train", "a b.yaml", "x=[a,b]", "y={c: d}"],
        ),
        ("WORD=two isobit watch", ["isobit", "watch"]),
        ("python script.py", ["python", "script.py"]),
        ("isobit train run.yaml | tail -n 2", None),
        ("isobit train run.yaml > out", None),
        ("isobit train $HOME", None),
        ("python -c 'print()'", None),
        ("cp a b", None),
    ],
)
def test_lines_that_need_a_shell_get_one(line: str, forked: list[str] | None) -> None:
    found = warm.plain(line)
    assert (found and found[0]) == forked
    assert found is None or found[1] == ({"WORD": "two"} if line.startswith("WORD") else {})


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

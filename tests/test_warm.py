"""Forks of a warm interpreter are separate processes, as commands of a shell are."""

import signal
from pathlib import Path

import pytest

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

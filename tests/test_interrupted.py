"""Ctrl-C before a command has begun: one line, 130, and no traceback, whatever is being imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

finder = Finder()
sys.meta_path.insert(0, finder)
"""


def _run(folder: Path, at: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """A process that is sent SIGINT when it is about to import a module."""
    (folder / "sitecustomize.py").write_text(INTERRUPTING)
    places = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places, "INTERRUPTED_AT": at}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "at", ["isobit.cli", "typer", "isobit.cli.training", "isobit.training.commands.doctor", "torch"]
)
def test_it_is_one_line(tmp_path: Path, at: str) -> None:
    done = _run(tmp_path, at, "-m", "isobit", "doctor", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "isobit: interrupted\n")


def test_a_program_that_imports_isobit_keeps_its_own(tmp_path: Path) -> None:
    """The control: it is told as Python tells it."""
    program = "try:\n    import isobit.cli\nexcept KeyboardInterrupt:\n    print('mine')"
    done = _run(tmp_path, "typer", "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")

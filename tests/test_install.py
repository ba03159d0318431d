"""What `make` installs of PyTorch, and what it says before: `.ci/torch_index.py`, and the recipes
around it."""

import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.documents import ROOT

SCRIPT = ROOT / ".ci" / "torch_index.py"
CHOICE = runpy.run_path(str(SCRIPT))
INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("given", "system", "driver", "reached", "taken", "line"),
    [
        (False, "linux", False, True, True, "0.2 GB to download"),
        (False, "linux", False, False, False, "does not answer: .* about 3 GB to download"),
        (False, "linux", True, True, False, "comes with CUDA: about 3 GB to download"),
        (False, "darwin", False, True, False, "^$"),
        (True, "linux", True, False, True, r"from https://.*/whl/cpu \(TORCH_INDEX\)"),
        (True, "darwin", False, False, True, r"from https://.*/whl/cpu \(TORCH_INDEX\)"),
    ],
)
def test_without_a_driver_the_index_of_cpu_builds_is_taken_where_it_answers(
    given: bool, system: str, driver: bool, reached: bool, taken: bool, line: str
) -> None:
    """And what comes is said, in gigabytes."""
    option, said = CHOICE["options"](INDEX, given, system, lambda: driver, lambda index: reached)
    assert option == (f"--extra-index-url={INDEX}" if taken else "")
    assert re.search(line, said)


def test_an_empty_index_leaves_the_choice_to_pip() -> None:
    """The control: nothing is asked."""
    unasked = partial(pytest.fail, "it was asked")
    option, said = CHOICE["options"]("", True, "linux", lambda: False, unasked)
    assert option == ""
    assert "PyTorch as pip finds it" in said
    assert "3 GB" in said


@contextmanager
def index(status: int) -> Iterator[str]:
    """An index that answers so where PyTorch is asked for."""

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status if self.path == "/whl/cpu/torch/" else 500)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        finally:
            server.shutdown()


def test_an_index_answers_or_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one that is not there, one without PyTorch, and what is no address.
    The control: one that has it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with index(200) as there:
        assert CHOICE["answers"](there, 60)
        assert CHOICE["answers"](f"{there}/", 60)
    for status in (404, 403, 500):
        with index(status) as there:
            assert not CHOICE["answers"](there, 60)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not CHOICE["answers"](f"http://127.0.0.1:{port}", 0.05)
    assert not CHOICE["answers"](f"http://127.0.0.1:{port}", 60)
    assert not CHOICE["answers"]("no address", 60)


def test_the_program_ends_while_a_name_is_still_looked_up(tmp_path: Path) -> None:
    """It prints an option alone on stdout, so that pip gets nothing else."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, threading\nsocket.getaddrinfo = lambda *_, **__: threading.Event().wait()\n"
    )
    shutil.copy(SCRIPT, tmp_path / "choice.py")
    text = (tmp_path / "choice.py").read_text()
    assert text.count("SECONDS = 3.0") == 1
    (tmp_path / "choice.py").write_text(text.replace("SECONDS = 3.0", "SECONDS = 0.05"))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "choice.py"), "https://example.invalid/whl"],
        env={"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "\n")
    if sys.platform == "linux" and not CHOICE["driver"]():
        assert done.stderr.count("\n") == 1
        assert "does not answer" in done.stderr


def recipe(target: str, *settings: str, **variables: str) -> str:
    """What `make` would do for a target in an environment that is not there."""
    done = subprocess.run(
        ["make", "--dry-run", "VENV=nowhere/venv", *settings, target],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_make_asks_for_the_index_where_it_installs_pytorch() -> None:
    """And for another that is named, on the command line or in the environment, without a
    question."""
    asked = f'.ci/torch_index.py "{INDEX}" ) "torch==2.13.0"'
    for target in ("install", "quickstart", "test"):
        assert recipe(target).count(asked) == 1
    named = '.ci/torch_index.py "https://mine" given) "torch==2.13.0"'
    assert named in recipe("install", "TORCH_INDEX=https://mine")
    assert named in recipe("install", TORCH_INDEX="https://mine")
    assert '.ci/torch_index.py "" given) "torch"' in recipe(
        "install", "TORCH_INDEX=", "TORCH=torch"
    )


def test_triton_is_installed_only_where_pytorch_brings_none() -> None:
    """Another version would contradict PyTorch's own."""
    (line,) = [line for line in recipe("test").splitlines() if '"triton==3.6.0"' in line]
    assert line.startswith('nowhere/venv/bin/python -c "import triton" 2> /dev/null || ')
    assert "triton" not in recipe("install")


@pytest.mark.parametrize(("target", "sign"), [("floor", "=="), ("ceiling", ">=")])
def test_make_floor_tests_the_bounds_of_what_users_install(
    target: str, sign: str, tmp_path: Path
) -> None:
    """All dependencies, and those of every extra but what is for development, and Ray, which needs
    a test of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    bounds = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for name in extras.keys() - {"dev", "docs", "bench", "ray"}:
        bounds += [bound for bound in extras[name] if not bound.startswith("isobit[")]
    (command,) = re.findall(r"^sed -n -e '/\^requires (?:.*\\\n)*.*", recipe(target), re.M)
    taken = tmp_path / "requirements.txt"
    command = command.replace(f"build/{target}/requirements.txt", shlex.quote(str(taken)))
    subprocess.run(["sh", "-c", command], cwd=ROOT, check=True)
    assert set(taken.read_text().split()) == {bound.replace(">=", sign) for bound in bounds}


def test_every_extra_is_for_the_pythons_that_are_promised() -> None:
    """No marker of a Python that is no longer one; trackio alone, since vLLM contradicts it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    promised = [name.rpartition(" ")[2] for name in project["classifiers"] if ":: 3." in name]
    (asked,) = re.findall(r"^PYTHONS = (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert asked.split() == promised == ["3.11", "3.12", "3.13", "3.14"]
    extras = project["optional-dependencies"]
    assert "python_version" not in str(extras)
    assert [name for name, bounds in extras.items() if "trackio>" in str(bounds)] == ["trackio"]

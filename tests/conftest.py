"""What the tests share: a tiny base model on disk, the real model beside the checkout, one cache
for compiled kernels."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before Triton is imported: kernels then run on the CPU, slowly
    )

with suppress(ImportError):  # a machine with a GPU may lack it
    import hypothesis

    hypothesis.settings.register_profile(
        "repeatable", derandomize=True, deadline=None
    )  # what fails here fails everywhere
    hypothesis.settings.load_profile("repeatable")

from isobit.kernels.native import build
from tests import selection, warm
from tests.browser import opened as opened
from tests.models import SHARED, STORIES, tiny_model
from tests.order import longest_first
from tests.selection import pytest_addoption as pytest_addoption
from tests.selection import pytest_configure as pytest_configure
from tests.selection import pytest_configure_node as pytest_configure_node
from tests.selection import pytest_report_header as pytest_report_header
from tests.selection import pytest_sessionfinish as pytest_sessionfinish


def _without_waiting(file: Any) -> None:
    """`os.fsync` without the disk: a run syncs a hundred times, and no test needs to survive a
    power cut. What such a one leaves is tested in processes of their own (`tests/faults`)."""
    os.fstat(file if isinstance(file, int) else file.fileno())  # what is closed raises as before


os.fsync = _without_waiting


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random model."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save(path)
    return path


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real pretrained Llama of 260,032 parameters, where it stands beside the checkout."""
    if not STORIES.is_dir():
        pytest.skip(f"the pretrained model {STORIES} is not here")
    return STORIES


@pytest.fixture(scope="session")
def gsm8k_test() -> Path:
    """The real GSM8K test file, where it stands beside the checkout."""
    path = SHARED / "data" / "gsm8k" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"the data file {path} is not here")
    return path


@pytest.fixture(scope="session")
def quickstart_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which no model was made before the tests, for all workers: $ISOBIT_CACHE of what
    runs the quickstart's configs, whose base is trained once. Operators are compiled in the usual
    cache."""
    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    cache.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (cache / "native").symlink_to(build.cache_directory("native"))
    return cache


RunIsobit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_isobit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunIsobit:
    """Run a command in this process; returns (exit code, what it printed, its errors)."""
    from isobit import cli  # here, since it reaches everything (`reach.py`)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isobit", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (int(stop.value.code or 0), *capsys.readouterr())

    return call


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit) -> Refused:
    """Run a command that must be refused and write nothing; returns its one line."""
    monkeypatch.chdir(tmp_path)

    def listing() -> dict[str, int]:
        found = (path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)
        return {str(path): path.lstat().st_size for path in found}

    def call(*arguments: object) -> str:
        before = listing()
        code, _, line = run_isobit(*arguments)
        assert code == 2, line
        assert line.startswith("isobit: ")
        assert line.count("\n") == 1, line
        assert len(line) < 700
        assert listing() == before
        return line

    return call


@pytest.hookimpl(trylast=True)  # when pytest has left out what `-m` and `-k` do
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is to run (`selection.py`); under several workers, the long tests first."""
    selection.select(config, items)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = longest_first(items, workers, lambda item: str(item.path), selection.is_slow)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: two million objects that each full round
    of the garbage collector would look at, a second long."""
    gc.collect()
    gc.freeze()


FROM_NOTHING = {
    *("test_worker_process", "test_dispatch", "test_poisoned_directory"),
    *("test_attacks", "test_limits", "test_seccomp", "test_examiner"),
    *("test_hostile", "test_strangers", "test_mistakes"),
}
"""Files of tests whose workers are interpreters of their own, since these are what is tested."""


@pytest.fixture(autouse=True, scope="module")
def _warm_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Elsewhere a worker is a fork of a Python that has imported what it runs."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in FROM_NOTHING:
            patch.setattr("isobit.tasks.workers.process.subprocess", warm)
        yield


THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Of a test: several workers share the cores."""


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back() -> Iterator[None]:
    """After each file, what the heap keeps free (`isobit.kernels.native.heap`): else a worker holds
    the most that any of its tests ever took, several GB, to its end."""
    yield
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)

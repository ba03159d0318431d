"""The tests that need a GPU, each a case of its own, so that a run which is cut off goes on where
it was.

Two groups, by what they take: those of bits at the width of real models and of captured steps,
three at a time, which 80 GB hold; and those of kernels, whose time is the compiler's, one for every
two processors. All share one cache of compiled kernels, and neighbours in the list stay in one
process, so that few kernels are compiled twice.

This module is also the plugin of pytest that writes the cases: `-p benchmarks.gpu.tests`.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.common import GPU_LOST, Bench, answers
from benchmarks.gpu.results import Results
from isobit.kernels import get_ops

GROUPS: dict[str, tuple[tuple[str, ...], int]] = {
    "bits": (
        (
            "tests/gpu",
            "tests/engine/test_graphs.py::test_on_a_gpu_captured_steps_give_the_bits_of_eager_ones",
            "tests/engine/test_triton.py",
            "tests/model/test_triton.py",
        ),
        3,
    ),
    "kernels": (("tests/kernels/triton",), max(2, (os.cpu_count() or 2) // 2)),
}
"""What each group runs, and how many at a time."""
_REHEARSED = ("tests/kernels/triton/test_numbers.py",)
_FOLDER, _SESSION, _BEFORE = "ISOBIT_GPU_RESULTS", "ISOBIT_GPU_SESSION", "ISOBIT_GPU_LINES_BEFORE"
STAGE = "tests"
_OK = (0, 1, 5)
"""pytest's: all passed, some failed, and none was left to run."""


def run(bench: Bench) -> None:
    """Every group that has a test left, in its own pytest; how each ended is a case too."""
    for name, (chosen, workers) in GROUPS.items():
        if bench.rehearsal:
            chosen, workers = _REHEARSED, 0
        group = f"pytest: {name}"
        if not bench.wants(group):
            continue
        with bench.case(group, around=True) as case:
            status = _pytest(chosen, workers, bench)
            counts = _counts(bench.results, chosen)
            # a pytest that was stopped has recorded what it got to; without any record it has not
            # begun
            whole = status in _OK and sum(counts.values()) > 0
            case.row(group, holds=whole and counts["failed"] == 0, exit_status=status, **counts)
            if not whole:
                raise RuntimeError(
                    f"pytest ended with {status}, and {sum(counts.values())} tests are on record"
                )
        if bench.rehearsal:
            break


def _pytest(chosen: tuple[str, ...], workers: int, bench: Bench) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        *chosen,
        "-p",
        "benchmarks.gpu.tests",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    if workers and find_spec("xdist") is not None:
        command += ["-n", str(workers), "--dist", "worksteal"]
    given = {_FOLDER: str(bench.results.folder.resolve()), _SESSION: bench.results.session}
    given[_BEFORE] = str(len(bench.results.lines()))
    return subprocess.run(command, env=os.environ | given, check=False).returncode


def _counts(results: Results, chosen: tuple[str, ...]) -> dict[str, int]:
    """Of the tests on record that are among the chosen ones."""
    found = [
        line
        for (stage, case), line in results.of_this_machine().items()
        if stage == STAGE and case.startswith(chosen)
    ]
    outcomes = [line.get("outcome") for line in found]
    return {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}


def _results() -> Results:
    return Results(Path(os.environ[_FOLDER]), os.environ[_SESSION])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was on record before this pytest: a worker that replaces another must collect
    what that did."""
    before = _results().of_this_machine(int(os.environ[_BEFORE]))
    settled = {case for (stage, case), line in before.items() if stage == STAGE and _ended(line)}
    out = [item for item in items if item.nodeid in settled]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item.nodeid not in settled]


def _ended(line: dict[str, Any]) -> bool:
    return line["status"] in ("done", "failed")


class Recorder:
    """Writes a case when its test ends; in xdist's controlling process alone."""

    def __init__(self) -> None:
        self.results = _results()
        self.bad: dict[str, str] = {}
        self.took: dict[str, float] = {}
        self.skipped: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Where it never ends, this is how that is known (`supervise.py`)."""
        self.results.case(STAGE, nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.took[name] = self.took.get(name, 0.0) + report.duration
        if report.failed:
            self.bad[name] = str(report.longreprtext)[-3000:]
        if report.skipped:
            self.skipped.add(name)
        if report.when in (
            "setup",
            "call",
        ):  # a teardown follows; of a worker that died there is one report only
            return
        outcome = "failed" if name in self.bad else "skipped" if name in self.skipped else "passed"
        more = {"message": self.bad[name]} if name in self.bad else {}
        status = "failed" if name in self.bad else "done"
        self.results.case(STAGE, name, status, outcome=outcome, took_s=self.took[name], **more)


class Guard:
    """In a worker of xdist: ends it where a test has lost the GPU. xdist starts another, and the
    tests that follow do not fail for what one has done."""

    def __init__(self) -> None:
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self.failed and not answers(not torch.cuda.is_initialized()):
            os._exit(GPU_LOST)
        self.failed = False


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        get_ops("triton")  # its tiles, and the sides of the rows that the check has found
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Guard(), "isobit-guard")
    else:
        config.pluginmanager.register(Recorder(), "isobit-recorder")

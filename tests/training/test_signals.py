"""A signal at each phase of a run: it says in a line that it stops, and goes on to the end of a run
that nobody stopped."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.run.checkpoints import all_checkpoints
from isobit.training import run as running
from isobit.training.parts import assembly
from isobit.training.run import Run
from isobit.training.train import train
from tests.models import slow_where
from tests.runs import fingerprint, write_config

SETTINGS = {"evaluation": {"every": 2, "samples": 2}, "run": {"report": True}}
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
PHASES = [
    *[
        (phase, count)
        for phase in ("sync", "rollout", "score", "learn", "save")
        for count in (1, 2)
    ],
    *[("evaluate", count) for count in (1, 2, 3)],  # before the first step, between, and at the end
    ("report", 1),
]
RunIsobit = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unbroken")
    return fingerprint(train(load_config(write_config(folder, base_model, **SETTINGS))).run_dir)


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """As a terminal starts a process, also where the tests run under nohup, or Ray has left a
    handler."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _strike(monkeypatch: pytest.MonkeyPatch, number: int, phase: str, count: int) -> list[str]:
    """Send a signal when a phase begins for the nth time; returns all phases that begin."""
    enter, write, seen = Run._phase, running.write_report, list[str]()

    def note(name: str) -> None:
        seen.append(name)
        if name == phase and seen.count(name) == count:
            os.kill(os.getpid(), number)

    def begins(self: Run, name: str) -> None:
        note(name)
        enter(self, name)

    def writes(*arguments: Any) -> Path:
        note("report")
        return write(*arguments)

    monkeypatch.setattr(Run, "_phase", begins)
    monkeypatch.setattr(running, "write_report", writes)
    return seen


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("phase", "count"), slow_where(PHASES, lambda phase, count: (phase, count) not in PHASES[1::4])
)
def test_a_signal_at_any_phase(
    tmp_path: Path,
    base_model: Path,
    unbroken: dict[str, Any],
    run_isobit: RunIsobit,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    phase: str,
    count: int,
) -> None:
    config = write_config(tmp_path, base_model, **SETTINGS)
    with monkeypatch.context() as patch:
        seen = _strike(patch, number, phase, count)
        code, out, said = run_isobit("train", config, "--quiet")
    assert seen.count(phase) >= count
    first, last = said.splitlines()
    assert (code, out) == (SIGNALS[number], "")
    assert first == "isobit: finishing this step, then saving; once more to end at once"
    done = int(all_checkpoints(tmp_path / "run" / "checkpoints")[-1].name.partition("-")[2])
    assert last == (
        f"stopped after step {done}; go on with: isobit train --resume {tmp_path / 'run'}"
    )
    # the control: what was stopped before its end is not yet the whole run
    assert (fingerprint(tmp_path / "run") == unbroken) == (done == 4)
    assert run_isobit("train", "--resume", tmp_path / "run", "--quiet") == (0, "", "")
    assert fingerprint(tmp_path / "run") == unbroken


def test_while_it_is_loaded(
    tmp_path: Path,
    base_model: Path,
    unbroken: dict[str, Any],
    run_isobit: RunIsobit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing has begun, and the same command begins."""
    config = write_config(tmp_path, base_model, **SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "load_trained", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        code, out, said = run_isobit("train", config, "--quiet")
    assert (code, out, said.strip()) == (130, "", "isobit: interrupted")
    assert not (tmp_path / "run").exists()
    assert run_isobit("train", config, "--quiet") == (0, "", "")
    assert fingerprint(tmp_path / "run") == unbroken


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_is_ended_while_it_loads_says_so(
    number: signal.Signals,
    base_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_isobit: RunIsobit,
) -> None:
    """In one line; and the handlers are as they were. The control: a rank, whose end is told by
    whoever started it, has none of its own for SIGTERM."""
    before = [signal.getsignal(each) for each in SIGNALS]

    def strike(*given: Any, **more: Any) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal ends it")

    monkeypatch.setattr("isobit.model.Model.load", strike)
    ended = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    code, _, said = run_isobit("generate", base_model, "--prompt", "1+1=")
    assert (code, said) == (SIGNALS[number], f"isobit: {ended}\n")
    assert [signal.getsignal(each) for each in SIGNALS] == before
    seen = list[Any]()

    def look() -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        raise SystemExit(0)

    monkeypatch.setattr("isobit.cli._main", look)
    run_isobit("doctor")
    monkeypatch.setenv("RANK", "0")
    run_isobit("doctor")
    assert seen[0] is not before[1]
    assert seen[1] is before[1]

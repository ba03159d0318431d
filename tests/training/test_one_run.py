"""Every run, whatever it learns from, is one class, opened and opened again in one way."""

import ast
import socket
from functools import partial
from pathlib import Path

import pytest

from isobit.config import Config, SftConfig, load_config, load_sft_config
from isobit.errors import IsobitError
from isobit.run.directory import in_use
from isobit.training.loop import training_loop
from isobit.training.parts.given import GivenParts
from isobit.training.parts.sampled import SampledParts
from isobit.training.rollouts.processes import Processes, open_processes
from isobit.training.run import Run
from isobit.training.train import open_resumed, open_run, resume
from tests.runs import write_config
from tests.test_architecture import SOURCE, parsed
from tests.training.test_sft_run import written


def calls_of(name: str, text: ast.AST) -> int:
    """How often a class or function is called by its name."""
    names = (n.func for n in ast.walk(text) if isinstance(n, ast.Call))
    return sum(isinstance(n, ast.Name) and n.id == name for n in names)


def test_every_kind_is_opened_and_opened_again_in_one_way(tmp_path: Path, base_model: Path) -> None:
    (tmp_path / "given").mkdir()
    sampled: Config | SftConfig = load_config(write_config(tmp_path, base_model, steps=1))
    given = load_sft_config(written(tmp_path / "given"), ["steps=1"])
    kinds = set()
    for config in (sampled, given):
        with open_run(config, quiet=True) as run:
            training_loop(run)
            run.finish()
        with open_resumed(Path(config.run.dir), ["steps=2"], quiet=True) as again:
            training_loop(again)
            again.finish()
        assert type(run) is type(again) is Run
        assert (run.state.step, again.state.step) == (1, 2)
        kinds |= {type(run.parts), type(again.parts)}
    assert kinds == {SampledParts, GivenParts}
    # the control: what only one kind takes is still refused for the other
    with pytest.raises(IsobitError, match="takes no objects of Python"):
        resume(given.run.dir, rewards=len, quiet=True)


def test_a_learner_is_made_in_one_place() -> None:
    """Of all kinds of run; the control: a call is seen."""
    files = {
        path.name: calls_of("Learner", parsed(path)) for path in SOURCE.glob("training/**/*.py")
    }
    assert {name for name, calls in files.items() if calls} == {"learner.py"}
    assert calls_of("Learner", ast.parse("x = Learner(model, optimizer)")) == 1


@pytest.mark.parametrize(
    "place",
    ["directory", "go_on_with", "Heartbeat", "Recorder", "Trackers.__enter__", "Run._begin"],
)
def test_what_was_opened_is_closed_where_the_run_cannot_be(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The processes of rewards, the port and the lock, of a new run and of one that goes on. The
    control: without the fault a run is open, and holds all three."""
    config = load_config(write_config(tmp_path, base_model, steps=1, serve={"port": 0}))
    folder, other = Path(config.run.dir), tmp_path / "other"
    processes, opens = list[Processes](), open_processes
    monkeypatch.setattr(
        "isobit.training.parts.assembly.open_processes",
        lambda *arguments: processes.append(opens(*arguments)) or processes[-1],
    )
    with open_run(config, quiet=True) as run:
        port = int(next(run.parts.notes()).rpartition(":")[2].partition("/")[0])
        assert processes[0].rewards.workers
        assert in_use(folder)
        training_loop(run)
        run.finish()
    words = [f"serve.port={port}"]
    again = load_config(tmp_path / "config.yaml", [*words, f"run.dir={other}"])

    def fail(*_: object, **__: object) -> None:
        raise IsobitError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(f"isobit.training.run.{place}", fail)
        if "." not in place:
            patch.setattr(f"isobit.training.running.restoring.{place}", fail, raising=False)
        for opened in (partial(open_resumed, folder, words), partial(open_run, again)):
            with pytest.raises(IsobitError, match="no room"), opened(quiet=True):
                pass
    assert len(processes) == 3
    assert not any(each.rewards.workers for each in processes)
    assert not in_use(folder)
    assert not in_use(other)
    with socket.create_server(("127.0.0.1", port)):
        pass

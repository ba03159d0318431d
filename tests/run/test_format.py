"""A run of another format is refused in one line by every command that opens one, and a run of this
format is not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.run.format import FORMAT, FORMAT_NOW
from isobit.training.train import train
from tests.runs import write_config

COMMANDS = {
    "resume": ("train", "--resume", "RUN", "steps=2"),
    "replay": ("train", "--from-rollouts", "RUN", "--out", "replayed"),
    "verify": ("verify", "RUN"),
    "eval": ("eval", "RUN"),
    "report": ("report", "RUN"),
    "watch": ("watch", "RUN", "--once"),
    "track": ("track", "RUN", "tracking.trackers=[tensorboard]"),
    "export": ("export", "RUN", "--to", "exported"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("format")
    return train(load_config(write_config(folder, base_model), ["steps=1"]), quiet=True).run_dir


@pytest.mark.parametrize("command", COMMANDS)
def test_another_format_is_refused(
    finished: Path, tmp_path: Path, refused: Callable[..., str], command: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    words = [run if word == "RUN" else word for word in COMMANDS[command]]
    (run / FORMAT).unlink()
    line = refused(*words)
    assert f"run {run} was begun by an isobit before 0.2 (it has no {FORMAT})" in line
    assert "use the isobit that began it" in line
    for number in (1, FORMAT_NOW + 1):
        (run / FORMAT).write_text(f"{number}\n")
        assert f"has format {number}, and this isobit reads format {FORMAT_NOW}" in refused(*words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_this_format_is_opened(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The control of the refusals: the same commands on the same run, as it is."""
    from isobit import cli

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert (run / FORMAT).read_text() == f"{FORMAT_NOW}\n"
    monkeypatch.chdir(tmp_path)
    words = [str(run) if word == "RUN" else word for word in COMMANDS[command]]
    monkeypatch.setattr("sys.argv", ["isobit", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (0, None)

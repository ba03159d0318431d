"""Nothing that a tracker does stops, delays or spoils a run: each of these replaces a tracker's
library by one that misbehaves in one way."""

import os
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.monitor.trackers.process import Trackers, check_trackers
from isobit.run.directory import read_jsonl
from isobit.training.train import train
from tests.runs import fingerprint, write_config
from tests.until import MOST_SECONDS, until

OFF = {
    "trackers": ["wandb"],
    "project": "p",
    "name": None,
    "group": None,
    "completions": 0,
    "close_s": MOST_SECONDS,
}
SETTINGS = OFF | {"wandb": {"entity": None, "mode": "offline", "tags": []}}

GOOD = """
import json, os

class Settings:
    def __init__(self, **values): pass

class Run:
    resumed, url, starting_step = False, "https://example.org/run", 0
    def __init__(self, directory): self.directory = directory
    def log(self, values, step, commit): write(self.directory, step)
    def finish(self, exit_code): write(self.directory, f"exit {exit_code}")

def write(directory, what):
    with open(os.path.join(directory, "rows"), "a") as file: print(what, file=file)

def init(dir, **values): return Run(dir)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a module named wandb, of this text, before the real one."""
    (tmp_path / "shim").mkdir()

    def put(text: str) -> None:
        (tmp_path / "shim/wandb.py").write_text(text)
        monkeypatch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(tmp_path / "shim"), os.environ.get("PYTHONPATH", "")]),
        )

    return put


def rows(run: Path) -> list[str]:
    path = run / "tracking/wandb/rows"
    return path.read_text().split("\n")[:-1] if path.is_file() else []


def tracked(run: Path, steps: int, exit_code: int = 0, close_s: float = MOST_SECONDS) -> list[str]:
    """A run that writes some rows; returns what it said."""
    run.mkdir(exist_ok=True)
    said: list[str] = []
    with (
        Trackers(
            SETTINGS | {"close_s": close_s}, {}, run, lambda: exit_code, said.append
        ) as trackers,
        (run / "metrics.jsonl").open("a") as f,
    ):
        for step in range(1, steps + 1):
            f.write(f'{{"step": {step}, "entropy": 1.0}}\n')
            f.flush()
            trackers.poll()
    return said


def test_a_log_that_cannot_be_written_costs_the_log(tmp_path: Path, library) -> None:
    library(GOOD)
    (tmp_path / "run/tracking").mkdir(parents=True)
    (tmp_path / "run/tracking/follower.log").symlink_to("/dev/full")
    assert tracked(tmp_path / "run", 2) == ["wandb: https://example.org/run"]
    assert rows(tmp_path / "run") == ["1", "2", "exit 0"]


@pytest.mark.parametrize("code", [0, 143])
def test_rows_and_the_exit_code_arrive(tmp_path: Path, library, code: int) -> None:
    library(GOOD)
    assert tracked(tmp_path / "run", 3, code) == ["wandb: https://example.org/run"]
    assert rows(tmp_path / "run") == ["1", "2", "3", f"exit {code}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("def init(dir, **values): return Run(dir)", "raise OSError('broken install')"),
            "OSError: broken install",
        ),
        (
            ("return Run(dir)", "raise PermissionError('no such entity')"),
            "PermissionError: no such entity; nothing",
        ),
        (
            (
                "def log(self, values, step, commit):",
                "def log(self, values, step, commit): 1 / (step - 3);",
            ),
            "Zero",
        ),
        (
            ("def finish(self, exit_code):", "def finish(self, exit_code): raise ValueError();"),
            "ValueError: no message",
        ),
        (("return Run(dir)", "os._exit(7)"), "its process ended unexpectedly (7)"),
        (("return Run(dir)", "os.kill(os.getpid(), 9)"), "its process ended unexpectedly (-9)"),
    ],
)
def test_what_raises_or_dies_is_said_once(
    tmp_path: Path,
    library,
    change: tuple[str, str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert change[0] in GOOD
    library(GOOD.replace(*change))
    tracked(tmp_path / "run", 5)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("isobit: tracker wandb: ")
    assert message in lines[0]
    assert lines[0].endswith(f"`isobit track {tmp_path / 'run'}` sends the rest")
    if "Zero" in message:
        assert "it has the run up to step 2" in lines[0]


@pytest.mark.parametrize("where", ["return Run(dir)", "def log(self, values, step, commit):"])
def test_what_hangs_delays_only_the_end_and_by_a_limit(
    tmp_path: Path, library, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    hang = (
        "import time; time.sleep(1000); " + where
        if "return" in where
        else where + " import time; time.sleep(1000);"
    )
    library(GOOD.replace(where, hang))
    tracked(tmp_path / "run", 500, close_s=1.0)
    error = capfd.readouterr().err
    assert (
        "the time to send what is left (tracking.close_s) is over; nothing was sent to it" in error
    )
    assert error.count("\n") == 1


def test_what_prints_writes_into_its_log(
    tmp_path: Path, library, capfd: pytest.CaptureFixture[str]
) -> None:
    library(GOOD + '\nprint("hello")\nos.system("echo from a child")\n')
    tracked(tmp_path / "run", 1)
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "run/tracking/follower.log").read_text()
    assert "hello" in log
    assert "from a child" in log
    assert rows(tmp_path / "run") == ["1", "exit 0"]


@pytest.mark.slow
def test_a_run_is_the_same_with_a_tracker_that_fails(
    tmp_path: Path, base_model: Path, library, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole of it: weights, metrics, completions, as without trackers."""
    library(
        GOOD.replace(
            "def log(self, values, step, commit):", "def log(self, values, step, commit): 1 / 0;"
        )
    )
    prints = []
    for name, names in (("with", ["wandb"]), ("without", [])):
        (tmp_path / name).mkdir()
        tracking = {"trackers": names, "wandb": {"mode": "offline"}}
        config = write_config(tmp_path / name, base_model, tracking=tracking)
        prints.append(fingerprint(train(load_config(config)).run_dir))
    assert prints[0] == prints[1]
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert len(list(read_jsonl(tmp_path / "with/run/metrics.jsonl"))) == 4


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(IsobitError, match="wandb is not installed: pip install wandb"):
        check_trackers(SETTINGS)


def test_a_process_that_cannot_be_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tracking").write_text("in the way")
    with Trackers(SETTINGS, {}, tmp_path / "run", lambda: 0, print) as trackers:
        trackers.poll()
    assert trackers.failed
    assert "cannot start its process: Not a directory" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", ["1 / 0", "import time; time.sleep(1000)", "import os; os._exit(7)"]
)
def test_a_tracker_that_raises_or_hangs_holds_up_no_other(
    tmp_path: Path, library, capfd: pytest.CaptureFixture[str], other: str
) -> None:
    """Two trackers in one process, of which the other gets every row. The control ends the process,
    and with it both, which is said of both."""
    library(GOOD)
    (tmp_path / "shim/trackio.py").write_text(other)
    settings = SETTINGS | {
        "trackers": ["trackio", "wandb"],
        "trackio": {"dir": None, "space_id": None},
        "close_s": 5.0 if "sleep" in other else MOST_SECONDS,
    }
    run, ends = tmp_path / "run", "_exit" in other
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "entropy": 1.0}}\n' for step in (1, 2, 3))
    )
    with Trackers(settings, {}, run, lambda: 0, print) as trackers:
        until(lambda: ends or "3" in rows(run))
    assert trackers.failed
    assert (rows(run) == ["1", "2", "3", "exit 0"]) is not ends
    error = capfd.readouterr().err
    assert error.count("isobit: tracker trackio: ") == 1
    assert error.count("isobit: tracker wandb: ") == int(ends)

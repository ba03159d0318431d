"""Some seconds of damaged run directories, hostile ones by name, and the controls: a broken reader
is found."""

import errno
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.monitor.screen.watch import watch
from isobit.run.directory import METRICS, in_use
from tests.conftest import RunIsobit
from tests.loaders.outcome import some_seconds
from tests.runs import write_config

from . import __main__ as fuzzer
from . import cases

SEED = 20261123


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    cases.write_valid(folder, base_model)
    return folder


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid / "run", tmp_path / "run"))


def test_the_valid_run_is_read_by_every_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, command in cases.COMMANDS.items():
        command(run)
        assert "cannot be read" not in capsys.readouterr().err, name
    assert all((run / name).exists() for name in cases.TARGETS if name != "rollouts_from.txt")


@pytest.mark.slow
def test_some_seconds_without_a_traceback_or_a_hang(valid: Path) -> None:
    counts = some_seconds(partial(fuzzer.outcome, valid), SEED, seconds=15, most=300)
    assert min(counts.values()) > 5


def test_negative_control_a_broken_reader_is_found(
    valid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a hang is found too: `tests/loaders`, by the same watchdog."""

    def command(run: Path) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(cases, "COMMANDS", dict.fromkeys(cases.COMMANDS, command))
    kind, said = fuzzer.outcome(valid, SEED)
    assert kind == "failed"
    assert "ZeroDivisionError: planted" in said


def _pipe(name: str) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return harm


def _text(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content) and None


def _link(name: str) -> Callable[[Path], None]:
    """A file of the stranger's leads to one of the user's, which must stay as it is."""

    def harm(run: Path) -> None:
        (run.parent / "mine.txt").write_text("mine\n")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(run.parent / "mine.txt")

    return harm


def _foreign_offset(run: Path) -> None:
    state = run / cases.CHECKPOINT / "trainer" / "state.json"
    state.write_text(state.read_text().replace('"certificate.jsonl": ', '"../mine.txt": '))
    (run.parent / "mine.txt").write_text("mine\n" * 9999)
    shutil.rmtree(run / "checkpoints" / "step-000001")
    cases._sign(run / cases.CHECKPOINT, "trainer/state.json")


@pytest.mark.parametrize(
    ("command", "harm", "said"),
    [
        ("watch", _pipe(METRICS), "metrics.jsonl: not a regular file"),
        ("report", _pipe(METRICS), "metrics.jsonl: not a regular file"),
        ("report", _pipe("completions.jsonl.gz"), "completions.jsonl.gz: not a regular file"),
        ("track", _pipe(METRICS), "metrics.jsonl: not a regular file"),
        ("resume", _pipe(".lock"), "cannot write into run directory"),
        ("watch", _pipe("config.yaml"), "is not a run directory"),
        (
            "resume",
            _text("rollouts_from.txt", b"\xff\n"),
            "rollouts_from.txt: cannot be read: not UTF-8 text",
        ),
        ("report", _text("config.yaml", b"\xff\xfe"), "config.yaml: not UTF-8 text"),
        ("watch", _text("config.yaml", b"steps: &a [*a]\n"), "is not the config that a run writes"),
        ("track", _text("tracking/state.json", b"[1]"), "state.json cannot be read"),
        ("resume", _link(".lock"), "it is a link; a run writes into files of its own"),
        ("resume", _link(METRICS), "it is a link; a run writes into files of its own"),
        ("resume", _foreign_offset, "not the state of a run"),
    ],
)
def test_hostile_directories_are_one_clear_line(
    run: Path, command: str, harm: Callable[[Path], None], said: str
) -> None:
    harm(run)
    began = time.process_time()
    with pytest.raises(IsobitError, match=r".") as caught:
        cases.COMMANDS[command](run)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - began < 20
    mine = run.parent / "mine.txt"
    assert not mine.exists() or set(mine.read_text().splitlines()) == {"mine"}


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[1, 2]", b"", b'{"backend": 3}', b"[" * 100_000]
)
def test_a_machine_file_that_is_none_is_said(
    run: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "machine.json").write_bytes(content)
    for name in ("watch", "report", "track", "eval"):
        cases.COMMANDS[name](run)
    with (
        pytest.raises(IsobitError, match="was computed by the 3 backend")
        if b"3" in content
        else nullcontext()
    ):
        cases.COMMANDS["resume"](run)


def test_numbers_that_are_text_cost_their_row(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / METRICS).write_text(
        '{"step": "one"}\n{"step": 1, "reward/mean": "high"}\n{"step": 2, "reward/mean": 0.5}\n'
    )
    watch(run, once=True)
    said = capsys.readouterr()
    assert "metrics.jsonl: rows that cannot be read: 2; they are left out" in said.err
    assert "step 2 of 2" in said.out
    cases.COMMANDS["report"](run)
    assert (
        "2 rows cannot be read and left out; line 1: step is 'one', expected a whole number"
        in capsys.readouterr().err
    )


def test_no_permission_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit
) -> None:
    """Tests run as root, who may do anything: what the kernel says to others is said in its
    place."""
    opened, stat = Path.open, Path.stat

    def refuse(self: Path, *arguments: Any, **names: Any) -> Any:
        if self.name in (METRICS, "machine.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *arguments, **names)

    monkeypatch.setattr(Path, "open", refuse)
    for name in ("watch", "report", "track"):
        with pytest.raises(IsobitError, match=r"metrics\.jsonl: Permission denied"):
            cases.COMMANDS[name](run)

    def hidden(self: Path, **names: Any) -> Any:
        if run in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **names)

    monkeypatch.setattr(Path, "stat", hidden)
    for arguments in (
        ["watch", "--once"],
        ["report"],
        ["track"],
        ["verify"],
        ["eval"],
        ["export", "--to", "out"],
    ):
        code, _, line = run_isobit(arguments[0], run, *arguments[1:])
        assert code == 2, line
        assert line.count("\n") == 1, line
        assert "Permission denied" in line


@pytest.mark.slow
def test_a_line_without_end_takes_no_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sparse file of 256 MiB in one line; then a row that counts."""
    row = (run / METRICS).read_bytes().splitlines(keepends=True)[-1]
    with (run / METRICS).open("r+b") as file:
        file.truncate(256 << 20)
        file.seek(0, 2)
        file.write(b"\n" + row)
    tracemalloc.start()
    watch(run, once=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 64 << 20
    assert "rows that cannot be read: 1" in capsys.readouterr().err


def test_the_lock_is_asked_without_waiting(run: Path) -> None:
    assert not in_use(run)
    _pipe(".lock")(run)
    assert not in_use(run)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\x1b[31mb", "a\u202eb", ""])
def test_a_directory_that_a_terminal_would_obey_is_refused(
    tmp_path: Path, base_model: Path, name: str
) -> None:
    config = write_config(tmp_path, base_model, run={"dir": f"{tmp_path}/{name}" if name else ""})
    with pytest.raises(
        IsobitError, match=r"run\.dir.*: expected a path without control characters"
    ) as caught:
        load_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a #1", "a: b", "[a]", "'a", "1", "null", "*a", "ü\u00a0x"])
def test_a_directory_is_called_what_it_is_called(
    tmp_path: Path,
    base_model: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    run_isobit: RunIsobit,
) -> None:
    """What YAML would read otherwise: a comment, a mapping, a list, a number."""
    config = write_config(tmp_path, base_model, steps=1)
    monkeypatch.chdir(tmp_path)
    for arguments in ([str(config), "--out", name], ["--resume", name, "steps=2"]):
        assert run_isobit("train", *arguments, "--quiet")[0] == 0
    assert (tmp_path / name / "checkpoints" / "step-000002").is_dir()

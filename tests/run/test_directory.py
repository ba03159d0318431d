"""The run directory: locked, cut back on resume, readable after a crash; and interruption."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.run import durable
from isobit.run.certificate import CERTIFICATE
from isobit.run.completions import COMPLETIONS, HELD_OUT
from isobit.run.directory import (
    METRICS,
    QUANTIZATION,
    RunDirectory,
    read_jsonl,
    refuse_existing,
)
from isobit.run.ends import ends
from isobit.run.interruption import Interruption
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config


def test_a_new_directory_is_locked(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "deep" / "run", "steps: 1\n") as run:
        assert (run.directory / "config.yaml").read_text() == "steps: 1\n"
        with pytest.raises(IsobitError, match="in use by another process"):
            RunDirectory(run.directory, {})
    RunDirectory(run.directory, {}).__exit__()


def test_files_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "") as run:
        run.write_metrics({"step": 1.0})
        kept, _ = ends(run.directory, {"step": 1, **run.written()})
        run.write_metrics({"step": 2.0})
        run.write_completions([{"step": 2, "completion": "ü"}])
    with RunDirectory(tmp_path / "run", kept) as run:
        run.write_metrics({"step": 2.0, "grad_norm": float("nan")})
        assert run.written() == {
            "rows": 2,
            "offsets": {COMPLETIONS: 0, HELD_OUT: 0, QUANTIZATION: 0, CERTIFICATE: 0},
        }
        state = {"step": 2, **run.written()}
        found, lost = ends(run.directory, state)
        assert found[METRICS] > kept[METRICS]
        assert lost == []
        assert ends(run.directory, state | {"unrecorded": {}, "rows": 1}) == (kept, [])
        said = (
            "metrics.jsonl has 2 rows up to step 2, and had 3; the run goes on, and its "
            "weights are sound"
        )
        assert ends(run.directory, state | {"rows": 3})[1] == [f"{run.directory}: {said}"]
    assert list(read_jsonl(tmp_path / "run" / METRICS)) == [
        {"step": 1.0},
        {"step": 2.0, "grad_norm": None},
    ]
    assert (tmp_path / "run" / COMPLETIONS).read_bytes() == b""
    with pytest.raises(IsobitError, match=r"metrics\.jsonl is shorter than its checkpoint says"):
        RunDirectory(tmp_path / "run", {METRICS: 10_000})


def test_half_a_line_at_the_end_is_left_out_and_a_broken_one_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    assert capsys.readouterr().err == ""
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 3}]
    assert (
        "rows.jsonl: 1 row cannot be read and left out; line 2: not valid JSON"
        in capsys.readouterr().err
    )
    with pytest.raises(IsobitError, match="cannot read"):
        list(read_jsonl(tmp_path / "gone.jsonl"))


def test_a_metric_without_a_definition_cannot_be_logged(tmp_path: Path) -> None:
    with (
        RunDirectory.create(tmp_path / "run", "") as run,
        pytest.raises(AssertionError, match="mismatch/vibes"),
    ):
        run.write_metrics({"step": 1.0, "mismatch/vibes": 0.0})


def test_a_full_disk_says_how_to_go_on(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "") as run:
        run._files[METRICS].close()
        run._files[METRICS] = open("/dev/full", "wb")  # noqa: SIM115
        with pytest.raises(
            RunFailed, match=r"No space left on device; go on with: isobit train --resume"
        ):
            run.write_metrics({"step": 1.0})


@pytest.mark.parametrize("how", ["moved", "removed", "another in its place", "current directory"])
def test_a_directory_that_is_not_there_any_more_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing is written where it was; the control is written to before, and when it is back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with RunDirectory.create(Path("run"), "") as run:
        run.write_metrics({"step": 1.0})
        run.flush()
        if how == "current directory":
            monkeypatch.chdir(tmp_path / "elsewhere")
        elif how == "removed":
            shutil.rmtree("run")
        else:
            os.rename("run", "moved")
        if how == "another in its place":
            Path("run").mkdir()
            Path("run/.lock").touch()
        for write in (lambda: run.write_metrics({"step": 2.0}), run.flush):
            with pytest.raises(RunFailed, match=r"was moved or removed while the run worked, or"):
                write()
        if how == "moved":
            assert not Path("run").exists()
            os.rename("moved", "run")
            run.write_metrics({"step": 2.0})
            assert [row["step"] for row in read_jsonl(Path("run") / METRICS)] == [1, 2]


@pytest.mark.slow
def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path, base_model: Path) -> None:
    """As one that was never stopped: no step and no checkpoint is in two places."""
    whole = train(load_config(write_config(tmp_path, base_model)), quiet=True).run_dir
    place, moved = tmp_path / "place", tmp_path / "moved"

    def move(step: int, metrics: object) -> None:
        if step == 3:
            os.rename(place, moved)

    config = load_config(tmp_path / "config.yaml", [f"run.dir={place}"])
    with pytest.raises(RunFailed, match=r"place was moved .* isobit train --resume DIR$"):
        train(config, callbacks=[move], quiet=True)
    assert not place.exists()
    resume(moved, quiet=True)
    assert fingerprint(moved) == fingerprint(whole)


def test_a_run_that_has_not_begun_is_nothing_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "write_text", full)
    with pytest.raises(
        IsobitError, match=r"cannot write into run directory .*: No space left on device$"
    ):
        RunDirectory.create(tmp_path / "run", "steps: 1\n")
    refuse_existing(tmp_path / "run")


def test_only_an_empty_directory_is_taken(tmp_path: Path) -> None:
    refuse_existing(tmp_path / "new")
    refuse_existing(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    held = (
        (tmp_path, "is not empty"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "model", "is a model"),
    )
    for path, what in held:
        with pytest.raises(IsobitError, match=f"exists and {what}; choose another") as caught:
            refuse_existing(path)
        assert "--resume" not in str(caught.value)  # there is nothing to go on with
    with pytest.raises(IsobitError, match="cannot create run directory"):
        RunDirectory.create(tmp_path / "file" / "run", "")


def test_a_run_that_learned_nothing_may_be_begun_again(tmp_path: Path) -> None:
    """Its facts and the best of its evaluation go, what else is there stays. The controls: one that
    has a step, a checkpoint, completions, or a process."""
    run = tmp_path / "run"
    with RunDirectory.create(run, "steps: 1\n") as opened:
        opened.write_object("machine.json", {"backend": "another"})
        opened.write_metrics({"step": 0, "accuracy/held_out": 0.5})
        with pytest.raises(IsobitError, match="exists and is a run"):
            refuse_existing(run)
    (run / "best").mkdir()
    (run / "notes.txt").write_text("mine")
    with RunDirectory.create(run, "steps: 2\n"):
        pass
    assert (run / "config.yaml").read_text() == "steps: 2\n"
    assert (run / "metrics.jsonl").read_bytes() == b""
    assert (run / "notes.txt").read_text() == "mine"
    assert not (run / "machine.json").exists()
    assert not (run / "best").exists()
    for name, content in {
        "metrics.jsonl": b'{"step": 0}\n{"step": 1}\n',
        "completions.jsonl.gz": b"x",
        "checkpoints/step-000001/a": b"",
    }.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
        with pytest.raises(IsobitError, match="exists and is a run"):
            RunDirectory.create(run, "steps: 3\n")
        assert (run / name).read_bytes() == content
        (run / name).unlink()
        if name.startswith("checkpoints"):
            (run / name).parent.rmdir()
    RunDirectory.create(run, "steps: 3\n").__exit__()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_sets_a_flag_and_the_handlers_come_back(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # also where the tests run under nohup
    try:
        with Interruption() as interruption:
            assert (interruption.signal, interruption.exit_code) == (None, 0)
            os.kill(os.getpid(), number)
            assert (interruption.signal, interruption.exit_code) == (number, code)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert "finishing this step" in capsys.readouterr().err


def test_under_nohup_a_lost_terminal_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)

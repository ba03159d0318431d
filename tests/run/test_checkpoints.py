"""Checkpoints are whole or not there, whatever happens while they are written."""

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit import cli
from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.run import checkpoints
from isobit.run.checkpoints import (
    all_checkpoints,
    damage,
    go_on_from,
    newest,
    remove_leftovers,
    save,
)
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config


def content(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)
        (folder / "trainer").mkdir()
        (folder / "trainer" / "state.json").write_text("{}")

    return write


def failing(error: Exception) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content("half")(folder)
        raise error

    return write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (0, 5, 10, 100):
        save(tmp_path, step, content(str(step)), keep_last=2)
    assert names(tmp_path) == ["step-000010", "step-000100"]
    assert newest(tmp_path) == (tmp_path / "step-000100", [])
    save(tmp_path, 100, content("again"), keep_last=2)
    assert (tmp_path / "step-000100" / "model.safetensors").read_text() == "again"


@pytest.mark.slow
@given(
    keep_last=st.integers(1, 12),
    steps=st.lists(st.integers(0, 10_000_000), min_size=1, max_size=12, unique=True),
    harm=st.lists(st.sampled_from(["no", "damaged", "set aside"]), min_size=12, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_any_number_is_kept_of_any_number_of_checkpoints(
    keep_last: int, steps: list[int], harm: list[str]
) -> None:
    """After each save: the one just written, and of the others the newest, also where some are
    damaged (they count until a run that goes on sets them aside) or were set aside (they do
    not)."""
    with tempfile.TemporaryDirectory() as folder:
        kept: list[int] = []
        for step, what in zip(steps, harm):
            path = save(Path(folder), step, content(str(step)), keep_last)
            others = sorted(other for other in kept if other != step)
            kept = [*others[max(len(others) - (keep_last - 1), 0) :], step]
            assert [checkpoints.step_of(each) for each in all_checkpoints(Path(folder))] == sorted(
                kept
            )
            assert damage(path) is None
            if what == "damaged":
                flip(path)
            elif what == "set aside":
                path.rename(path.with_name(f".damaged-{path.name}"))
                kept.remove(step)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, content("good"), keep_last=1)
    with pytest.raises(
        RunFailed, match=r"step-000002: .*No space left on device.*; earlier checkpoints are intact"
    ):
        save(tmp_path, 2, failing(OSError(errno.ENOSPC, "No space left on device")), keep_last=1)
    assert names(tmp_path) == ["step-000001"]
    assert damage(tmp_path / "step-000001") is None


def test_another_error_is_not_swallowed_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 1, failing(ZeroDivisionError()), keep_last=1)
    assert names(tmp_path) == []


def flip(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[0] ^= 1
    (path / "model.safetensors").write_bytes(data)


def lose(path: Path) -> None:
    (path / "trainer" / "state.json").unlink()


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"model.saf')


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip, "model.safetensors does not match its checksum"),
        (lose, "state.json is missing"),
        (cut_manifest, "manifest.json cannot be read"),
        (no_manifest, "manifest.json is missing"),
    ],
)
def test_damage_is_seen_and_passed_over(
    tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    for step in (1, 2):
        save(tmp_path, step, content(str(step)), keep_last=2)
    assert damage(tmp_path / "step-000002") is None
    harm(tmp_path / "step-000002")
    path, warnings = newest(tmp_path)
    assert path.name == "step-000001"
    assert len(warnings) == 1
    assert said in warnings[0]
    harm(tmp_path / "step-000001")
    with pytest.raises(IsobitError, match="all 2 are damaged"):
        newest(tmp_path)


def test_what_an_interrupted_write_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, content("1"), keep_last=2)
    (tmp_path / ".writing-000002").mkdir()
    (tmp_path / ".writing-000002" / "model.safetensors").write_text("half")
    path, _ = newest(tmp_path)
    assert names(tmp_path) == [
        ".writing-000002",
        "step-000001",
    ]  # the directory may be that of a run at work
    go_on_from(path)
    assert names(tmp_path) == ["step-000001"]


def test_a_write_that_was_interrupted_between_its_two_renames_is_undone(tmp_path: Path) -> None:
    path = save(tmp_path, 1, content("1"), keep_last=1)
    path.rename(tmp_path / ".replaced-step-000001")
    (tmp_path / ".writing-step-000001").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-000001"]
    assert damage(path) is None


def test_what_was_just_saved_is_never_dropped_and_what_is_damaged_never_counted(
    tmp_path: Path,
) -> None:
    for step in (5, 10):
        save(tmp_path, step, content(str(step)), keep_last=2)
    flip(tmp_path / "step-000010")
    path, warnings = newest(tmp_path)
    assert (path.name, len(warnings)) == ("step-000005", 1)
    go_on_from(path)
    save(tmp_path, 7, content("7"), keep_last=1)
    assert names(tmp_path) == [".damaged-step-000010", "step-000007"]
    assert newest(tmp_path)[0].name == "step-000007"


def test_a_millionth_step_comes_after_the_others(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, content(str(step)), keep_last=2)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]
    assert newest(tmp_path)[0].name == "step-1000001"


def test_a_manifest_of_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 1, content("1"), keep_last=1)
    (path / "manifest.json").write_text("{}")
    assert damage(path) == "manifest.json names no files"
    with pytest.raises(IsobitError, match="there is none"):
        newest(tmp_path / "step-000001")


@pytest.mark.slow
def test_a_run_on_a_full_disk_fails_cleanly_and_goes_on_later(
    tmp_path: Path, base_model: Path
) -> None:
    """A limit on the size of files stands for the disk: the second checkpoint's optimizer state
    exceeds it."""
    config = write_config(tmp_path, base_model)
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    limit = (base_model / "model.safetensors").stat().st_size + 2048
    done = subprocess.run(
        [sys.executable, "-m", "isobit", "train", str(config), "--quiet"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "cannot save checkpoint" in done.stderr
    assert "earlier checkpoints are intact" in done.stderr
    saved = all_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == ["step-000000"]
    assert damage(saved[0]) is None
    finished = fingerprint(resume(tmp_path / "run").run_dir)
    (tmp_path / "other").mkdir()
    other = train(load_config(write_config(tmp_path / "other", base_model)))
    assert finished == fingerprint(other.run_dir)


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 3, content("x"), keep_last=1)
    assert sorted(json.loads((path / "manifest.json").read_text())) == [
        "model.safetensors",
        "trainer/state.json",
    ]

"""`isobit train CONFIG --redo`: what may be removed for a run that is done again, and what must not
be."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from isobit.cli import app
from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.run.directory import RunDirectory
from isobit.training.recording.overwrite import clear_finished
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config


@pytest.fixture
def path(tmp_path: Path, base_model: Path) -> Path:
    return write_config(tmp_path, base_model, steps=2)


def test_a_finished_run_of_the_same_config_is_done_again(path: Path) -> None:
    run = train(load_config(path)).run_dir
    (run / "mark").write_text("")
    for _ in range(2):  # the second time over what the command itself has left
        done = CliRunner().invoke(app, ["train", str(path), "--redo", "--quiet"])
        assert done.exit_code == 0, done.output
        assert not (run / "mark").exists()
        assert (run / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "extended",
            "holds a run of 3 steps, and this one has 2; go on with it: isobit train --resume",
        ),
        ("other", "holds a run of another configuration"),
        ("interrupted", "holds a run that has done 1 of its 2 steps"),
        ("at work", "in use by another process"),
    ],
)
def test_any_other_run_stays(path: Path, how: str, message: str) -> None:
    config = load_config(path)
    run = train(load_config(path, ["seed=5"] if how == "other" else [])).run_dir
    if how == "extended":
        resume(run, ["steps=3"])
    if how == "interrupted":
        first = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
        (run / "metrics.jsonl").write_text(first)
    held = RunDirectory(run, {}) if how == "at work" else None
    before = sorted(run.rglob("*"))
    with pytest.raises(IsobitError, match=message):
        clear_finished(config)
    assert sorted(run.rglob("*")) == before
    if held is not None:
        held.__exit__()


def test_a_run_that_died_before_its_first_step_does_not_block_its_own_command(
    path: Path, base_model: Path
) -> None:
    """Nor another config's, with and without --redo; it leaves what a run that was never there
    leaves. The control, a run of one step, is refused."""
    broken = path.with_name("digit_reward.py")
    works = broken.read_text()
    broken.write_text("def digits(prompts, completions, **columns):\n    raise ValueError('no')\n")
    for words in ((), ("--redo",), ("seed=5",)):
        died = CliRunner().invoke(app, ["train", str(path), "--quiet", *words])
        assert "step 0 is saved" in str(died.exception)
        assert (path.parent / "run" / "config.yaml").is_file()
    broken.write_text(works)
    run = train(load_config(path), quiet=True).run_dir
    alone = train(load_config(path, [f"run.dir={path.parent / 'alone'}"]), quiet=True).run_dir
    assert fingerprint(run) == fingerprint(alone)
    with pytest.raises(IsobitError, match="exists and is a run"):
        train(load_config(path, ["seed=5"]), quiet=True)


def test_what_holds_no_run_is_left_alone(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    clear_finished(config)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("")
    clear_finished(config)
    assert (tmp_path / "run" / "thesis.txt").exists()
    with pytest.raises(IsobitError, match="exists and is not empty"):
        train(config)


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("word", ["--resume", "--dry-run"])
def test_it_is_for_new_runs(path: Path, command: str, word: str) -> None:
    words = [word, str(path.parent / "run")] if word == "--resume" else [str(path), word]
    done = CliRunner().invoke(app, [command, *words, "--redo"])
    assert isinstance(done.exception, IsobitError)
    assert "--redo is for a new run: give a config, without --resume" in str(done.exception)


@pytest.mark.slow
def test_a_supervised_run_is_done_again(tmp_path: Path, path: Path, base_model: Path) -> None:
    """The controls stay: a run of other steps, and one of `isobit train`."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
    values = (
        f"{{model: {base_model}, task: rows.jsonl, steps: 2, batch_size: 2, out: {tmp_path}/a}}"
    )
    config = tmp_path / "sft.yaml"
    config.write_text(values)

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["sft", str(config), "--quiet", *words])
        return done.exit_code, str(done.exception)

    assert run() == (0, "None")
    alone = fingerprint(tmp_path / "a")
    (tmp_path / "a" / "mark").write_text("")
    assert run("--redo") == (0, "None")
    assert fingerprint(tmp_path / "a") == alone
    assert not (tmp_path / "a" / "mark").exists()
    assert "holds a run of 2 steps, and this one has 3" in run("--redo", "steps=3")[1]
    other = train(load_config(path)).run_dir
    assert "holds a run of another configuration" in run("--redo", "--out", str(other))[1]
    assert (other / "metrics.jsonl").is_file()

"""The files that a run reads: a resume on others says which, and stops unless it is told to go
on."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.run.directory import INPUTS
from isobit.training.running.inputs import inputs_of
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config

from .test_own_loss import CLIP

ADVANTAGE = """
def advantage(inputs):
    return [[None if r is None else r for r in row] for row in inputs.totals()]
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def run(tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that reads a file of each kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(base_model, tmp_path / "model")
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        rows = "".join(
            json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8)
        )
        (tmp_path / "data" / f"{name}.jsonl").write_text(rows)
    shutil.copy(tmp_path / "data" / "test.jsonl", tmp_path / "held.jsonl")
    (tmp_path / "judge_of_mine.py").write_text(
        "def judge(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "losses.py").write_text(CLIP)
    (tmp_path / "credit.py").write_text(ADVANTAGE)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    config = write_config(
        tmp_path,
        Path("model"),
        task={
            "name": "file",
            "path": "data",
            "held_out_path": "held.jsonl",
            "options": {"seed": 0},
            "held_out_size": None,
        },
        algorithm={
            "preset": "dr_grpo",
            "loss": "losses.py:loss",
            "advantage": "credit.py:advantage",
        },
        steps=2,
    )
    settings = load_config(
        config,
        [
            "model.chat_template=chat.jinja",
            'rewards.functions=["digit_reward.py:digits", "judge_of_mine:judge"]',
        ],
    )
    return train(settings).run_dir


def _append(name: str, text: str = "\n") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def _train_more(folder: Path) -> None:
    tensors = load_file(folder / "model" / "model.safetensors")
    save_file(
        {name: tensor * 1.0001 for name, tensor in tensors.items()},
        folder / "model" / "model.safetensors",
    )


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "data": (_append("data/train.jsonl"), "task.path (train.jsonl)"),
    "a file more": (
        lambda folder: (folder / "data" / "b.jsonl").write_text("{}"),
        "task.path (b.jsonl)",
    ),
    "a file less": (
        lambda folder: (folder / "data" / "test.jsonl").unlink(),
        "task.path (test.jsonl)",
    ),
    "held-out data": (_append("held.jsonl"), "task.held_out_path (held.jsonl)"),
    "a reward": (_append("digit_reward.py"), "rewards.functions: digits (digit_reward.py)"),
    "a reward's module": (
        _append("judge_of_mine.py"),
        "rewards.functions: judge (judge_of_mine.py)",
    ),
    "a template": (_append("chat.jinja", "!"), "model.chat_template (chat.jinja)"),
    "a loss": (_append("losses.py"), "algorithm.loss (losses.py)"),
    "an advantage": (_append("credit.py"), "algorithm.advantage (credit.py)"),
    "a model's config": (_append("model/config.json"), "model.path (config.json)"),
    "a tokenizer": (_append("model/tokenizer.json"), "model.path (tokenizer.json)"),
    "weights": (_train_more, "model.path (model.safetensors)"),
}


@pytest.mark.slow
def test_a_resume_on_other_files_says_which_and_stops(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alone, and then all of them, under `warn`; after that the new ones count."""
    folder, kept = run.parent, run.parent / "kept"
    names = (
        "data",
        "model",
        "held.jsonl",
        "digit_reward.py",
        "judge_of_mine.py",
        "chat.jinja",
        "losses.py",
        "credit.py",
    )
    kept.mkdir()
    for name in names:
        (shutil.copytree if (folder / name).is_dir() else shutil.copy)(folder / name, kept / name)  # type: ignore[operator]
    before = fingerprint(run)
    for change, said in CHANGES.values():
        change(folder)
        with pytest.raises(IsobitError, match="changed since the run began: ") as caught:
            resume(run, ["steps=3"])
        assert (
            f"changed since the run began: {said}; bring the files back, or go on with the new "
            "ones: "
        ) in str(caught.value)
        assert "run.on_change=warn" in str(caught.value)
        for name in names:
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
            (shutil.copytree if (kept / name).is_dir() else shutil.copy)(kept / name, folder / name)  # type: ignore[operator]
    assert fingerprint(run) == before
    assert resume(run).exit_code == 0  # the control: the files that it began with
    assert "changed since" not in capsys.readouterr().err
    for name in ("data", "a loss", "a reward"):
        CHANGES[name][0](folder)
    assert resume(run, ["steps=3", "run.on_change=warn"]).exit_code == 0
    said = capsys.readouterr().err
    assert (
        "task.path (train.jsonl), rewards.functions: digits (digit_reward.py), algorithm.loss "
        "(losses.py)"
    ) in said
    assert resume(run, ["steps=4", "run.on_change=stop"]).exit_code == 0
    assert "changed since" not in capsys.readouterr().err
    kept_hashes = json.loads((run / "inputs.json").read_text())
    assert len(kept_hashes["algorithm.loss"]["losses.py"]) == 2  # of both
    assert len(kept_hashes["task.held_out_path"]["held.jsonl"]) == 1


def test_a_file_that_is_gone_is_nothing_unless_it_is_needed(run: Path) -> None:
    """A whole checkpoint needs no base; data are needed, and who reads them says so."""
    shutil.rmtree(run.parent / "model")
    assert resume(run, ["steps=3"]).exit_code == 0
    shutil.rmtree(run.parent / "data")
    with pytest.raises(IsobitError, match="cannot read data file data: No such file"):
        resume(run, ["steps=4"])


def test_a_run_from_before_takes_the_files_that_are_there(run: Path) -> None:
    (run / "inputs.json").unlink()
    _append("data/train.jsonl")(run.parent)
    assert resume(run, ["steps=3"]).exit_code == 0
    _append("data/train.jsonl")(run.parent)
    with pytest.raises(IsobitError, match="changed since the run began"):
        resume(run, ["steps=4"])


def test_objects_of_python_and_rewards_by_name_have_no_file(
    tmp_path: Path, base_model: Path
) -> None:
    config = load_config(write_config(tmp_path, base_model), ["rewards.functions=exact_match"])
    assert set(inputs_of(config)) == {"model.path"}
    assert set(inputs_of(config)["model.path"]) >= {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }


@pytest.mark.slow
def test_a_config_that_was_edited_by_hand(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says each key that differs, and both values. The controls: what a resume may change
    is taken from the file too, and the config as it began goes on; told to, the run takes the new
    one, and has it from there on."""
    run = train(load_config(write_config(tmp_path, base_model, steps=2)), quiet=True).run_dir
    config = run / "config.yaml"
    began = config.read_text()
    edited = began.replace("learning_rate: 0.001", "learning_rate: 0.01")
    edited = edited.replace("group_size: 4", "group_size: 8")
    assert edited.count("\n") == began.count("\n")
    before = fingerprint(run)
    config.write_text(edited)
    said = (
        "changed since the run began: config.yaml (optimizer.learning_rate: 0.01, and it began "
        "with 0.001, sampling.group_size: 8, and it began with 4); bring the files back, or go on "
        f"with the new ones: isobit train --resume {run} run.on_change=warn"
    )
    with pytest.raises(IsobitError, match=re.escape(said)):
        resume(run, ["steps=3"])
    assert fingerprint(run) == before
    config.write_text(began.replace("\nsteps: 2\n", "\nsteps: 3\n"))
    assert len(resume(run, quiet=True).metrics) == 3
    assert "config.yaml" not in capsys.readouterr().err
    config.write_text(edited)
    resume(run, ["steps=4", "run.on_change=warn"], quiet=True)
    assert "config.yaml (optimizer.learning_rate: 0.01, " in capsys.readouterr().err
    assert len(resume(run, ["steps=5", "run.on_change=stop"], quiet=True).metrics) == 5


def test_a_config_of_another_version_is_compared_where_both_have_a_key(
    tmp_path: Path, base_model: Path
) -> None:
    """As after an update that knows more keys; a record that somebody has damaged is none."""
    run = train(load_config(write_config(tmp_path, base_model, steps=1)), quiet=True).run_dir
    kept = json.loads((run / INPUTS).read_text())
    values = json.loads(kept["config.yaml"]["optimizer"][-1])
    del values["learning_rate"]
    kept["config.yaml"] |= {"optimizer": [json.dumps({**values, "of_old": 1})], "seed": ["{"]}
    (run / INPUTS).write_text(json.dumps(kept))
    resume(run, ["steps=2"], quiet=True)
    values["schedule"] = "linear"
    kept["config.yaml"]["optimizer"] = [json.dumps(values)]
    (run / INPUTS).write_text(json.dumps(kept))
    with pytest.raises(IsobitError, match=r'optimizer\.schedule: "constant", and it began with'):
        resume(run, ["steps=3"], quiet=True)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"task": 5}', b"\xff"])
def test_a_record_of_inputs_that_is_gone_is_said(
    tmp_path: Path, base_model: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once: the run keeps what it goes on with. The control, with its record, says nothing."""
    run = train(load_config(write_config(tmp_path, base_model, steps=1)), quiet=True).run_dir
    (run / INPUTS).unlink() if content is None else (run / INPUTS).write_bytes(content)
    capsys.readouterr()
    resume(run, ["steps=2"], quiet=True)
    how = "is missing" if content is None else "cannot be read"
    assert f"{INPUTS} {how}: whether data, reward functions and config" in capsys.readouterr().err
    resume(run, ["steps=3"], quiet=True)
    assert INPUTS not in capsys.readouterr().err

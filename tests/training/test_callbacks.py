"""Functions of a file that a run calls after every step: what they are given, that they change nothing
that is learned, and one line for what they raise."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config, load_sft_config
from isobit.errors import IsobitError, RunFailed
from isobit.run.directory import read_jsonl
from isobit.training.commands.dry_run import dry_run, supervised_dry_run
from isobit.training.train import resume, train, train_supervised
from tests.runs import fingerprint, write_config
from tests.training import test_sft_run

STEPS = """
import json
from contextlib import nullcontext
from pathlib import Path

HERE = Path(__file__).parent

def tell(step, metrics):
    with (HERE / "told.jsonl").open("a") as file:
        file.write(json.dumps([step, metrics]) + "\\n")

def refuses(step, metrics):
    raise ValueError(f"enough at {step}")

def alone(step):
    pass
"""


def written(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "steps.py").write_text(STEPS)
    return f"{folder / 'steps.py'}"


def told(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


def test_each_step_is_told_and_nothing_else_changes(tmp_path: Path, base_model: Path) -> None:
    """With the row that metrics.jsonl has. A run that goes on may have none."""
    steps = written(tmp_path / "told")
    given = [f"run.callbacks=[{steps}:tell]", "steps=2"]
    found = train(load_config(write_config(tmp_path / "told", base_model), given))
    rows = list(read_jsonl(found.run_dir / "metrics.jsonl"))
    assert told(tmp_path / "told") == [[row["step"], row] for row in rows]
    resume(found.run_dir, ["run.callbacks=[]", "steps=3"])
    assert len(told(tmp_path / "told")) == 2
    (tmp_path / "plain").mkdir()
    plain = train(load_config(write_config(tmp_path / "plain", base_model), ["steps=3"]))
    assert fingerprint(plain.run_dir) == fingerprint(found.run_dir)


def test_a_supervised_run_tells_too(tmp_path: Path) -> None:
    steps = written(tmp_path / "sft")
    path = test_sft_run.written(tmp_path / "sft")
    config = load_sft_config(path, [f"run.callbacks=[{steps}:tell]", "steps=2"])
    train_supervised(config, quiet=True)
    assert [step for step, _ in told(tmp_path / "sft")] == [1, 2]
    assert all("loss/cross_entropy" in metrics for _, metrics in told(tmp_path / "sft"))


def test_what_one_raises_ends_the_run_in_one_line(tmp_path: Path, base_model: Path) -> None:
    """After its step, which is saved; what cannot be called is refused before anything is written."""
    steps = written(tmp_path / "run1")
    path = write_config(tmp_path / "run1", base_model)
    run = tmp_path / "run1" / "run"
    for name, said in (
        (f"{steps}:alone", r"expected def on_step\(step, metrics\)"),
        (f"{steps}:tel", "did you mean 'tell'"),
        (f"{tmp_path}/none.py:tell", "no file"),
        ("steps", "run.callbacks"),
    ):
        with pytest.raises(IsobitError, match=said) as caught:
            train(load_config(path, [f"run.callbacks=[{name}]"]))
        assert "\n" not in str(caught.value)
        assert not run.exists()
    with pytest.raises(RunFailed, match=r"ValueError: enough at 1 \(steps\.py, line 13\)") as ended:
        train(load_config(path, [f"run.callbacks=[{steps}:refuses]"]))
    assert "step 1 is saved; go on with: isobit train --resume" in str(ended.value)
    resume(run, ["run.callbacks=[]", "steps=2"])
    (tmp_path / "plain").mkdir()
    plain = train(load_config(write_config(tmp_path / "plain", base_model), ["steps=2"]))
    name = "model.safetensors"
    assert fingerprint(plain.run_dir)[name] == fingerprint(run)[name]


@pytest.mark.parametrize("what", ["train", "sft"])
def test_a_dry_run_checks_them_too(tmp_path: Path, base_model: Path, what: str) -> None:
    """The control: one that can be called."""
    steps = written(tmp_path)
    for name, mistake in (
        ("alone", "expected def on_step"),
        ("tell", None),
        ("nobody", "no function"),
    ):
        given = [f"run.callbacks=[{steps}:{name}]", "steps=1"]
        said: list[str] = []
        with pytest.raises(IsobitError, match=mistake) if mistake else nullcontext():
            if what == "train":
                dry_run(load_config(write_config(tmp_path, base_model), given), said.append)
            else:
                path = test_sft_run.written(tmp_path, base_model)
                supervised_dry_run(load_sft_config(path, given), said.append)
        assert bool(said) == (mistake is None)

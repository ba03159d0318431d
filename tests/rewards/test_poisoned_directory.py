"""Code that lies in the present directory is not run by the processes that isobit starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.run.interpreter import module_command
from isobit.training.train import train
from tests.runs import write_config

NAMES = (
    "difflib",
    "json",
    "inspect",
    "ast",
    "sitecustomize",
    "typing",
    "dataclasses",
    "tensorboard",
    "runpy",
    "zlib",
)


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A directory as a model's, whose modules leave a mark when they are imported."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'mark')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    return folder


def test_workers_trackers_and_cages_run_none_of_it(
    tmp_path: Path, poisoned: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "1+1=", "tests": ["assert f(1) == 1"]}\n' * 4
    )
    code = {"function": "code", "options": {"column": "tests"}}
    config = load_config(
        write_config(
            tmp_path,
            base_model,
            task={
                "name": "file",
                "path": str(tmp_path / "prompts.jsonl"),
                "held_out_size": 0,
                "options": {},
            },
            rewards={"functions": [{"function": f"{tmp_path}/digit_reward.py:digits"}, code]},
            tracking={"trackers": ["tensorboard"]},
            prompts_per_step=1,
            sampling={"group_size": 2},
            steps=1,
        )
    )
    monkeypatch.chdir(poisoned)
    assert train(config).exit_code == 0
    assert not (tmp_path / "mark").exists()


def test_negative_control_python_itself_runs_it(tmp_path: Path, poisoned: Path) -> None:
    plain = [sys.executable, "-m", "isobit.tasks.rewards.named"]
    for command, marked in ((plain, True), (module_command("isobit.tasks.rewards.named"), False)):
        (tmp_path / "mark").unlink(missing_ok=True)
        done = subprocess.run(command, cwd=poisoned, capture_output=True, check=False)
        assert (done.returncode != 0) == marked
        assert (tmp_path / "mark").exists() == marked

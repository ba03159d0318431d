"""The examples run against a server that trains, and hold what they say."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT, reader_folder
from tests.models import require

from .helpers import KEY, Running, serving

STEP = re.compile(r"^step \d+  reward (-?[\d.]+)  (\d+) of (\d+) differ$", re.M)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A server that trains, over the model that readers of the pages have; and a folder of its
    own."""
    require("native")
    where = reader_folder(tmp_path_factory.mktemp("examples"))
    (where / "token").write_text(KEY + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.serve.helpers.TOKENS", (KEY,))
        patch.setenv("TINKER_TELEMETRY", "0")
        base = where / "path" / "to" / "hf_checkpoint"
        with serving(base, state=where / "state", kv_pages=4000) as running:
            yield running, where


def run(name: str, *arguments: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_grpo_learns_and_no_log_probability_differs(trainer: tuple[Running, Path]) -> None:
    server, where = trainer
    printed = run("tinker_grpo.py", server.url, str(where / "token"), "8")
    steps = STEP.findall(printed)
    rewards = [float(reward) for reward, _, _ in steps]
    assert len(steps) == 8
    assert all(int(differ) == 0 and int(count) > 100 for _, differ, count in steps)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 3, rewards
    assert re.search(r"^saved tinker://\S+/weights/short$", printed, re.M)


@pytest.mark.parametrize("recipe", ["math_rl", "chat_sl", "dpo"])
def test_a_recipe_of_the_cookbook(trainer: tuple[Running, Path], recipe: str) -> None:
    if importlib.util.find_spec("tinker_cookbook") is None:
        pytest.skip("tinker_cookbook is not installed: pip install tinker-cookbook")
    server, where = trainer
    model = str(server.gateway.model.directory)
    printed = run("cookbook.py", recipe, server.url, str(where / "token"), model, "2")
    found = dict(re.findall(r"^(\S+): (.*)$", printed, re.M))
    if recipe == "math_rl":
        assert found["optim/kl_sample_train_v1"] == "0.0 to 0.0, 0.0 in 2 of 2"
        assert found["optim/kl_sample_train_v2"] == "0.0 to 0.0, 0.0 in 2 of 2"
    elif recipe == "dpo":
        assert found["margin"].startswith("0.0 to ")
        assert not found["margin"].startswith("0.0 to 0.0")
    else:
        assert "train_mean_nll" in found

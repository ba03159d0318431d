"""Whole runs with tools and environments, by the command."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.cli.commands.dry_run import dry_run
from isobit.config import load_config
from isobit.run.completions import COMPLETIONS, read
from isobit.training.train import train
from tests.environments.helpers import written
from tests.environments.test_mcp import COMMAND
from tests.environments.test_trl import ENVIRONMENTS, TOOLS
from tests.models import tiny_model

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
TEMPLATE = (
    "{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ '<s>' + m['role'][0] + ' ' + m['content'] }}"
    "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}<s>a {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    tiny_model(alphabet=CHARACTERS, scale=2.0, max_positions=256).save(path / "model")
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    written(path, "envs.py", ENVIRONMENTS)
    written(path, "tools.py", TOOLS)
    written(
        path,
        "plays.jsonl",
        "".join(json.dumps({"prompt": "Go" * (i + 1)}) + "\n" for i in range(4)),
    )
    return path


def config_of(folder: Path, run: Path, **changes: Any) -> Any:
    values = {
        "model": {"path": str(folder / "model")},
        "task": {"path": str(folder / "plays.jsonl"), "chat": True},
        "prompts_per_step": 2,
        "sampling": {"group_size": 2, "max_new_tokens": 4},
        "optimizer": {"learning_rate": 1e-3},
        "steps": 1,
        "run": {"dir": str(run / "run"), "report": False},
        **changes,
    }
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path)


def test_a_class_of_trls_documentation_is_a_run(folder: Path, tmp_path: Path) -> None:
    """`IncrementEnv` owns the task and the reward: what it asks is behind the row's prompt, and no
    other reward is named."""
    environment = {"factory": f"{folder}/envs.py:IncrementEnv"}
    result = train(config_of(folder, tmp_path, environment=environment))
    rows = list(read(result.run_dir / COMPLETIONS))
    assert len(rows) == 4
    for row in rows:
        assert list(row["rewards"]) == ["IncrementEnv"]
        assert "Increment the counter by" in row["prompt"]
        assert row["reward"] == 0.0  # a target is at least 1, and this model calls nothing
    assert result.metrics[-1]["mismatch/differing_tokens"] == 0


def test_a_dry_run_shows_the_tools(folder: Path, tmp_path: Path) -> None:
    environment = {"tools": [f"{folder}/tools.py:multiply"], "mcp": [COMMAND]}
    rows = [json.dumps({"prompt": "a" * (i + 1), "answer": "1"}) for i in range(4)]
    written(tmp_path, "rows.jsonl", "\n".join(rows) + "\n")
    task = {"path": str(tmp_path / "rows.jsonl"), "chat": True, "shuffle": False}
    said = list[str]()
    config = config_of(folder, tmp_path, environment=environment, rewards="exact_match", task=task)
    dry_run(config, said.append)
    assert said[-1].endswith("[multiply][add][act]<s>u a</s><s>a ")

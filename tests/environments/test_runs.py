"""Whole runs with tools and environments, by the command."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.run.completions import COMPLETIONS, read
from isobit.training.commands.dry_run import dry_run
from isobit.training.commands.play import play
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


def test_a_row_that_is_played_is_what_a_run_samples_of_it(folder: Path, tmp_path: Path) -> None:
    reset = (
        "class Env:\n def reset(self, **c): return 'and on'\n def get_reward(self): return 0.5\n"
    )
    environment = {"factory": f"{written(tmp_path, 'own.py', reset)}:Env"}
    config = config_of(folder, tmp_path, environment=environment)
    recorded = {
        row["prompt"]: row["completion"]
        for row in read(train(config).run_dir / COMPLETIONS)
        if row["sample_index"] == 0
    }
    sampled = dict[str, str]()
    for number in range(4):
        texts = list[str]()
        play(config, number, texts.append)
        _, shown, answer, total = texts
        prompt, completion = (
            text.split("\n", 1)[1].replace("<s>", "").replace("</s>", "")
            for text in (shown, answer)
        )
        sampled[prompt] = completion
        assert "reward 0.5 (Env 0.5); turns: 1; " in total
    assert {prompt: sampled[prompt] for prompt in recorded} == recorded
    with pytest.raises(IsobitError, match="--row 4: the training data has rows 0 to 3"):
        play(config, 4, print)


def test_a_row_is_played_with_a_calibrated_cache(folder: Path, tmp_path: Path) -> None:
    """As the first step calibrates it."""
    texts = list[str]()
    rewards = written(
        tmp_path, "r.py", "def r(completions, **c): return [1.0] * len(completions)\n"
    )
    play(
        config_of(folder, tmp_path, precision="fp8-rollout-kv", rewards=f"{rewards}:r"),
        0,
        texts.append,
    )
    assert "reward 1 (r 1)" in texts[-1]


def test_a_dry_run_shows_the_tools(folder: Path, tmp_path: Path) -> None:
    environment = {"tools": [f"{folder}/tools.py:multiply"], "mcp": [COMMAND]}
    rows = [json.dumps({"prompt": "a" * (i + 1), "answer": "1"}) for i in range(4)]
    written(tmp_path, "rows.jsonl", "\n".join(rows) + "\n")
    task = {"path": str(tmp_path / "rows.jsonl"), "chat": True, "shuffle": False}
    said = list[str]()
    config = config_of(folder, tmp_path, environment=environment, rewards="exact_match", task=task)
    dry_run(config, said.append)
    assert said[-1].endswith("[multiply][add][act]<s>u a</s><s>a ")


BROKEN = """
import os
from isobit.data.turns import Step

class Raising:
    def reset(self, **columns):
        if os.environ.get("LANG") == "down":
            raise RuntimeError("server is down")
        return " Now!"
    async def step(self, turn):
        raise KeyError("board")

class Some(Raising):
    async def step(self, turn):
        if turn.number == 0:
            return Step(({"role": "user", "content": "On."},))
        if self.fails:
            raise KeyError("board")
        return Step(reward=0.5, done=True)
    def reset(self, prompt, **columns):
        self.fails = prompt[0]["content"] == "Go"

class Silent(Raising):
    async def step(self, turn):
        return Step(done=True)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Raising", "of step 1 could be scored: step: KeyError: 'board' (broken.py, line 11)"),
        ("Silent", "of step 1 could be scored: no reward was given (Silent said None)"),
    ],
)
def test_a_run_whose_episodes_have_no_score_ends(
    folder: Path, tmp_path: Path, name: str, says: str
) -> None:
    factory = written(tmp_path, "broken.py", BROKEN) + f":{name}"
    config = config_of(folder, tmp_path, environment={"factory": factory})
    with pytest.raises(RunFailed) as caught:
        train(config)
    assert says in str(caught.value)


def test_an_evaluation_says_what_could_not_be_scored(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory = written(tmp_path, "broken.py", BROKEN) + ":Raising"
    task = {"path": str(folder / "plays.jsonl"), "chat": True, "held_out_size": 1}
    evaluation = {"every": 1, "samples": 1}
    config = config_of(
        folder, tmp_path, environment={"factory": factory}, task=task, evaluation=evaluation
    )
    with pytest.raises(RunFailed):
        train(config)
    said = "; unscored completions, wrong and in no mean reward: 1; the first: step: KeyError"
    assert said in capsys.readouterr().err


def test_a_run_goes_on_without_scores_where_that_is_asked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory = written(tmp_path, "broken.py", BROKEN) + ":Raising"
    changes = {"environment": {"factory": factory}, "rewards": {"on_error": "skip"}}
    result = train(config_of(folder, tmp_path, **changes))
    assert result.metrics[-1]["groups/unscored"] == 4
    assert capsys.readouterr().err.count("unscored: step: KeyError: 'board'") == 1


def test_a_run_goes_on_where_some_episodes_have_no_score(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory = written(tmp_path, "broken.py", BROKEN) + ":Some"
    result = train(
        config_of(folder, tmp_path, environment={"factory": factory}, prompts_per_step=4)
    )
    assert result.metrics[-1]["groups/unscored"] == 2
    line = "unscored: step: KeyError: 'board' (broken.py, line 18) ... 1 more like it"
    assert line in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("opened", [train, lambda config: dry_run(config, lambda text: None)])
def test_a_first_row_that_cannot_begin_is_told_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    monkeypatch.setenv("LANG", "down")
    factory = written(tmp_path, "broken.py", BROKEN) + ":Raising"
    config = config_of(folder, tmp_path, environment={"factory": factory})
    with pytest.raises(IsobitError) as caught:
        opened(config)
    assert "reset: RuntimeError: server is down (broken.py, line 8)" in str(caught.value)
    assert "plays.jsonl:" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_first_row_of_each_environment_is_begun(folder: Path, tmp_path: Path) -> None:
    broken = written(tmp_path, "broken.py", BROKEN.replace("self, **columns", "self, gone"))
    rows = [{"prompt": "Go", "environment": "game"}] * 3
    rows += [{"prompt": "Go", "environment": "other"}]
    written(tmp_path, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    factory = {"game": f"{folder}/envs.py:IncrementEnv", "other": f"{broken}:Raising"}
    config = config_of(
        folder,
        tmp_path,
        environment={"factory": factory},
        task={"path": str(tmp_path / "rows.jsonl"), "chat": True},
    )
    with pytest.raises(IsobitError, match=r"rows.jsonl:4: .*missing a required argument: 'gone'"):
        dry_run(config, lambda text: None)


def test_a_dry_run_shows_what_reset_adds(folder: Path, tmp_path: Path) -> None:
    factory = written(tmp_path, "broken.py", BROKEN) + ":Raising"
    said = list[str]()
    dry_run(config_of(folder, tmp_path, environment={"factory": factory}), said.append)
    assert said[-1].endswith(" Now!</s><s>a ")


@pytest.mark.parametrize("name", ["Raising", "OneTurn"])
def test_a_template_that_does_not_end_answers_is_told_at_the_start(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """The control has one turn, to which nothing is appended."""
    template = written(tmp_path, "open.jinja", TEMPLATE.replace("'</s>'", "'~'"))
    one = name == "OneTurn"
    factory = written(tmp_path, "broken.py", BROKEN) + ":Raising"
    config = config_of(
        folder,
        tmp_path,
        model={"path": str(folder / "model"), "chat_template": template},
        environment={"factory": factory, "max_turns": 1 if one else 3},
    )
    if one:
        dry_run(config, lambda text: None)
        return
    with pytest.raises(IsobitError, match=r"does not end an answer .* \{\{ eos_token \}\}"):
        dry_run(config, lambda text: None)

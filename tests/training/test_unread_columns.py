"""The dry run of every kind of run names the columns of the data that nothing reads; and rows of one
prompt that an environment tells apart are told apart by what is said of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config, load_sft_config
from isobit.data.columns import ANY, unread
from isobit.data.dataset import Shaping, read_examples
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.tasks.rewards.functions import load_function
from isobit.training.commands.dry_run import supervised_dry_run
from isobit.training.parts.assembly import task_of
from isobit.training.parts.cautions import cautions
from tests.conftest import RunIsobit
from tests.environments.test_runs import CHARACTERS, TEMPLATE
from tests.models import tiny_model
from tests.runs import dry_run_text

SAID = "columns of the data that nothing reads: "
CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
REWARDS = """
def all_of(completions, **columns):
    return [0.0 for _ in completions]

def some(completions, answer, **columns):
    return [0.0 for _ in completions]

def one(completions, answer):
    return [0.0 for _ in completions]

def verl(data_source, solution_str, ground_truth):
    return 0.0

class Play:
    def reset(self, seed, **columns):
        return f"{seed}"

    def get_reward(self):
        return 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    tiny_model(alphabet=CHARACTERS, scale=2.0, max_positions=256).save(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def data(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def config(folder: Path, model: Path, task: dict[str, Any], **changes: Any) -> Path:
    (folder / "own.py").write_text(REWARDS)
    values = {
        "model": {"path": str(model)},
        "task": {"held_out_size": 0, **task},
        "optimizer": {"learning_rate": 1e-3},
        "steps": 1,
        "run": {"dir": str(folder / "run"), "report": False},
        **changes,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def sampled(folder: Path, model: Path, task: dict[str, Any], **changes: Any) -> Path:
    given = {"prompts_per_step": 1, "sampling": {"group_size": 2, "max_new_tokens": 2}}
    return config(folder, model, task, **{**given, **changes})


def line(text: str) -> str | None:
    lines = [each.removeprefix(SAID) for each in text.splitlines() if each.startswith(SAID)]
    assert len(lines) < 2
    return lines[0] if lines else None


ROW = {"prompt": "1+1=", "answer": "2", "system": "Add.", "tools": [], "id": 3}


@pytest.mark.parametrize(
    ("reward", "names"),
    [
        ("one", ["system", "tools", "id"]),
        ("some", ["system", "tools"]),
        ("all_of", ["system", "tools"]),
        ("verl", ["system", "tools", "id"]),
    ],
)
def test_a_run_with_rewards(tmp_path: Path, model: Path, reward: str, names: list[str]) -> None:
    """A function that takes every column may read any, but it gives the model no tools."""
    path = sampled(
        tmp_path, model, {"path": data(tmp_path, ROW)}, rewards=f"{tmp_path}/own.py:{reward}"
    )
    said = line(dry_run_text(load_config(path)))
    assert said is not None
    assert [name for name in ROW if f"'{name}'" in said] == names
    assert "'tools' (environment.tools names the tools" in said
    assert ("a reward function reads" in said) == ("id" in names)


def test_a_run_that_reads_every_column_says_nothing(tmp_path: Path, model: Path) -> None:
    row = {"question": "1+1=", "solution": "2"}
    task = {"path": data(tmp_path, row), "columns": {"prompt": "question", "answer": "solution"}}
    path = sampled(tmp_path, model, task, rewards=f"{tmp_path}/own.py:one")
    assert line(dry_run_text(load_config(path))) is None


def test_a_distillation(tmp_path: Path, model: Path) -> None:
    """No reward reads the answer; the control shows it to the teacher."""
    algorithm = {"advantage": "distillation", "kl_coefficient": 1.0, "kl_in_reward": True}
    row = {"prompt": "1+1=", "answer": "2"}
    reference: dict[str, Any] = {"path": str(model)}
    for shown, said in (
        ({}, True),
        ({"shown": {"demonstration": "answer", "template": "{prompt} {shown}"}}, False),
    ):
        given = {"algorithm": algorithm, "reference": {**reference, **shown}}
        path = sampled(tmp_path, model, {"path": data(tmp_path, row)}, **given)
        assert (line(dry_run_text(load_config(path))) or "").startswith("'answer'") is said


@pytest.mark.parametrize(
    ("loss", "row", "said"),
    [
        (
            "cross_entropy",
            {"messages": CHAT, "id": 1},
            "'id'; task.columns gives a column another name",
        ),
        ("cross_entropy", {"messages": CHAT}, None),
        (
            "cross_entropy",
            {"prompt": "1", "completion": "2", "weight": 0},
            "'weight' (messages have a key",
        ),
        ("cross_entropy", {"instruction": "1", "input": "", "output": "2", "text": "3"}, "'text'"),
        (
            "cross_entropy",
            {"conversations": CHAT, "system": "Add."},
            "'system' (a message of role system",
        ),
        ("cross_entropy", {"text": "1+1=2"}, None),
        (
            "cross_entropy",
            {"prompt": "1", "completion": "2", "label": True},
            "'label' (loss: kto reads it)",
        ),
        ("dpo", {"prompt": "1", "chosen": "2", "rejected": "3", "completion": "4"}, "'completion'"),
        ("dpo", {"prompt": "1", "chosen": "2", "rejected": "3"}, None),
        ("kto", {"prompt": "1", "completion": "2", "label": True, "score": 0.5}, "'score'"),
        ("kto", {"prompt": "1", "completion": "2", "label": True}, None),
    ],
)
def test_a_supervised_run(
    tmp_path: Path, model: Path, loss: str, row: dict[str, Any], said: str | None
) -> None:
    task = {"path": data(tmp_path, row, row)}
    path = config(tmp_path, model, task, loss=loss, batch_size=2)
    blocks: list[str] = []
    supervised_dry_run(load_sft_config(path), blocks.append)
    found = line("\n".join(blocks))
    assert found is None if said is None else (found or "").startswith(said)


def test_an_evaluation(tmp_path: Path, model: Path, run_isobit: RunIsobit) -> None:
    """The control reports each value of the column."""
    (tmp_path / "own.py").write_text(REWARDS)
    rows = data(tmp_path, {"prompt": "1+1=", "answer": "2", "level": "easy"})
    words = ["eval", model, "--data", rows, "--reward", f"{tmp_path}/own.py:one"]
    for more, said in (([], "'level'"), (["--tag", "level"], "")):
        code, _, err = run_isobit(*words, "--max-new-tokens", 1, *more)
        assert not code
        assert (line(err) or "").startswith(said)
        assert bool(line(err)) is bool(said)


def test_the_columns_that_verls_functions_take(tmp_path: Path) -> None:
    """`answer` is `reward_model.ground_truth`, so that column is read."""
    (tmp_path / "own.py").write_text(REWARDS)
    row = {"prompt": "1", "reward_model": {"ground_truth": "2"}, "data_source": "x", "ability": "y"}
    examples = read_examples(Source(Path("rows"), rows=[row]), Shaping())
    function = load_function(f"{tmp_path}/own.py:verl")
    assert unread(examples, function.names, supervised=False) == ["ability"]
    assert unread(examples, [ANY], supervised=False) == []


def plays(folder: Path, seeds: list[int], name: str = "rows.jsonl") -> str:
    return data(folder, *({"prompt": "Play.", "seed": seed} for seed in seeds), name=name)


def told(path: Path, model: Path) -> list[str]:
    from isobit.model.described import described

    loaded = load_config(path)
    return [w for w in cautions(loaded, task_of(loaded), described(model, None)) if "the same" in w
            or "are training" in w]  # fmt: skip


def test_an_environment_tells_rows_of_one_prompt_apart(tmp_path: Path, model: Path) -> None:
    """20 rows of one prompt are 20 games: a tenth of them is held out, and none is in both parts.
    The controls: without the environment there is one prompt, and a row in both parts is told."""
    environment = {"factory": f"{tmp_path}/own.py:Play"}
    evaluation = {"every": 1}
    task: dict[str, Any] = {"path": plays(tmp_path, list(range(20))), "chat": True}
    task["held_out_size"] = None
    path = sampled(tmp_path, model, task, environment=environment, evaluation=evaluation)
    loaded = task_of(load_config(path))
    assert (len(loaded.train), len(loaded.held_out)) == (18, 2)
    assert told(path, model) == []
    again = {**task, "held_out_path": plays(tmp_path, [3, 99], "held.jsonl")}
    path = sampled(tmp_path, model, again, environment=environment, evaluation=evaluation)
    (said,) = told(path, model)
    assert "1 of 2 held-out rows are training rows too, the first" in said
    rewards = f"{tmp_path}/own.py:all_of"
    path = sampled(tmp_path, model, again, rewards=rewards, evaluation=evaluation)
    same, both = told(path, model)
    assert "all 20 training prompts are the same" in same
    assert "2 of 2 held-out prompts are training prompts too" in both
    with pytest.raises(IsobitError, match="20 rows of 1 different prompts"):
        task_of(load_config(sampled(tmp_path, model, task, rewards=rewards)))

"""What was written for verl or TRL runs as it is: a Parquet file, a chat template, and reward
functions.

The rewards of a run are compared with what the same functions give here, on the completions that
were recorded.
"""

import importlib.util
import json
import string
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from isobit.run.completions import COMPLETIONS, read
from tests.conftest import RunIsobit
from tests.models import tiny_model

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROBLEMS = [
    ("Tom has 3 apples and buys 4.", "3+4=7\n#### 7"),
    ("A box holds 1,200 pens; half are red.", "#### 600"),
] * 4

# After the way in which verl scores GSM8K: the number after the last mark, or the last number at
# all.
VERL_REWARD = """
import re

def extract_solution(solution_str, method="strict"):
    if method == "strict":
        found = re.findall(r"#### (\\-?[0-9.,]+)", solution_str)
        return found[-1].replace(",", "").replace("$", "") if found else None
    found = [number for number in re.findall(r"\\-?[0-9.,]+", solution_str) if number not in ("", ".")]
    return found[-1] if found else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train", (data_source, extra_info)
    answer = extract_solution(solution_str, method=extra_info["method"])
    if answer is None:
        return 0.0
    return 1.0 if answer == ground_truth else 0.1
"""

TRL_REWARDS = """
import asyncio
import re

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion[0]["content"])) / 20 for completion in completions]

def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^[a-zA-Z]", content) else 0.0 for content in contents]

async def async_reward(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    roles = [prompt[-1]["role"] for prompt in prompts]
    return [float(role == "user" and bool(completion)) for role, completion in zip(roles, completions)]

def tokens_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def curriculum(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]

def logging_reward(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    scores = [float(truth in completion[0]["content"]) for completion, truth in zip(completions, ground_truth)]
    if log_extra:
        log_extra("ground_truth", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(scores) / len(scores))
    return scores

def some_reward(completions, task, **kwargs):
    return [1.0 if kind == "math" else None for kind in task]
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model over printable characters, with a chat template of its own."""
    model = tiny_model("float32", "llama", alphabet=string.printable, max_positions=256)
    model.tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("chat") / "model"
    model.save(path)
    return path


def functions(path: Path, text: str) -> Any:
    """The module of reward functions, written and imported."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(folder: Path, run_isobit: RunIsobit, **values: Any) -> list[dict[str, Any]]:
    """`isobit train` for three steps; every completion of it."""
    config = {
        "prompts_per_step": 2,
        "sampling": {"group_size": 4, "max_new_tokens": 24},
        "run": {"dir": str(folder / "run"), "report": False},
        "steps": 3,
        **values,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    code, _, err = run_isobit("train", folder / "run.yaml", "--quiet")
    assert not code, err
    rows = list(read(folder / "run" / COMPLETIONS))
    assert len(rows) == 3 * 2 * 4
    return rows


def verl_parquet(path: Path, method: str) -> None:
    """As examples/data_preprocess/gsm8k.py of verl writes it: through `datasets`, `map` and
    `to_parquet`."""
    datasets.disable_progress_bars()
    raw = datasets.Dataset.from_list(
        [{"question": question, "answer": answer} for question, answer in PROBLEMS]
    )

    def row(example: dict[str, str], index: int) -> dict[str, Any]:
        question, answer = example.pop("question"), example.pop("answer")
        return {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "user", "content": f'{question} Output the final answer after "####".'}
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer.split("#### ")[1]},
            "extra_info": {
                "split": "train",
                "index": index,
                "answer": answer,
                "question": question,
                "method": method,
            },
        }

    raw.map(row, with_indices=True).to_parquet(path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_a_verl_parquet_and_compute_score_run_unchanged(
    tmp_path: Path, run_isobit: RunIsobit, chat_model: Path, method: str
) -> None:
    verl_parquet(tmp_path / "train.parquet", method)
    theirs = functions(tmp_path / "gsm8k_score.py", VERL_REWARD)
    rows = train(
        tmp_path,
        run_isobit,
        model={"path": str(chat_model)},
        task={"path": str(tmp_path / "train.parquet"), "held_out_size": 0},
        rewards={"functions": [{"function": f"{tmp_path / 'gsm8k_score.py'}:compute_score"}]},
    )
    truth = {question: answer.split("#### ")[1] for question, answer in PROBLEMS}
    for row in rows:
        assert row["prompt"].startswith("[user]")
        assert row["prompt"].endswith('after "####".[assistant]')
        (gold,) = (answer for question, answer in truth.items() if question in row["prompt"])
        info = {"split": "train", "method": method}
        assert row["reward"] == theirs.compute_score("openai/gsm8k", row["completion"], gold, info)
    assert {row["reward"] for row in rows} == ({0.0, 0.1} if method == "flexible" else {0.0})


def test_verl_answers_score_as_in_verl(tmp_path: Path, run_isobit: RunIsobit) -> None:
    """The right completions, scored from the same file: all are right."""
    verl_parquet(tmp_path / "test.parquet", "strict")
    functions(tmp_path / "gsm8k_score.py", VERL_REWARD)
    table = datasets.Dataset.from_parquet(
        str(tmp_path / "test.parquet"), cache_dir=str(tmp_path / "cache")
    )
    table.map(lambda row: {"solution": row["extra_info"]["answer"]}).to_parquet(
        tmp_path / "solved.parquet"
    )
    words = (
        "--completions",
        "solution",
        "--reward",
        f"{tmp_path / 'gsm8k_score.py'}:compute_score",
    )
    code, out, err = run_isobit("eval", "--data", tmp_path / "solved.parquet", *words)
    assert not code, err
    assert "reward    1.0000  1.0000 to 1.0000        8" in out


@pytest.mark.slow
def test_reward_functions_of_trl_run_unchanged(
    tmp_path: Path, run_isobit: RunIsobit, chat_model: Path
) -> None:
    """On a conversational data set saved by `datasets`; sync, async, with the trainer's state and
    logging, and one that scores some samples only."""
    datasets.disable_progress_bars()
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": question},
            ],
            "ground_truth": answer[-1],
            "task": "math" if i % 2 else "other",
        }
        for i, (question, answer) in enumerate(PROBLEMS)
    ]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(
        tmp_path / "data"
    )
    theirs = functions(tmp_path / "trl_rewards.py", TRL_REWARDS)
    names = [
        "reward_len",
        "format_reward",
        "async_reward",
        "tokens_reward",
        "curriculum",
        "logging_reward",
    ]
    specs = [{"function": f"{tmp_path / 'trl_rewards.py'}:{name}"} for name in names]
    specs.append({"function": f"{tmp_path / 'trl_rewards.py'}:some_reward"})
    done = train(
        tmp_path,
        run_isobit,
        model={"path": str(chat_model)},
        task={"path": str(tmp_path / "data"), "held_out_size": 0},
        rewards={"functions": specs},
    )
    gold = {question: (answer[-1], i % 2) for i, (question, answer) in enumerate(PROBLEMS)}
    for row in done:
        completion = [[{"role": "assistant", "content": row["completion"]}]]
        (truth, is_math) = next(
            value for question, value in gold.items() if question in row["prompt"]
        )
        assert row["rewards"] == {
            "reward_len": theirs.reward_len(completion)[0],
            "format_reward": theirs.format_reward(completion)[0],
            "async_reward": 1.0,
            "tokens_reward": float(len(row["completion_ids"])),
            "curriculum": (row["step"] - 1) / 3,
            "logging_reward": theirs.logging_reward(completion, [truth])[0],
            "some_reward": 1.0 if is_math else None,
        }
        assert row["reward"] == pytest.approx(
            sum(v for v in row["rewards"].values() if v is not None)
        )
    assert len({row["reward"] for row in done}) > 3
    saved = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert saved["mismatch/differing_tokens"] == 0

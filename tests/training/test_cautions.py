"""What works and is probably not meant is said in a line, in a dry run and at the start of the run,
and not else."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model.families.rope import Rope
from isobit.training.train import train
from tests import warm
from tests.models import tiny_model
from tests.runs import dry_run_text, write_config

REWARDS = (
    "def short(completions, **columns):\n    return [float(len(c) < 3) for c in completions]\n"
)


def rows(path: Path, *prompts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


def own(folder: Path, model: Path, task: dict[str, Any], **changes: Any) -> Path:
    (folder / "short.py").write_text(REWARDS)
    rewards = {"functions": [{"function": f"{folder / 'short.py'}:short"}]}
    path = write_config(folder, model, rewards=rewards, **changes)
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "task": {"held_out_size": 0, **task}}))
    return path


def said(config: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """The warnings of a dry run, which are those at the start of the run."""
    loaded = load_config(config, ["steps=1", *overrides])
    capsys.readouterr()
    found = [line for line in dry_run_text(loaded).splitlines() if line.startswith("warning: ")]
    capsys.readouterr()
    train(loaded, quiet=False)
    shutil.rmtree(loaded.run.dir)
    assert [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")
    ] == found
    return found


def test_long_factors_for_short_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it says, the short ones are taken then."""
    numbers = {"short_factor": (1.0,) * 4, "long_factor": (1.0, 2.0, 3.0, 4.0)}
    given = {"original_max_position_embeddings": 32, **numbers}
    rope = Rope(10000.0, "longrope", tuple(sorted(given.items())))
    tiny_model("fp8", "phi3", rope=rope).save(tmp_path / "model")
    config = write_config(tmp_path, tmp_path / "model")
    (line,) = said(config, capsys)
    assert "with a context of 64 tokens the model takes the long factors" in line
    assert "max_position_embeddings 32, and in rope_scaling factor 2" in line
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    values["max_position_embeddings"], values["rope_scaling"]["factor"] = 32, 2.0
    path.write_text(json.dumps(values))
    assert said(config, capsys) == []


def test_keys_of_partial_rollouts_without_rounds(tmp_path: Path, base_model: Path) -> None:
    path = write_config(tmp_path, base_model)
    rounds = "partial.tokens_per_round=2"
    for more, expected in (
        (["partial.max_staleness=3"], 1),
        (["partial.extra_prompts=0"], 1),
        (["partial.max_staleness=3", rounds], 0),
        ([], 0),
    ):
        text = dry_run_text(load_config(path, more))
        assert text.count("without partial.tokens_per_round") == expected, more


def test_fewer_prompts_than_a_step_asks(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "rows.jsonl", *(f"{i}+1=" for i in range(3)))
    config = own(tmp_path, base_model, {"path": data})
    (line,) = said(config, capsys)
    assert "3 training prompts for prompts_per_step 4" in line
    assert "up to 2 times" in line
    assert said(config, capsys, "prompts_per_step=3") == []


def test_a_column_that_is_the_same_in_all_rows(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "rows.jsonl", *["1+1="] * 5)
    (line,) = said(own(tmp_path, base_model, {"path": data}), capsys)
    assert f"all 5 training prompts are the same, that of {data}:1" in line


def test_one_row(tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = own(tmp_path, base_model, {"path": rows(tmp_path / "rows.jsonl", "1+1=")})
    (line,) = said(config, capsys)
    assert "there is one training prompt" in line


def test_a_divergence_of_more_tokens_than_there_are(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control compares fewer than the vocabulary has."""
    distilled = {"advantage": "distillation", "kl_coefficient": 1.0, "kl_in_reward": True}
    algorithm = {**distilled, "loss": "divergence", "divergence_top_k": 5000}
    config = write_config(
        tmp_path, base_model, algorithm=algorithm, reference={"path": str(base_model)}
    )
    (line,) = said(config, capsys)
    assert "algorithm.divergence_top_k 5,000: the vocabulary has 17 tokens, so all" in line
    assert said(config, capsys, "algorithm.divergence_top_k=5") == []


def test_held_out_prompts_that_are_trained_on(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where there is an evaluation; what is cut from one file is disjoint by itself."""
    train_rows = rows(tmp_path / "rows.jsonl", *(f"{i}+1=" for i in range(6)))
    held_out = rows(tmp_path / "held_out.jsonl", "9+9=", "2+1=", "3+1=")
    task = {"path": train_rows, "held_out_path": held_out, "held_out_size": None}
    config = own(tmp_path, base_model, task, evaluation={"every": 1})
    (line,) = said(config, capsys)
    assert f"2 of 3 held-out prompts are training prompts too, the first {held_out}:2" in line
    assert said(config, capsys, "evaluation.every=0") == []
    clean = rows(tmp_path / "clean.jsonl", "9+9=", "8+8=", "7+7=")
    assert said(config, capsys, f"task.held_out_path={clean}") == []


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "precision=fp8[bf16_first_layers=99]",
            "bf16_first_layers 99 and bf16_last_layers 0 of 2 layers",
        ),
        ("precision=fp8[bf16_first_layers=1,bf16_last_layers=1]", "every layer is in BF16"),
        ("precision=fp8[bf16_first_layers=1]", None),
        ("optimizer.warmup_steps=1", "warmup_steps 1 of 1 steps"),
        ("partial.tokens_per_round=3", "partial.tokens_per_round 3 is not below sampling.max_new"),
        ("partial.tokens_per_round=2", None),
        ("rewards.functions.0.weight=0", "the weight of every reward is 0"),
        (
            "evaluation={every: 1, samples: 100}",
            "evaluation.samples 100: there are 8 held-out prompts",
        ),
        ("evaluation={every: 1, samples: 8}", None),
        (
            "evaluation.num_samples=4",
            "evaluation.num_samples has no effect without evaluation.every",
        ),
        ("evaluation.keep_best=false", None),
        ("replay.capacity=4", "replay.capacity has no effect without replay.groups_per_step"),
        ("replay.max_staleness=3", None),
        ("fleet.deadline_s=9", "fleet.deadline_s has no effect without fleet.engines"),
        (
            "serve={share: 0.5, max_sequences: 2}",
            "serve.share and serve.max_sequences have no effect",
        ),
        ("curriculum.floor=0.5", "curriculum.floor has no effect without curriculum.mode"),
        (
            "environment.max_turns=3",
            "environment.max_turns has no effect without environment.tools",
        ),
        ("reference.path=gone", "reference.path has no effect without algorithm.kl_coefficient"),
        ("optimizer.final_fraction=0.1", "has no effect under optimizer.schedule: constant"),
        ("optimizer={final_fraction: 0.1, schedule: linear}", None),
        ("algorithm.overlong_penalty=2", "has no effect without algorithm.overlong_buffer"),
        ("algorithm={overlong_penalty: 2, overlong_buffer: 1}", None),
        ("algorithm.kl_estimator=k2", "algorithm.kl_estimator has no effect without"),
        (
            "algorithm.vespo_k=[1, 1]",
            "algorithm.vespo_k has no effect under loss: clip; it is of vespo",
        ),
        ("algorithm={preset: vespo, vespo_k: [1, 1]}", None),
        ("model.chat_template_kwargs={a: 1}", "has no effect on prompts that are text"),
        (
            "sampling.stop=['1\\\\n']",
            "has a backslash and the letter n in it; for a line end write it",
        ),
        ("sampling.stop=['ü']", "stop 'ü' never comes: the model's vocabulary cannot write it"),
        ("sampling.stop=['=']", None),
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate 0.5 is large"),
        ("adapter={rank: 2}", None),
        ("adapter={rank: 2} optimizer.learning_rate=1e-6", "1e-06 is small for an adapter"),
        ("evaluation={every: 1}", None),
    ],
)
def test_settings_that_do_nothing(
    tmp_path: Path,
    base_model: Path,
    capsys: pytest.CaptureFixture[str],
    given: str,
    line: str | None,
) -> None:
    if given.startswith("rewards"):
        config = write_config(tmp_path, base_model)
        config.write_text(config.read_text().replace(":digits", ":digits\n    weight: 0"))
        found = said(config, capsys)
    else:
        several = given.split(" optimizer.", 1)
        overrides = [several[0], *(f"optimizer.{each}" for each in several[1:])]
        found = said(write_config(tmp_path, base_model), capsys, *overrides)
    assert len(found) == (line is not None)
    assert line is None or line in found[0]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="cores of a process are not known here"
)
def test_more_ranks_than_cores(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_config(tmp_path, base_model), ["ranks=3"])
    for cores, told in ((2, True), (3, False)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert ("ranks 3 on 2 CPU cores" in dry_run_text(config)) == told
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # three machines of one rank each
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert "CPU cores" not in dry_run_text(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sampling.group_size=1", "at least 2"),
        ("sampling.temperature=0", "at least 0.001"),
        ("run.keep_last=0", "at least 1"),
        ("sampling.max_new_tokens=100000", "leaves no room for a prompt"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, base_model: Path, given: str, message: str
) -> None:
    with pytest.raises(IsobitError, match=message):
        dry_run_text(load_config(write_config(tmp_path, base_model), [given]))


@pytest.mark.slow
def test_an_evaluation_that_scores_nothing_has_no_accuracy(tmp_path: Path) -> None:
    """It ends with an error and no table, with what was answered in --out; one scored completion is
    an evaluation."""
    lines = [
        {"prompt": "1+1=", "answer": "2", "said": "2"},
        {"prompt": "2+2=", "answer": "4", "said": "5"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rewards.py").write_text(
        "def none(completions, **columns):\n    return [None] * len(completions)\n"
        "def fails(completions, **columns):\n    raise ValueError('no judge')\n"
        "def one(completions, **columns):\n    return [1.0 if c == '2' else None for c in "
        "completions]\n"
    )

    def evaluated(reward: str) -> subprocess.CompletedProcess[str]:
        words = ["--data", "rows.jsonl", "--completions", "said", "--out", f"{reward}.json"]
        return warm.isobit(tmp_path, "eval", *words, "--reward", f"rewards.py:{reward}")

    for reward, why in (("none", "every reward function returned None"), ("fails", "no judge")):
        done = evaluated(reward)
        assert done.returncode != 0
        assert "accuracy 0" not in done.stdout
        assert "none of 2 completions was scored, so there is no accuracy" in done.stderr
        assert why in done.stderr
        assert len(json.loads((tmp_path / f"{reward}.json").read_text())["prompts"]) == 2
    done = evaluated("one")
    assert done.returncode == 0
    assert "accuracy" in done.stdout

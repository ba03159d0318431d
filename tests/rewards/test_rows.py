"""Rows that a built-in reward cannot score: found at the start, with their place, before any model
is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.training.commands.dry_run import dry_run
from tests.runs import write_config

PAIRS = {"tests": "stdin", "isolation": "none"}
ASSERTS = {"isolation": "none"}
ONE, PAIR = {"tests": "assert f(1)"}, {"inputs": ["1"], "outputs": ["1"]}
TEXT = "expected text or a number"
ROWS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ("math", {}, {"answer": "1"}, {"answer": ""}, "column 'answer': no mathematical answer in ''"),
    ("math", {}, {"answer": "1"}, {"answer": r"\boxed{7"}, "no mathematical answer in"),
    ("math", {}, {"answer": "1"}, {"answer": None}, f"column 'answer': {TEXT}, or a list of them"),
    ("exact_match", {}, {"answer": 1}, {"answer": {"a": 1}}, f"column 'answer': {TEXT}"),
    ("fuzzy_match", {"answer": "gold"}, {"gold": ["a"]}, {"gold": []}, f"column 'gold': {TEXT}"),
    ("code", ASSERTS, ONE, {"tests": "assert f(1"}, "column 'tests': not Python"),
    (
        "code",
        ASSERTS,
        {"tests": ["assert f(1)"]},
        {"tests": "x = 1"},
        "no test in it: nothing asserts, or calls",
    ),
    ("code", ASSERTS, ONE, {"tests": None}, "column 'tests': expected Python source"),
    ("code", PAIRS, PAIR, {"inputs": ["1"], "outputs": []}, "1 inputs for 0 outputs"),
    ("code", PAIRS, PAIR, {"inputs": "1", "outputs": "1"}, "must be lists of text"),
]


@pytest.mark.parametrize(("name", "options", "good", "bad", "message"), ROWS)
def test_a_row_that_no_completion_could_be_scored_on_is_named(
    name: str,
    options: dict[str, Any],
    good: dict[str, Any],
    bad: dict[str, Any],
    message: str,
    capsys: Any,
) -> None:
    spec = RewardSpec(name, options=options)
    rows = [("a.jsonl:1", good), ("a.jsonl:2", bad), ("a.jsonl:3", bad)]
    RewardPool([spec]).check_rows(rows[:1])
    with pytest.raises(IsobitError, match=r"^a\.jsonl:2: reward function ") as caught:
        RewardPool([spec]).check_rows(rows)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    RewardPool([spec], on_error="skip").check_rows(rows)
    said = capsys.readouterr().err
    assert said.startswith("warning: 2 rows without a reward: a.jsonl:2: ")
    assert said.count("\n") == 1


def test_the_others_can_score_any_row() -> None:
    specs = [
        RewardSpec("format", options={"pattern": "x"}),
        RewardSpec("length_penalty", options={"soft_limit": 1, "hard_limit": 2}),
        RewardSpec("own.py:own"),
    ]
    for spec in specs[:2]:
        RewardPool([spec]).check_rows([("a.jsonl:1", {"answer": None})])


@pytest.mark.parametrize("held_out", [False, True])
def test_the_dry_run_finds_it_before_a_model_is_loaded(tmp_path: Path, held_out: bool) -> None:
    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(5)]
    bad = [*rows[:3], {"prompt": "p", "answer": ""}]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    paths = [str(tmp_path / name) for name in ("bad.jsonl", "good.jsonl")]
    task = {"name": "file", "path": paths[held_out], "held_out_path": paths[not held_out]}
    changes = {"held_out_size": None, "options": {}, **task}
    path = write_config(
        tmp_path, tmp_path / "no_model", task=changes, rewards={"functions": [{"function": "math"}]}
    )
    with pytest.raises(
        IsobitError, match=re.escape(f"{tmp_path}/bad.jsonl") + ".*4.*reward function math cannot"
    ):
        dry_run(load_config(path), print)

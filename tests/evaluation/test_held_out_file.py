"""Held-out completions on disk: all of each evaluation, the same after an interruption, and in the
report."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config, load_sft_config
from isobit.monitor.report import write_report
from isobit.monitor.report.rollouts import read_rollouts
from isobit.monitor.report.selection import sample_completions
from isobit.run.completions import COMPLETIONS, HELD_OUT
from isobit.training.train import resume, train, train_supervised
from tests.runs import write_config
from tests.training.test_sft_run import written

EVALUATED = {"evaluation": {"every": 2, "samples": 4, "num_samples": 2}, "steps": 3}


def rows(run: Path) -> list[dict[str, Any]]:
    with gzip.open(run / HELD_OUT) as file:
        return [json.loads(line) for line in file]


def test_each_evaluation_is_kept_and_shown(tmp_path: Path, base_model: Path) -> None:
    """Before the first step, after two, and after the last; the greedy ones are what the metrics
    say."""
    run = train(load_config(write_config(tmp_path, base_model, **EVALUATED)), quiet=True)
    found = rows(run.run_dir)
    assert [row["step"] for row in found] == [0] * 12 + [2] * 12 + [3] * 12
    assert [row["sample_index"] for row in found[:6]] == [0, 1, 2, 0, 1, 2]
    for step in (0, 2, 3):
        greedy = [row["reward"] for row in found if row["step"] == step and not row["sample_index"]]
        (metrics,) = [row for row in run.metrics if row["step"] == step]
        assert sum(greedy) / 4 == pytest.approx(metrics["reward/held_out"])
    page = write_report([run.run_dir], tmp_path / "page.html").read_text()
    assert "<section id='part-held-out'>" in page
    assert "All 36 completions, of 3 of 3 steps" in page
    shown = sample_completions(read_rollouts(run.run_dir / HELD_OUT), run.run_dir, 10**6)
    assert [row["length"] for row in shown["rows"]] == [row["tokens"] for row in found]
    assert not shown["recorded"]  # so the page offers no colours of tokens
    samples = sample_completions(read_rollouts(run.run_dir / COMPLETIONS), run.run_dir, 10**6)
    assert samples["recorded"]
    without = ["evaluation={}", f"run.dir={tmp_path / 'none'}"]
    control = train(load_config(write_config(tmp_path, base_model, steps=1), without), quiet=True)
    assert (control.run_dir / HELD_OUT).read_bytes() == b""
    assert "part-held-out" not in write_report([control.run_dir], tmp_path / "b.html").read_text()


@pytest.mark.slow
def test_an_interrupted_run_has_the_same_bytes(tmp_path: Path, base_model: Path) -> None:
    """An extended one too, which had evaluated its last step only because it was the last; and
    one that is finished keeps what it has."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    longer = {**EVALUATED, "steps": 4}
    whole = train(load_config(write_config(tmp_path / "whole", base_model, **longer)), quiet=True)
    path = write_config(tmp_path / "parts", base_model, **EVALUATED)
    parts = train(load_config(path), quiet=True)
    before = (parts.run_dir / HELD_OUT).read_bytes()
    resume(parts.run_dir, quiet=True)
    assert (parts.run_dir / HELD_OUT).read_bytes() == before
    resume(parts.run_dir, ["steps=4"], quiet=True)
    after = (parts.run_dir / HELD_OUT).read_bytes()
    assert after == (whole.run_dir / HELD_OUT).read_bytes() != before


def test_a_supervised_run_keeps_its_answers(tmp_path: Path) -> None:
    evaluation = {"every": 1, "samples": 3}
    path = written(tmp_path, evaluation=evaluation, steps=1)
    found = rows(train_supervised(load_sft_config(path), quiet=True).run_dir)
    assert [(row["step"], row["prompt_index"]) for row in found] == [
        (step, number) for step in (0, 1) for number in range(3)
    ]

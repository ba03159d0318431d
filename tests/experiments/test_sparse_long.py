"""The experiment on long completions with a sparse reward: its task, its rules, a run at toy size, and its page."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.sparse_long import (
    ARMS,
    LADDER,
    SERIES,
    Job,
    Size,
    arms_table,
    collapse,
    ladder,
    planned,
    problem,
    runs_table,
    write_data,
)

ROOT = Path(__file__).resolve().parents[2]
CORRECTIONS = ("none", "token_tis")
RESULTS = ROOT / "benchmarks/results/experiments/sparse_long.json"


def ran(job: Job, collapsed_at: int | None = None) -> dict[str, Any]:
    return {**vars(job), "collapsed_at": collapsed_at}


def test_a_completion_goes_on_with_sums() -> None:
    assert problem([0, 1, 1, 5, 2], 6) == {"prompt": "01152", "completion": "234913#913", "answer": "913"}


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    write_data(tmp_path, Size(terms=3))
    parts = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("held_out", "train")]
    prompts = [[json.loads(row)["prompt"] for row in part] for part in parts]
    assert [len(part) for part in prompts] == [256, 20_000 - 256]
    assert len({*prompts[0], *prompts[1]}) == 20_000


def test_a_run_collapses_where_it_does_not_come_back() -> None:
    def found(*accuracies: float, stopped: str = "") -> int | None:
        return collapse([[10 * i, accuracy] for i, accuracy in enumerate(accuracies)], stopped, 37)

    assert found(0.4, 0.19, 0.1, 0.0) == 10
    assert found(0.4, 0.1, 0.3, 0.1, 0.0) == 30, "it had come back once"
    assert found(0.4, 0.6, 0.2, 0.2) is None, "half is not below half"
    assert found(0.4, 0.5, 0.1) is None, "one evaluation is not lasting"
    assert found(0.4, 0.5, stopped="loss not finite") == 37


def test_the_ladder_comes_first_and_ends_where_bf16_collapses() -> None:
    bf16 = [Job(*ARMS[0], rate, 0) for rate in LADDER]
    assert planned([], 2, False, ARMS) == bf16[0]
    assert planned([ran(bf16[0])], 2, False, ARMS) == bf16[1]
    runs = [ran(bf16[0]), ran(bf16[1], collapsed_at=20)]
    assert ladder(runs) == (LADDER[0], LADDER[1])
    assert planned(runs, 2, False, ARMS) == Job(*ARMS[1], LADDER[0], 0)
    runs += [ran(Job(*arm, LADDER[0], seed)) for seed in range(2) for arm in ARMS if (arm, seed) != (ARMS[0], 0)]
    assert planned(runs, 2, False, ARMS) is None
    assert planned(runs, 2, True, ARMS) == Job(*ARMS[1], LADDER[1], 0)
    assert ladder([ran(job) for job in bf16]) == (LADDER[-1], None)


@pytest.mark.slow
def test_the_experiment_runs(tmp_path: Path) -> None:
    """At toy size, with a base that gets nothing right, so that nothing can collapse. The second call has nothing to
    do."""
    out, chart = tmp_path / "found.json", tmp_path / "chart.png"
    sizes = {"terms": 4, "hidden": 16, "base-steps": 2, "steps": 2, "prompts": 2, "group": 2, "evaluate-every": 1}
    sizes |= {"held-out": 8, "measured": 4}
    experiment = [sys.executable, "-m", "benchmarks.experiments.sparse_long", str(tmp_path / "work"), "--out", str(out)]
    experiment += ["--seeds", "1", "--arm", "fp8-rollout-kv:none", "--chart", str(chart)]
    experiment += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    printed = subprocess.run(experiment, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(out.read_text())
    jobs = [(run["flow"], run["correction"], run["rate"]) for run in found["runs"]]
    assert jobs == [*((*ARMS[0], rate) for rate in LADDER), ("fp8-rollout-kv", "none", LADDER[-1])]
    assert printed.stdout.strip() == f"{arms_table(found)}\n\n{runs_table(found)}"
    assert all(len(run[name]) == 2 for run in found["runs"] for name in SERIES)
    gaps = {run["flow"]: [gap["kl_k3"] for gap in run["mismatch"]] for run in found["runs"]}
    assert gaps["bf16"] == [0.0, 0.0]
    assert gaps["fp8-rollout-kv"][0] > 0
    assert chart.stat().st_size > 10_000
    written = out.stat().st_mtime_ns
    subprocess.run(experiment, cwd=ROOT, check=True, capture_output=True)
    assert out.stat().st_mtime_ns == written
    refused = subprocess.run([*experiment, "--terms", "5"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert "has runs of another size" in refused.stderr


def test_the_page_has_the_numbers_that_were_measured() -> None:
    found = json.loads(RESULTS.read_text())
    page = (ROOT / "docs/experiments/sparse-long.md").read_text()
    shown = re.findall(r"<!-- table: sparse-long, (.*?) -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert dict(shown) == {"by flow": arms_table(found), "by run": runs_table(found)}
    assert all(
        run["collapsed_at"] == collapse(run["held_out"], run["stopped"], len(run["reward"])) for run in found["runs"]
    )


def test_the_runs_are_what_the_page_says_of_them() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    collapsed = {(r["flow"], r["correction"], r["rate"], r["collapsed_at"]) for r in runs if r["collapsed_at"]}
    own = {("fp8", "none", 4e-5, 60), ("fp8-rollout", "none", 4e-5, 30), ("nvfp4-rollout", "none", 4e-5, 60)}
    assert collapsed == own | {("bf16", "none", 8e-5, 30)}
    assert ladder(runs) == (4e-5, 8e-5)
    assert all(run["held_out"][-1][1] < run["held_out"][0][1] for run in runs if run["rate"] == 4e-5)
    mismatch = {
        r["flow"]: [g["kl_k3"] for one in runs if one["flow"] == r["flow"] for g in one["mismatch"]] for r in runs
    }
    assert all(r["collapsed_at"] is None for r in runs if r["correction"] == "token_tis")
    unified = [gap for run in runs if run["flow"] in ("bf16", "fp8") for gap in run["mismatch"]]
    assert all(gap["differing_tokens"] == 0 for gap in unified)
    assert max(mismatch["bf16"]) == max(mismatch["fp8"]) == 0
    assert max(mismatch["fp8-rollout"]) == pytest.approx(7.0e-3, rel=0.01)
    old = [
        x
        for r in runs
        if (r["flow"], r["correction"], r["rate"]) == ("bf16", "none", 4e-5)
        for x in r["staleness_kl_k3"][40:]
    ]
    assert sum(old) / len(old) == pytest.approx(1e-2, rel=0.2)
    for flow in ("bf16", "fp8-rollout"):
        arms = [[r for r in runs if (r["flow"], r["correction"], r["rate"]) == (flow, c, 4e-5)] for c in CORRECTIONS]
        without, with_tis = ([sum(x for _, x in r["held_out"][-3:]) / 3 for r in arm] for arm in arms)
        assert min(with_tis) > max(without)

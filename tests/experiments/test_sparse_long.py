"""The experiment on long completions with a sparse reward: its task, its rules, a run at toy size,
and its page."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.sparse_long import (
    LADDER,
    SERIES,
    Job,
    Size,
    Wanted,
    add,
    claimed,
    collapse,
    ladder,
    missing,
    problem,
    write_data,
)
from benchmarks.experiments.sparse_long_tables import ARMS, arms_table, runs_table

ROOT = Path(__file__).resolve().parents[2]
CORRECTIONS = ("none", "token_tis")
RESULTS = ROOT / "benchmarks/results/experiments/sparse_long.json"


def ran(job: Job, collapsed_at: int | None = None) -> dict[str, Any]:
    return {**vars(job), "collapsed_at": collapsed_at}


def test_a_completion_goes_on_with_sums() -> None:
    assert problem([0, 1, 1, 5, 2], 6) == {
        "prompt": "01152",
        "completion": "234913#913",
        "answer": "913",
    }


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    write_data(tmp_path, Size(terms=3))
    parts = [
        (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("held_out", "train")
    ]
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
    wanted = Wanted(seeds=2)
    assert missing([], wanted) == bf16[:1]
    assert missing([ran(bf16[0])], wanted) == bf16[1:2]
    runs = [ran(bf16[0]), ran(bf16[1], collapsed_at=20)]
    assert ladder(runs) == (LADDER[0], LADDER[1])
    arms = [Job(*arm, LADDER[0], seed) for seed in range(2) for arm in ARMS]
    assert missing(runs, wanted) == arms[1:]
    runs += [ran(job) for job in arms[1:]]
    assert missing(runs, wanted) == []
    assert ladder([ran(job) for job in bf16]) == (LADDER[-1], None)
    at_another = Wanted(1, ARMS[:2], (3e-5,))
    assert missing(runs, at_another) == [Job(*arm, 3e-5, 0) for arm in ARMS[:2]]
    assert missing(runs[:1], at_another)[0] == bf16[1], "the ladder is there for them, too"


def test_a_run_is_one_processs(tmp_path: Path) -> None:
    job = Job(*ARMS[0], LADDER[0], 0)
    with (
        claimed(tmp_path, job) as mine,
        claimed(tmp_path, job) as theirs,
        claimed(tmp_path, replace(job, seed=1)) as other,
    ):
        assert (mine, theirs, other) == (True, False, True)
    with claimed(tmp_path, job) as again:
        assert again


def test_runs_of_two_processes_are_in_one_file(tmp_path: Path) -> None:
    out, size = tmp_path / "found.json", Size()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: add(out, size, {"seed": seed}), range(40)))
    assert sorted(run["seed"] for run in json.loads(out.read_text())["runs"]) == list(range(40))
    with pytest.raises(ValueError, match="has runs of another size"):
        add(out, Size(terms=3), {"seed": 0})


@pytest.mark.slow
def test_the_experiment_runs(tmp_path: Path) -> None:
    """At toy size, with a base that gets nothing right, so that nothing can collapse. The second
    call has nothing to do."""
    out, chart = tmp_path / "found.json", tmp_path / "chart.png"
    sizes = {
        "terms": 4,
        "hidden": 16,
        "base-steps": 2,
        "steps": 2,
        "prompts": 2,
        "group": 2,
        "evaluate-every": 1,
    }
    sizes |= {"held-out": 8, "measured": 4}
    experiment = [
        sys.executable,
        "-m",
        "benchmarks.experiments.sparse_long",
        str(tmp_path / "work"),
        "--out",
        str(out),
    ]
    experiment += ["--seeds", "1", "--arm", "nvfp4-rollout:none", "--chart", str(chart)]
    experiment += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    printed = subprocess.run(experiment, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(out.read_text())
    jobs = [(run["flow"], run["correction"], run["rate"]) for run in found["runs"]]
    assert jobs == [*((*ARMS[0], rate) for rate in LADDER), ("nvfp4-rollout", "none", LADDER[-1])]
    assert printed.stdout.strip() == f"{arms_table(found)}\n\n{runs_table(found)}"
    assert all(len(run[name]) == 2 for run in found["runs"] for name in SERIES)
    gaps = {run["flow"]: [gap["kl_k3"] for gap in run["mismatch"]] for run in found["runs"]}
    assert gaps["bf16"] == [0.0, 0.0]
    assert gaps["nvfp4-rollout"][0] > 0
    assert chart.stat().st_size > 10_000
    written = out.stat().st_mtime_ns
    subprocess.run(experiment, cwd=ROOT, check=True, capture_output=True)
    assert out.stat().st_mtime_ns == written
    refused = subprocess.run(
        [*experiment, "--terms", "5"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert "has runs of another size" in refused.stderr


def test_the_page_has_the_numbers_that_were_measured() -> None:
    found = json.loads(RESULTS.read_text())
    page = (ROOT / "docs/experiments/sparse-long.md").read_text()
    shown = re.findall(r"<!-- table: sparse-long, (.*?) -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert dict(shown) == {"by flow": arms_table(found), "by run": runs_table(found)}
    assert all(
        run["collapsed_at"] == collapse(run["held_out"], run["stopped"], len(run["reward"]))
        for run in found["runs"]
    )


def test_the_runs_are_what_the_page_says_of_them() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    assert ladder(runs) == (1e-4, 2e-4)
    found = {(r["flow"], r["correction"], r["seed"]): r for r in runs if r["rate"] == 2e-5}
    assert all(run["collapsed_at"] is None for run in found.values())

    def last(flow: str, correction: str) -> list[float]:
        """The mean of the last three evaluations of each run, by seed."""
        one = [
            run["held_out"][-3:]
            for (*arm, _), run in sorted(found.items())
            if arm == [flow, correction]
        ]
        return [sum(accuracy for _, accuracy in three) / 3 for three in one]

    def old(flow: str) -> list[float]:
        """kl_k3 to the weights that sampled, in the second half of each run."""
        series = [
            r["staleness_kl_k3"][50:]
            for (*arm, _), r in sorted(found.items())
            if arm == [flow, "none"]
        ]
        return [sum(values) / len(values) for values in series]

    flows = ("bf16", "fp8", "fp8-rollout", "nvfp4-rollout")
    without, with_tis = ({flow: last(flow, c) for flow in flows} for c in CORRECTIONS)
    assert [round(sum(without[flow]) / 3, 2) for flow in flows] == [0.86, 0.78, 0.72, 0.50]
    assert all(sorted(seed, reverse=True) == list(seed) for seed in zip(*without.values()))
    assert all(sorted(seed) == list(seed) for seed in zip(*map(old, flows)))
    assert [min(old("nvfp4-rollout")), max(old("nvfp4-rollout"))] == pytest.approx(
        [2.3e-2, 5.5e-2], rel=0.02
    )
    assert all(min(with_tis[flow]) > max(without[flow]) for flow in flows)
    eight_bits = [accuracy for flow in flows[:3] for accuracy in with_tis[flow]]
    assert [round(sum(with_tis[flow]) / 3, 2) for flow in flows] == [0.90, 0.89, 0.88, 0.81]
    assert 0.86 < min(eight_bits) <= max(eight_bits) < 0.915
    assert 0.78 < min(with_tis["nvfp4-rollout"]) <= max(with_tis["nvfp4-rollout"]) < 0.87
    aged = [
        [
            sum(r["staleness_kl_k3"][50:]) / 50
            for (*arm, _), r in sorted(found.items())
            if arm == [flow, correction]
        ]
        for flow, correction in (
            ("bf16", "none"),
            ("fp8", "none"),
            ("bf16", "token_tis"),
            ("fp8", "token_tis"),
        )
    ]
    assert [sum(kl) / 3 for kl in aged] == pytest.approx(
        [2.2e-3, 4.9e-3, 1.0e-3, 1.85e-3], rel=0.02
    )

    def growth(name: str, flow: str, correction: str) -> float:
        """The last quarter's mean over the first's, over the seeds."""
        series = [r[name] for (*arm, _), r in found.items() if arm == [flow, correction]]
        return sum(sum(values[75:]) for values in series) / sum(
            sum(values[:25]) for values in series
        )

    assert 1.3 < growth("entropy", "fp8-rollout", "none") < 1.5
    assert 1.8 < growth("entropy", "nvfp4-rollout", "none") < 2.2
    assert 1.7 < growth("grad_norm", "nvfp4-rollout", "none") < 2.1
    assert all(0.9 < growth("entropy", flow, "token_tis") < 1.1 for flow in flows[:3])
    assert 1.25 < growth("entropy", "nvfp4-rollout", "token_tis") < 1.45
    assert all(0.85 < growth("grad_norm", flow, "token_tis") < 1.15 for flow in flows)
    unified = [gap for run in runs if run["flow"] in ("bf16", "fp8") for gap in run["mismatch"]]
    assert all(gap["differing_tokens"] == 0 == gap["kl_k3"] for gap in unified)

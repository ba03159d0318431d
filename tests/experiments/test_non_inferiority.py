"""The experiment on non-inferiority: what it decides, that it pairs the runs of a real comparison,
and its page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.experiments.non_inferiority import (
    MARGIN,
    PLAN,
    VIEWS,
    accuracies,
    difference,
    measure,
    table,
)
from isobit.errors import IsobitError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/experiments"
FIRST = RESULTS / "non_inferiority_first.json"


def test_a_difference_is_decided_by_its_interval() -> None:
    """By the whole interval, not the mean; and by pairs: what both have in common does not widen
    it."""
    seeds = [0.70, 0.80, 0.90, 0.75, 0.85]
    noise = [0.002, -0.001, 0.0, -0.002, 0.001]

    def found(shift: float) -> str:
        return difference([s + n + shift for s, n in zip(seeds, noise, strict=True)], seeds).verdict

    assert found(0.0) == found(-0.012) == "not inferior"
    assert found(-MARGIN) == "not decided"
    assert found(-0.018) == "inferior"
    wide = difference([s + 10 * n for s, n in zip(seeds, noise, strict=True)], seeds)
    assert wide.mean == pytest.approx(0.0)
    assert wide.verdict == "not decided", "the mean alone would pass"
    assert difference(seeds[::-1], seeds).verdict == "not decided", "the same runs, paired wrongly"
    close = [s + 4 * n - 0.004 for s, n in zip(seeds, noise, strict=True)]
    assert difference(close, seeds).verdict == "not inferior"
    assert difference(close, seeds, looks=5).verdict == "not decided", (
        "of several looks each has a wider interval"
    )
    with pytest.raises(ValueError, match="longer"):
        difference(seeds[:-1], seeds)


@pytest.mark.slow
def test_a_comparison_is_measured(base_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(
        f"model: {{path: {base_model}}}\ntask: {{name: arithmetic, held_out_size: 8, options: "
        "{digits: 1}}\n"
        "prompts_per_step: 2\nsampling: {group_size: 2, max_new_tokens: 3}\nsteps: 1\n"
        "evaluation: {every: 1, samples: 8}\nrun: {checkpoint_every: 1}\n"
    )
    runs, out, chart = tmp_path / "runs", tmp_path / "found.json", tmp_path / "chart.png"
    command = [
        sys.executable,
        "-m",
        "isobit",
        "compare",
        str(config),
        "--presets",
        "bf16,fp8",
        "--seeds",
        "2",
    ]
    subprocess.run([*command, "--out", str(runs), "--quiet"], check=True, cwd=tmp_path)
    experiment = [
        sys.executable,
        "-m",
        "benchmarks.experiments.non_inferiority",
        str(runs),
        "--out",
        str(out),
    ]
    printed = subprocess.run(
        [*experiment, "--chart", str(chart)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = json.loads(out.read_text())["flows"]
    assert list(found) == ["bf16", "fp8"]
    assert all(len(flow[view]) == 2 for flow in found.values() for view in VIEWS)
    assert found["bf16"]["own"] == found["bf16"]["deployed"], (
        "one flow, evaluated by the run and again"
    )
    tables = [accuracies(found), *(table(found, [("fp8", "bf16")], [view]) for view in VIEWS)]
    assert printed.stdout.strip() == "\n\n".join(tables)
    assert chart.stat().st_size > 10_000
    (runs / "comparison.json").write_text(
        json.dumps({"fp8": {"failures": ["fp8, seed-1: stopped"]}})
    )
    with pytest.raises(IsobitError, match="a run stopped, and so cannot be paired"):
        measure(runs)
    with pytest.raises(IsobitError, match="make the runs with"):
        measure(tmp_path)


def test_the_page_has_the_numbers_that_were_measured() -> None:
    first = json.loads(FIRST.read_text())["flows"]
    page = (ROOT / "docs/experiments/non-inferiority.md").read_text()
    shown = dict(re.findall(r"<!-- table: ([\w-]+) -->\n\n(.*?)\n\n<!-- end -->", page, re.S))
    assert shown.pop("first") == table(first, [(name, "bf16") for name in first if name != "bf16"])
    assert {len(flow[view]) for flow in first.values() for view in VIEWS} == {15}
    result = json.loads((RESULTS / "non_inferiority.json").read_text())
    found, pairs = result["flows"], [tuple(pair) for pair in result["pairs"]]
    assert (result["margin"], tuple(pairs)) == (MARGIN, PLAN)
    assert {len(flow[view]) for flow in found.values() for view in VIEWS} == {15}
    tables = {"flows": accuracies(found), **{view: table(found, pairs, [view]) for view in VIEWS}}
    assert shown == tables

"""The experiments of the papers: each is made of runs that a config can say, the smallest runs, and
the page has the numbers that were measured."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.experiments.gradient_bias import Sample
from benchmarks.experiments.papers import (
    EXPERIMENTS,
    Experiment,
    gradient,
    larger_keys,
    run,
    sums,
)
from benchmarks.experiments.papers_tables import arms_of, table
from isobit import Model, load_config
from isobit.precision import precision_from
from isobit.training.parts.base import cached_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/experiments"
PAGE = ROOT / "docs/experiments/papers.md"
FLOWS = ("float32", "bf16", "fp8-unified")
SMALL = (
    "prompts_per_step=2",
    "sampling.group_size=2",
    "steps=2",
    "evaluation={every: 1, samples: 2}",
)


def of(name: str) -> Path:
    return RESULTS / f"papers_{name.replace('-', '_')}.json"


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(of(name).read_text())
    return found


@pytest.mark.parametrize(
    "name", [name for name in EXPERIMENTS if name not in ("cache", "recalibration")]
)
def test_every_arm_is_a_config(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    given = next(iter(experiment.cases.values()))(tmp_path)
    flows = {
        arm: load_config(given, [*experiment.words, *words])
        for arm, words in experiment.arms.items()
    }
    assert len({(str(flow.precision), str(flow.algorithm)) for flow in flows.values()}) == len(
        flows
    )


def test_what_is_unified_has_no_correction_to_lose() -> None:
    """Under these, two arms would be one."""
    for arm, words in EXPERIMENTS["on-policy"].arms.items():
        flow = precision_from(words[0].removeprefix("precision="))
        assert flow.unified == (arm in ("bf16", "fp8", "fp8-unified")), arm


@pytest.mark.slow
def test_an_experiment_is_run_once(tmp_path: Path) -> None:
    """The second call has nothing to do, and one with other changes is refused."""
    out, chart = tmp_path / "found.json", tmp_path / "chart.png"
    words = [sys.executable, "-m", "benchmarks.experiments.papers", "cache", str(tmp_path / "work")]
    words += ["--out", str(out), "--case", "128 tokens", "--chart", str(chart)]
    words += ["--arm", "linear layers alone", "--arm", "both"]
    printed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(out.read_text())
    alone, both = found["runs"]
    assert alone["fixed_preemptions"] > both["fixed_preemptions"]
    assert alone["recomputed"] > both["recomputed"] > 0
    assert alone["differing"] == both["differing"] == 0
    assert printed.stdout.endswith(f"{table(found)}\n")
    assert chart.stat().st_size > 5_000
    written = out.stat().st_mtime_ns
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    assert out.stat().st_mtime_ns == written
    refused = subprocess.run(
        [*words, "seed=1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "has runs of cache with" in refused.stderr


@pytest.mark.slow
def test_larger_keys_are_the_same_function(tmp_path: Path) -> None:
    """And have a mismatch where scales are not calibrated: the runs of both, of which the first is
    the control."""
    small = sums(2, 1, 1, hidden=32)
    experiment = Experiment(
        {"as made": small, "times 4096": larger_keys(small, 4096)},
        {"never": ("precision=fp8-rollout-kv[kv_calibration=never]",)},
        SMALL,
        1,
    )
    as_made, larger = (run(tmp_path, experiment, job) for job in experiment.jobs())
    assert [step for step, _ in larger["held_out"]] == [0, 1, 2]
    assert as_made["saturated"] == [0, 0]
    assert min(larger["saturated"]) > 0
    base = cached_model(small(tmp_path)["model"]["sft"])  # type: ignore[index]
    twin = larger_keys(small, 4096)(tmp_path)["model"]["path"]  # type: ignore[index]
    ids = [[1, 2, 3, 4, 5]]
    models = [Model.load(folder, "bf16") for folder in (base, twin)]
    logprobs = [model.logprobs(ids)[0].tolist() for model in models]
    assert logprobs[0] == logprobs[1]
    tensors = [load_file(Path(folder) / "model.safetensors") for folder in (base, twin)]
    assert any(not tensors[0][name].equal(tensors[1][name]) for name in tensors[0])


@pytest.mark.slow
def test_a_gradient_is_that_of_the_flow(tmp_path: Path) -> None:
    """And of all samples with their advantages: it is the sum of each one's."""
    base = cached_model(sums(2, 1, 1, hidden=32)(tmp_path)["model"]["sft"])  # type: ignore[index]
    samples = [
        Sample((1, 2), (3, 4, 5), (0.0,) * 3, (), 0),
        Sample((2,), (5, 1), (0.0,) * 2, (), 0),
    ]
    weights = (1.0, -0.5)
    whole = {flow: gradient(Model.load(base, flow), samples, weights) for flow in FLOWS}
    each = [
        gradient(Model.load(base, "float32"), *pair) for pair in zip(zip(samples), zip(weights))
    ]
    exact = whole["float32"]
    assert torch.stack(each).sum(0).sub(exact).norm() < 1e-6 * exact.norm()
    errors = [float((whole[flow] - exact).norm() / exact.norm()) for flow in FLOWS]
    assert errors[0] == 0
    assert 1e-4 < errors[1] < errors[2] < 0.5


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if of(name).exists()])
def test_the_page_has_the_numbers_that_were_measured(name: str) -> None:
    shown = re.search(
        rf"<!-- table: papers, {name} -->\n\n(.*?)\n\n<!-- end -->", PAGE.read_text(), re.S
    )
    assert shown is not None
    assert shown[1] == table(results(name))
    assert f"papers-{name}.png" in PAGE.read_text()
    assert (PAGE.parent / f"papers-{name}.png").is_file()


def test_unified_runs_have_no_mismatch() -> None:
    for (_, arm), runs in arms_of(results("on-policy")["runs"]).items():
        zero = all(value == 0 for one in runs for value in one["kl_k3"])
        assert zero == (arm in ("bf16", "fp8", "fp8-unified")), arm


def test_the_distances_at_256_tokens_are_those_of_each_step() -> None:
    """As a control the table of other numbers is another one."""
    found = json.loads((RESULTS / "stories_256.json").read_text())["precisions"]
    for name in ("fp8", "fp8-unified"):
        assert not any(found[name]["kl_k3"]), name

    def lines() -> list[str]:
        made = []
        for name, arm in found.items():
            assert len(arm["kl_k3"]) == len(arm["largest_difference"]) == 9
            distances = (sum(arm["kl_k3"]) / 9, max(arm["kl_k3"]))
            cells = [f"{value:.1e}".replace("e-0", "e-") if value else "0" for value in distances]
            largest = max(arm["largest_difference"])
            cells.append(f"{largest:.2f}" if largest else "0")
            made.append(f"| `{name}` | {' | '.join(cells)} |")
        return made

    written = PAGE.read_text().partition("<!-- table: stories, 256 tokens -->")[2]
    written = written.partition("<!-- end -->")[0]
    assert written.strip().splitlines()[2:] == lines()
    found["fp8-e2e"]["kl_k3"][0] *= 2
    assert written.strip().splitlines()[2:] != lines()

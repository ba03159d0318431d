"""The experiment on the gradient under mismatch: its estimates are exact where there is none, its
statistics find a bias that was put in, and the page has its numbers."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.experiments.gradient_bias import (
    RULES,
    Job,
    Sample,
    advantages,
    estimates,
    on_policy,
    run,
    sampled,
    summary,
    table,
)
from isobit import Model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/experiments/gradient_bias.json"
PROMPTS = ["1+2=", "3+4="]


def drawn(factor: float) -> dict[str, float]:
    """Of 64 batches of a gradient [100] of length 1 and as much noise, in part shared by both
    sides."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.nn.functional.normalize(
        torch.randn(100, generator=generator, dtype=torch.float64), dim=0
    )
    shared, own = (
        0.1 * torch.randn(64, 100, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return summary(factor * mean + shared + 0.3 * own, mean + shared)


def test_a_bias_that_was_put_in_is_found() -> None:
    """And none where there is none; a shorter gradient keeps its direction."""
    unbiased, short = drawn(1.0), drawn(0.5)
    assert abs(unbiased["bias_squared"]) < 3 * unbiased["bias_squared_error"] < 0.1
    assert short["bias_squared"] == pytest.approx(0.25, abs=3 * short["bias_squared_error"])
    assert short["bias_squared"] > 5 * short["bias_squared_error"]
    for found in (unbiased, short):
        assert found["cosine"] == pytest.approx(1.0, abs=3 * found["cosine_error"])


def test_advantages_leave_one_out() -> None:
    stops = [(True, True), (False, False), (True, False), (True,), (False,)]
    samples = [
        Sample((1,), (2,) * len(s), (0.0,) * len(s), s, 0 if i < 3 else 1)
        for i, s in enumerate(stops)
    ]
    assert advantages(samples) == [1.5, -1.5, 0.0, 1.0, -1.0]
    assert advantages([sample.cut(1) for sample in samples]) == [0.5, -1.0, 0.5, 1.0, -1.0]


def test_every_estimate_is_the_on_policy_gradient_where_nothing_differs(base_model: Path) -> None:
    """Bit for bit. The control: completions of FP8 rollouts are refused as the BF16 learner's
    own."""
    model = Model.load(base_model, "bf16")
    own = sampled(model, PROMPTS, 4, 6, 0)
    marked = [dataclasses.replace(sample, stops=(i % 3 == 0,)) for i, sample in enumerate(own)]
    wanted, found = on_policy(model, marked), estimates(model, marked)
    assert float(wanted.abs().max()) > 0
    assert found.kl == 0
    assert all(torch.equal(found.estimates[name], wanted) for name in RULES)
    with pytest.raises(RuntimeError, match="tokens differ from the learner's"):
        on_policy(model, sampled(Model.load(base_model, "fp8-rollout"), PROMPTS, 4, 6, 0))


@pytest.mark.slow
def test_a_model_is_measured(stories: Path) -> None:
    job = Job(stories, ["Once upon a time", "One day"], 4, 4, [64, 32], 0)
    (found,) = run(job, ["fp8-rollout"], lambda line: None)
    assert [(line["length"], line["estimator"]) for line in found["lines"]] == [
        (n, r) for n in (64, 32) for r in RULES
    ]
    assert all(line["kl_k3"] > 0 for line in found["lines"])
    assert table([found]).count("\n") == 1 + 2 * len(RULES)


def test_the_page_has_the_numbers_that_were_measured() -> None:
    runs = json.loads(RESULTS.read_text())
    page = (ROOT / "docs/experiments/gradient-bias.md").read_text()
    (shown,) = re.findall(r"<!-- table: gradient bias -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert shown == table(runs)
    assert [run["batches"] for run in runs] == [24, 12, 12, 12]
    lines = [line for run in runs for line in run["lines"]]
    of = {(line["flow"], line["length"], line["estimator"]): line for line in lines}
    most = {
        "bf16[engines=separate]": 0.02,
        "fp8-rollout": 0.05,
        "fp8-e2e": 0.09,
        "mxfp8-rollout": 0.09,
    }
    for (flow, _, estimator), line in of.items():
        if estimator == "token TIS, cap 2" or (estimator == "none" and flow != "nvfp4-rollout"):
            assert line["bias_squared"] + 2 * line["bias_squared_error"] < most.get(flow, 0.08), (
                line
            )
            assert line["bias_squared"] < 2 * line["bias_squared_error"]
    for length in (16, 200):
        line = of["nvfp4-rollout", length, "none"]
        assert line["bias_squared"] > 2.5 * line["bias_squared_error"]
        assert line["cosine"] < 1 - 3 * line["cosine_error"]
    shrunk = [
        line
        for line in lines
        if line["estimator"] == "sequence TIS, cap 2" and line["deviation"] > 1
    ]
    assert [round(line["bias_squared"], 3) for line in shrunk[:2]] == [0.134, 0.413]
    assert all(line["bias_squared"] > 2 * line["bias_squared_error"] for line in shrunk)


def test_the_prose_of_the_page_has_the_numbers_of_its_table() -> None:
    page = " ".join((ROOT / "docs/experiments/gradient-bias.md").read_text().split())
    pair, fp8, end_to_end, others = (run["lines"] for run in json.loads(RESULTS.read_text()))
    low, high, low8, high8 = (
        f"{end([x['kl_k3'] for x in of]):.1e}" for of in (pair, fp8) for end in (min, max)
    )
    ends = f"{low} to {high} for the BF16 pair and {low8} to {high8} for FP8 rollouts".replace(
        "e-0", "e-"
    )
    assert ends in page
    found = {(line["length"], line["estimator"]): line for line in fp8}
    bias = [f"{found[length, 'sequence TIS, cap 2']['bias_squared']:.3f}" for length in (64, 200)]
    assert f"its squared bias is {bias[0]} at 64 tokens and {bias[1]} at 200" in page
    noise = [
        f"{found[length, rule]['noise_of_a_batch']:.1f}"
        for rule in ("sequence IS", "none")
        for length in (64, 200)
    ]
    wanted = (
        f"its noise is {noise[0]} times the gradient at 64 tokens and {noise[1]} times at "
        f"200, against {noise[2]} and"
    )
    assert f"{wanted} {noise[3]} without it" in page
    mx, nv = (
        [line for line in others if line["flow"] == flow and line["estimator"] == "none"]
        for flow in ("mxfp8-rollout", "nvfp4-rollout")
    )
    ends = [
        f"{min(x['kl_k3'] for x in of):.1e} to {max(x['kl_k3'] for x in of):.1e}"
        for of in (end_to_end, mx, nv)
    ]
    wanted = "{} for FP8 end to end, {} for MXFP8 and {} for NVFP4 rollouts".format(*ends).replace(
        "e-0", "e-"
    )
    assert wanted in page
    short, _, long = nv
    tis = [
        line
        for line in others
        if (line["flow"], line["estimator"]) == ("nvfp4-rollout", "token TIS, cap 2")
    ]
    assert (
        f"the squared bias is {short['bias_squared']:.3f} at 16 tokens and "
        f"{long['bias_squared']:.3f} at 200, where "
        f"the cosine is {long['cosine']:.3f} ± {long['cosine_error']:.3f}" in page
    )
    assert (
        f"it is {tis[0]['bias_squared']:.3f} and {tis[2]['bias_squared']:.3f}, the cosine "
        f"{tis[0]['cosine']:.3f} and {tis[2]['cosine']:.3f}" in page
    )

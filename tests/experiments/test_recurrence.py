"""The experiment changes the delta rule of the learner alone, and the page has what it found."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments.recurrence import FLOWS, measure, table
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("flow", ["float32", "bf16"])
def test_chunks_are_the_recurrence_up_to_rounding(flow: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.qwen3_5", reason="transformers has no Qwen3.5 here")
    tiny_model(
        "float32", "qwen3_5_text", scale=4.0, hidden_size=96, max_positions=160, num_layers=4
    ).save(tmp_path)
    found = measure(tmp_path, flow, ["12+34=", "5*6-7=", "8=", "90"] * 2, 140)
    assert found["recurrence"] == {
        "tokens": found["chunks"]["tokens"],
        "differing": 0,
    } | dict.fromkeys(("largest", "mean", "kl_k3"), 0.0)
    assert found["chunks"]["differing"] > 0
    assert 0 < found["chunks"]["largest"] < (1e-4 if flow == "float32" else 0.5)


def test_two_engines_differ_without_chunks_too(tmp_path: Path) -> None:
    """The control: what is compared would show it."""
    pytest.importorskip("transformers.models.qwen3_5", reason="transformers has no Qwen3.5 here")
    tiny_model("float32", "qwen3_5_text", scale=4.0).save(tmp_path)
    assert (
        measure(tmp_path, "bf16[engines=separate]", ["12+34="], 30)["recurrence"]["differing"] > 0
    )


def test_the_page_has_the_table_of_the_results() -> None:
    found = json.loads((ROOT / "benchmarks/results/experiments/recurrence.json").read_text())
    assert [one["flow"] for one in found] == list(FLOWS)
    assert table(found) in (ROOT / "docs/experiments/recurrence.md").read_text()
    by_flow = {one["flow"]: one for one in found}
    for flow in ("float32", "bf16", "fp8"):
        assert by_flow[flow]["recurrence"]["differing"] == 0
    scale = by_flow["bf16[engines=separate]"]["recurrence"]["kl_k3"]
    assert by_flow["bf16"]["chunks"]["kl_k3"] == pytest.approx(scale / 10, rel=0.1)
    assert by_flow["fp8"]["chunks"]["kl_k3"] == pytest.approx(
        3 * by_flow["bf16"]["chunks"]["kl_k3"], rel=0.1
    )

"""The experiment on preference and distillation: that it measures runs of the gallery's configs, and
its page, whose numbers are those of the results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.experiments.distillation import (
    ARMS,
    OF_ANSWERS,
    TAUGHT,
    curves,
    draw,
    measure,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/experiments/distillation.json"
PAGE = ROOT / "docs/experiments/preference-and-distillation.md"


@pytest.mark.slow
def test_all_runs_are_measured(tmp_path: Path) -> None:
    """Of two steps each; done again, they are read."""
    changes = ("steps=2", "evaluation.every=1", "evaluation.samples=8")
    found = measure(tmp_path, *changes)
    assert set(found["arms"]) == set(ARMS)
    for name in OF_ANSWERS:
        assert found["arms"][name]["preference/margin"][0] == [1, 0.0]
    for name in TAUGHT:
        curve = found["arms"][name]
        assert [step for step, _ in curve["accuracy/held_out"]] == [0, 1, 2]
        assert [step for step, _ in curve["mismatch/differing_tokens"]] == [1, 2]
    assert measure(tmp_path, *changes) == found
    draw(found, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_leaves_out_what_is_not_there() -> None:
    rows = [{"step": 0, "accuracy/held_out": 0.5}, {"step": 1, "reward/reference_kl": None}]
    assert curves(rows) == {"accuracy/held_out": [[0, 0.5]]}


def test_the_page_has_the_table_of_the_results() -> None:
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()


def test_the_curves_show_what_they_should() -> None:
    """DPO and KTO: a margin of exactly 0, which grows; 0 again where the reference has moved. A
    teacher: the reverse KL falls, accuracy rises, and no token differed between rollout and
    learner."""
    found = json.loads(RESULTS.read_text())
    pairs = found["arms"]["preference"]
    assert pairs["preference/margin"][0] == [1, 0.0]
    assert all(value > 0 for _, value in pairs["preference/margin"][5:])
    assert pairs["preference/held_out_accuracy"][-1][1] > 0.8
    labelled = found["arms"]["kto"]
    assert labelled["preference/margin"][0] == labelled["preference/kl"][0] == [1, 0.0]
    assert all(value > 0 for _, value in labelled["preference/margin"][30:])
    assert {value for _, value in labelled["preference/kl"]} == {0.0}, "as the page says"
    assert labelled["preference/held_out_accuracy"][-1][1] > 0.7
    margins = dict(found["arms"]["preference-following"]["preference/margin"])
    assert [step for step, value in margins.items() if value == 0] == [1, 29, 57, 85]
    assert all(margins[step] > 0 for step in (28, 56, 84, 100))
    assert [margins[step] for step in range(1, 29)] == [
        value for _, value in pairs["preference/margin"][:28]
    ]
    for name in TAUGHT:
        curve = found["arms"][name]
        accuracy = [value for _, value in curve["accuracy/held_out"]]
        assert accuracy[-1] > accuracy[0] + 0.1, name
        assert {value for _, value in curve["mismatch/differing_tokens"]} == {0.0}, name
    for name in ("distillation", "self-distillation"):
        distance = [value for _, value in found["arms"][name]["reward/reference_kl"]]
        assert sum(distance[-10:]) < 0.7 * sum(distance[:10]), name


def test_the_prose_has_the_numbers_of_the_results() -> None:
    """Each accuracy that the text names is that of a run, before or after."""
    found, text = json.loads(RESULTS.read_text()), PAGE.read_text()
    ends = {f"{found['teacher']:.3f}"}
    for curve in found["arms"].values():
        ends |= {f"{curve['accuracy/held_out'][i][1]:.3f}" for i in (0, -1)}
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    said = re.findall(r"accuracy (?:of |from |to )?(0\.\d{3})", prose)
    assert said
    assert set(said) <= ends

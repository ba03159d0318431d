"""The planner beside published numbers: the kept results are what it plans now, and the fitted factors are fitted."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import exposed, published
from isobit.plan.devices import FACTORS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "how-to" / "plan.md"


def test_the_kept_points_and_the_page_are_what_is_planned_now() -> None:
    points = published.all_points(FACTORS, published.POWER)
    kept = json.loads((RESULTS / "published.json").read_text())
    assert [(p["what"], p["source"], p["low"], p["high"], p["kind"]) for p in kept["points"]] == [
        (p.what, p.source, p.low, p.high, p.kind) for p in points
    ]
    for before, now in zip(kept["points"], points):
        assert before["planned"] == pytest.approx(now.planned), now.what
        assert before["error"] == pytest.approx(now.error, abs=1e-9), now.what
    assert published.table(points) in PAGE.read_text()
    other = published.all_points(replace(FACTORS, step_s=0.0), published.POWER)  # the control
    assert published.table(other) not in PAGE.read_text()


@pytest.mark.slow
def test_the_factors_are_those_that_fit() -> None:
    """To 1 %; each point that one of them was fitted to is met, and the others say that they are held out."""
    again, power = published.fitted()
    assert asdict(again) == pytest.approx(asdict(FACTORS), rel=0.01)
    assert power == pytest.approx(published.POWER, rel=0.01)
    points = published.all_points(FACTORS, published.POWER)
    met = [point for point in points if point.fitted]
    assert len(met) == 6  # five factors, and the power of one machine
    assert all(abs(point.error or 0.0) < 0.01 for point in met)
    held_out = [abs(point.error) for point in points if point.error is not None and point.kind == "held out"]
    assert len(held_out) > 2 * len(met)
    assert max(held_out) > 0.25, "the misses are in the table"


def test_an_error_is_from_the_nearest_end_of_a_range() -> None:
    def error(planned: float | None) -> float | None:
        return published.Point("a", "b", "s", 2.0, 4.0, planned).error

    assert error(3.0) == 0
    assert error(1.0) == pytest.approx(-0.5)
    assert error(6.0) == pytest.approx(0.5)
    assert error(None) is None


def test_exposed_communication_is_what_is_planned_now() -> None:
    rounds = exposed.all_rounds()
    kept = json.loads((RESULTS / "exposed.json").read_text())
    for before, now in zip(kept["rounds"], rounds, strict=True):
        assert before == pytest.approx({**asdict(now), "share": now.share})
    assert exposed.table(rounds) in PAGE.read_text()
    assert all(claim["holds"] for claim in kept["claims"])

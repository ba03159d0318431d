"""Charts and what they are made of: thinning, smoothing, axes, exact zeros."""

import json
import re

import pytest

from isobit.monitor.report.axes import (
    doubling_axis,
    label,
    linear_axis,
    log_axis,
    nice_values,
    power_text,
)
from isobit.monitor.report.charts import Panel, draw, draw_all
from isobit.monitor.report.series import (
    MOST_POINTS,
    Series,
    line,
    running_mean,
    smoothing_width,
    thin,
)


def zeros(pattern: str, drawn: str) -> str:
    """The path of the marks at exact zeros."""
    found = re.search(pattern, drawn)
    assert found is not None
    return found.group(1)


def rows(values: list[float | None], metric: str = "reward/mean") -> list[dict[str, float | None]]:
    return [{"step": float(i + 1), metric: value} for i, value in enumerate(values)]


def data_of(figure: str) -> dict:
    return json.loads(figure.split("<script type='application/json'>")[1].split("</script>")[0])


def test_a_thinned_series_keeps_peaks_zeros_and_ends() -> None:
    values = [1.0 + 0.01 * (i % 7) for i in range(10_000)]
    values[4321], values[7001] = 99.0, 0.0
    kept = thin(values)
    assert len(kept) <= MOST_POINTS + 2
    assert {0, 4321, 7001, 9999} <= set(kept)
    assert kept == sorted(set(kept))
    assert thin([1.0, 2.0]) == [0, 1]


def test_running_means() -> None:
    assert running_mean([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert smoothing_width(79) == 1
    assert smoothing_width(1000) % 2 == 1


def test_a_band_is_that_of_the_rows() -> None:
    found = line(
        [{"step": 1.0, "a": 2.0, "a:low": 1.0, "a:high": 4.0}, {"step": 2.0, "a": 3.0}], "a"
    )
    assert (found.low, found.high) == ([1.0, 3.0], [4.0, 3.0])
    assert line(rows([1.0, None, float("nan")]), "reward/mean").values == [1.0]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.26, 0.27), (-3, 8), (0, 123_456), (1e-9, 3e-9)]
)
def test_nice_values_are_few_round_and_inside(low: float, high: float) -> None:
    found = nice_values(low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-12 <= value <= high * (1 + 1e-9) for value in found)


def test_labels() -> None:
    assert [label(v) for v in (0, 0.25, 12_000, 2_500_000, 3e-6)] == [
        "0",
        "0.25",
        "12k",
        "2.5M",
        "3·10⁻⁶",
    ]
    assert [power_text(v) for v in (0.00018, 1e-5, 9.96e-6)] == ["1.8·10⁻⁴", "10⁻⁵", "10⁻⁵"]


def test_axes_place_their_ends() -> None:
    axis = linear_axis([0.0, 10.0], 178, 10)
    assert axis.at(0.0) == 178
    assert axis.at(axis.high) == 10
    log = log_axis([0.0, 1e-6, 1e-3], 178, 10)
    assert log.at(0.0) == 178
    assert log.at(1e-6) < log.at(0.0) - 10  # zeros have a row of their own
    assert log.at(1e-3) == pytest.approx(10)
    assert ("0" in [name for _, name in log.ticks()]) is True
    assert ("0" in [name for _, name in log_axis([1e-6, 1e-3], 178, 10).ticks()]) is False


def test_an_axis_of_doublings_has_each_as_far_from_the_next() -> None:
    axis = doubling_axis([1.0, 2.0, 32768.0], 50, 350)
    assert [axis.at(2.0**n) for n in range(16)] == pytest.approx([50 + 20 * n for n in range(16)])
    assert [name for _, name in axis.ticks()] == [
        "1",
        "4",
        "16",
        "64",
        "256",
        "1024",
        "4096",
        "16.38k",
    ]
    alone = doubling_axis([4.0], 50, 350)
    assert (alone.at(4.0), [name for _, name in alone.ticks()]) == (50, ["4", "8"])


def test_exact_zeros_are_shown_as_such() -> None:
    panel = Panel("Mismatch", ("m",), log=True)
    some = draw(panel, [Series("run", rows([0.0, 1e-4, 0.0], "m"))])
    assert len(zeros(r"class='zeros c0' d='([^']*)'", some).split("M")) - 1 == 2
    assert "exactly 0" in some
    assert "exactly 0" not in draw(panel, [Series("run", rows([1e-5, 1e-4], "m"))])
    assert "class='line" not in draw(panel, [Series("run", rows([0.0, 0.0], "m"))])


def test_a_long_run_on_a_logarithmic_axis() -> None:
    """Every zero has a mark of its own width, and a band that reaches zero is no obstacle."""
    given = [
        {"step": float(i), "m": 0.0 if i % 50 == 0 else 1e-4, "m:low": 0.0, "m:high": 1.0}
        for i in range(1, 1001)
    ]
    drawn = draw(Panel("Mismatch", ("m",), log=True), [Series("run", given)])
    marks = re.findall(
        r"M([\d.]+) [\d.]+H([\d.]+)",
        zeros(r"class='zeros long c0' d='([^']*)'", drawn),
    )
    assert len(marks) == 20
    assert all(float(b) - float(a) < 1 for a, b in marks)
    whole = draw(Panel("Mismatch", ("m",), log=True), [Series("run", rows([0.0] * 1000, "m"))])
    assert (
        len(re.findall(r"M[\d.]+ [\d.]+H", zeros(r"class='zeros long c0' d='([^']*)'", whole))) == 1
    )


def test_values_for_hover_are_those_of_the_rows() -> None:
    data = data_of(
        draw(Panel("Reward", ("reward/mean",)), [Series("run", rows([0.1, 0.25, None, 1 / 3]))])
    )
    assert data["lines"][0]["x"] == [1, 2, 4]
    assert data["lines"][0]["y"] == [0.1, 0.25, 0.3333]


def test_runs_are_compared_metric_by_metric_and_stacks_run_by_run() -> None:
    both = [{"step": 1.0, "a/x": 1.0, "a/y": 2.0}, {"step": 2.0, "a/x": 1.0, "a/y": 3.0}]
    runs = [Series("first", both), Series("<second>", both)]
    drawn = draw_all([Panel("Lines", ("a/*",)), Panel("Stack", ("a/x", "a/y"), stacked=True)], runs)
    titles = re.findall(r"<figcaption>([^<]*)", drawn)
    assert titles == ["Lines: x", "Lines: y", "Stack: first", "Stack: &lt;second&gt;"]
    assert "<second>" not in drawn
    alone = draw_all([Panel("Lines", ("a/*",)), Panel("Nothing", ("gone",))], runs[:1])
    assert re.findall(r"<figcaption>([^<]*)", alone) == ["Lines"]
    assert draw_all([Panel("Nothing", ("gone",))], runs) == ""

"""Charts of metrics over steps, or another number, as inline SVG, with their values next to them for
the script that shows them on hover.

Colours are classes, so that a chart follows the page's theme; without the script it stands as it
is. A long series is thinned and smoothed (`series.py`); a logarithmic axis gives exact zeros a
separate row (`axes.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate

from isobit.monitor.report.axes import Axis, doubling_axis, label, linear_axis, log_axis
from isobit.monitor.report.document import embedded, escaped
from isobit.monitor.report.series import Line, Series, line, smoothing_width, thin

WIDTH, HEIGHT = 360, 206
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 350.0, 10.0, 178.0
_DOTTED = 20  # points of a line that are marked, at most
COLORS = 10
"""Classes `c0` to `c9` of the style sheet."""


@dataclass(frozen=True)
class Panel:
    """A chart: title, the metrics drawn (names, or patterns such as `accuracy/*`), and how.

    `note` says in a sentence what is drawn. `fraction`: from 0 to 1. `axis`: what a row's `step`
    is; `doubling`: it is a power of two. `named`: a line says its name also where it is alone.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    note: str = ""
    log: bool = False
    stacked: bool = False
    fraction: bool = False
    axis: str = "step"
    doubling: bool = False
    named: bool = False


@dataclass(frozen=True)
class _Drawn:
    """A line with its name and the number of its color."""

    name: str
    color: int
    line: Line


def draw_all(panels: Sequence[Panel], runs: Sequence[Series], last: str = "") -> str:
    """Return the panels that have something to show, as figures, and one more after them. Where
    several runs are compared, a panel shows one metric of all of them; and stacked ones are of one
    run each."""
    figures = []
    for panel in panels:
        panel = replace(panel, metrics=_named(panel, runs))
        if len(runs) == 1:
            figures.append(draw(panel, runs))
        elif panel.stacked:
            figures += [
                draw(replace(panel, title=f"{panel.title}: {run.name}"), [run]) for run in runs
            ]
        elif len(panel.metrics) > 1:
            figures += [
                draw(replace(panel, title=f"{panel.title}: {_short(m)}", metrics=(m,)), runs)
                for m in panel.metrics
            ]
        else:
            figures.append(draw(panel, runs))
    figures.append(last)
    long = max(len(run.rows) for run in runs)
    note = (
        (
            "<p class='soft'>Thin lines: single steps. Thick lines: running means over "
            f"{smoothing_width(long)} steps.</p>"
        )
        if smoothing_width(long) > 1
        else ""
    )
    return f"<div class='charts'>{''.join(figures)}</div>{note}" if any(figures) else ""


def draw(panel: Panel, runs: Sequence[Series]) -> str:
    """Return the panel as a `<figure>`; nothing if no run has anything to show in it."""
    several = len(runs) > 1
    lines = [
        _Drawn(run.name if several else _short(metric), i if several else j, line(run.rows, metric))
        for i, run in enumerate(runs)
        for j, metric in enumerate(panel.metrics)
    ]
    drawn = [d for d in lines if d.line.steps]
    if not drawn:
        return ""
    steps = [step for d in drawn for step in d.line.steps]
    across = doubling_axis(steps, _LEFT + 4, _RIGHT - 4) if panel.doubling else _step_axis(steps)
    if panel.stacked:
        up, marks, shown = _stacked(drawn, across)
    elif panel.log:
        up, marks, shown = _logarithmic(drawn, across)
    else:
        up, marks, shown = _lines(drawn, across, panel.fraction)
    head = f"{escaped(panel.title)}{f' <span>{escaped(panel.unit)}</span>' if panel.unit else ''}"
    note = f"<small>{escaped(panel.note)}</small>" if panel.note else ""
    keys = "".join(f"<li class='c{d.color % COLORS}'>{escaped(d.name)}</li>" for d in drawn)
    legend = f"<ul class='legend'>{keys}</ul>" if len(drawn) > 1 or panel.named else ""
    data = {
        "axis": panel.axis,
        "x": across.data(),
        "y": None if panel.stacked else up.data(),
        "lines": [
            {"name": d.name, "color": d.color % COLORS, "x": x, "y": y}
            for d, (x, y) in zip(drawn, shown)
        ],
    }
    svg = (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-label='{escaped(_said(panel, drawn))}'>{_grid(across, up, panel.axis)}{''.join(marks)}</svg>"
    )
    return (
        "<figure "
        f"class='chart'><figcaption>{head}{note}</figcaption>{legend}{svg}{embedded(data)}</figure>"
    )


_Shown = tuple[list[float], list[float]]


def _lines(
    drawn: Sequence[_Drawn], across: Axis, fraction: bool
) -> tuple[Axis, list[str], list[_Shown]]:
    """Draw every line thinned; a long one faint, under its running mean."""
    fits = all(0 <= v <= 1 for d in drawn for v in d.line.values)
    smooth = [
        d.line.smoothed() if smoothing_width(len(d.line.values)) > 1 else d.line.thinned()
        for d in drawn
    ]
    reached = [v for d in drawn for v in d.line.values] + [
        v for s in smooth for v in (*s.low, *s.high)
    ]
    up = linear_axis(reached, _BOTTOM, _TOP, fraction and fits)
    marks, shown = [], []
    for d, mean in zip(drawn, smooth):
        raw, color = d.line.thinned(), f"c{d.color % COLORS}"
        if mean.low:
            there = _path(mean.steps, mean.high, across, up)
            back = _path(mean.steps[::-1], mean.low[::-1], across, up)
            marks.append(f"<path class='band {color}' d='{there}L{back[1:]}Z'/>")
        if smoothing_width(len(d.line.values)) > 1:
            marks.append(
                f"<path class='line faint {color}' d='{_path(raw.steps, raw.values, across, up)}'/>"
            )
        marks.append(
            f"<path class='line {color}' d='{_path(mean.steps, mean.values, across, up)}'/>"
        )
        if len(raw.steps) <= _DOTTED:
            marks.append(
                f"<path class='dots {color}' d='{_dots(raw.steps, raw.values, across, up)}'/>"
            )
        shown.append((raw.steps, _rounded(raw.values)))
    return up, marks, shown


def _logarithmic(drawn: Sequence[_Drawn], across: Axis) -> tuple[Axis, list[str], list[_Shown]]:
    """Draw positive values as lines, exact zeros as dots in a separate row."""
    up = log_axis([v for d in drawn for v in d.line.values], _BOTTOM, _TOP)
    marks, shown = [], []
    for d in drawn:
        raw, color, count = d.line.thinned(), f"c{d.color % COLORS}", len(d.line.values)
        long = smoothing_width(count) > 1
        for line_, faint in (
            (raw, long),
            *([(d.line.positive().smoothed(log=True), False)] if long else []),
        ):
            positive = line_.positive()
            if positive.steps:
                path = _path(positive.steps, positive.values, across, up)
                marks.append(f"<path class='line {'faint ' * faint}{color}' d='{path}'/>")
        if count <= _DOTTED and (positive := raw.positive()).steps:
            marks.append(
                f"<path class='dots {color}' d='{_dots(positive.steps, positive.values, across, up)}'/>"
            )
        marks.append(_zeros(d.line, color, across, up, long))
        shown.append((raw.steps, _rounded(raw.values)))
    if up.zeros:
        names = f"<text class='soft' x='{_LEFT + 6}' y='{_BOTTOM - 7}'>exactly 0</text>"
        marks.append(f"<path class='break' d='M{_LEFT} {up.lowest + 3}H{_RIGHT}'/>{names}")
    return up, marks, shown


def _zeros(line: Line, color: str, across: Axis, up: Axis, long: bool) -> str:
    """Return the steps at which a line is exactly zero: a dot each, or, in a long run, a mark as
    wide as a step."""
    steps = [s for s, v in zip(line.steps, line.values) if v <= 0]
    if not steps:
        return ""
    if not long:
        return f"<path class='zeros {color}' d='{_dots(steps, [0.0] * len(steps), across, up)}'/>"
    half = (across.at(across.high) - across.at(across.low)) / len(line.steps) / 2
    spans: list[list[float]] = []
    for x in (across.at(step) for step in steps):
        if spans and x - half - spans[-1][1] < half:
            spans[-1][1] = x + half
        else:
            spans.append([x - half, x + half])
    marks = "".join(f"M{a:.1f} {up.at(0.0):.1f}H{b:.1f}" for a, b in spans)
    return f"<path class='zeros long {color}' d='{marks}'/>"


def _stacked(drawn: Sequence[_Drawn], across: Axis) -> tuple[Axis, list[str], list[_Shown]]:
    """Draw areas on top of each other; a step without a value counts 0 for a line."""
    every = sorted({s for d in drawn for s in d.line.steps})
    tables = [dict(zip(d.line.steps, d.line.values)) for d in drawn]
    columns = [list(accumulate(table.get(s, 0.0) for table in tables)) for s in every]
    indices = thin([column[-1] for column in columns])
    steps = [every[i] for i in indices]
    up = linear_axis([0.0, *(column[-1] for column in columns)], _BOTTOM, _TOP)
    marks, shown = [], []
    for j, (d, table) in enumerate(zip(drawn, tables)):
        above = [columns[i][j] for i in indices]
        below = [columns[i][j - 1] if j else 0.0 for i in indices]
        there, back = _path(steps, above, across, up), _path(steps[::-1], below[::-1], across, up)
        marks.append(f"<path class='area c{d.color % COLORS}' d='{there}L{back[1:]}Z'/>")
        shown.append((steps, _rounded([table.get(s, 0.0) for s in steps])))
    return up, marks, shown


def _named(panel: Panel, runs: Sequence[Series]) -> tuple[str, ...]:
    """Return the panel's metrics, patterns replaced by the runs' names, numbers in order."""
    names: list[str] = []
    for metric in panel.metrics:
        if "*" not in metric:
            names.append(metric)
            continue
        there = {
            name for run in runs for row in run.rows for name in row if fnmatchcase(name, metric)
        }
        names += sorted(there, key=lambda name: (len(name), name))
    return tuple(dict.fromkeys(names))


def _step_axis(steps: Sequence[float]) -> Axis:
    low, high = min(steps), max(steps)
    return (
        Axis(low, high, _LEFT + 4, _RIGHT - 4)
        if high > low
        else Axis(low - 1, high + 1, _LEFT + 4, _RIGHT - 4)
    )


def _grid(across: Axis, up: Axis, axis: str) -> str:
    elements = []
    for value, name in up.ticks():
        y = up.at(value)
        elements.append(f"<path class='grid' d='M{_LEFT} {y:.1f}H{_RIGHT}'/>")
        elements.append(f"<text x='{_LEFT - 6}' y='{y + 3.5:.1f}' class='end'>{name}</text>")
    whole = [value for value, _ in across.ticks() if value == int(value)]
    elements += [
        f"<text x='{across.at(v):.1f}' y='{_BOTTOM + 15}' class='middle'>{label(v)}</text>"
        for v in whole
    ]
    elements.append(f"<text x='{_RIGHT}' y='{HEIGHT - 1}' class='end soft'>{escaped(axis)}</text>")
    return "".join(elements)


def _path(steps: Sequence[float], values: Sequence[float], across: Axis, up: Axis) -> str:
    return "M" + "L".join(f"{across.at(s):.1f} {up.at(v):.1f}" for s, v in zip(steps, values))


def _dots(steps: Sequence[float], values: Sequence[float], across: Axis, up: Axis) -> str:
    """Return the path of segments of no length, which round ends make dots."""
    return "".join(f"M{across.at(s):.1f} {up.at(v):.1f}h0" for s, v in zip(steps, values))


def _said(panel: Panel, drawn: Sequence[_Drawn]) -> str:
    """Return the chart in words, for those who do not see it."""
    first, last = f"first {panel.axis}", f"last {panel.axis}"
    lines = [
        f"{d.name}: {d.line.values[0]:.4g} at the {first}, {d.line.values[-1]:.4g} at the {last}"
        for d in drawn
    ]
    return f"{panel.title}. {'; '.join(lines)}"


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.4g}") for v in values]


def _short(metric: str) -> str:
    """Return the last part in words; of a family, a foreign name unchanged, as a tool's."""
    last = metric.rpartition("/")[2]
    return last if metric.count("/") > 1 else last.removesuffix("_mib").replace("_", " ")

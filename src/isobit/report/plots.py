"""Plots of a run as SVG text, by matplotlib; colors that read on light and on dark paper. Imports no torch."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

Rows = Sequence[Mapping[str, float | None]]
_COLORS = ("#3b7dd8", "#e07b39", "#3fa66b", "#a65bb5", "#c8a02b", "#d3506a", "#3aa6a6", "#8a6d5a", "#7a8fa6", "#b5b04a")
_GREY = "#888888"
_LEGEND_INSIDE = 4  # more names than this stand below the plot


@dataclass(frozen=True)
class Series:
    """One run: its name and the rows of its metrics.jsonl."""

    name: str
    rows: Rows


@dataclass(frozen=True)
class Panel:
    """One plot: title, the metrics drawn, and how."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    band: str | None = None
    log: bool = False
    stacked: bool = False
    fraction: bool = False
    axis: str = "step"


PANELS = (
    Panel("Reward", ("reward/mean",), band="reward/std"),
    Panel("Held-out accuracy, greedy", ("accuracy/held_out",), fraction=True),
    Panel("Mismatch between rollout and learner", ("mismatch/kl_k3",), log=True),
    Panel("Completion length", ("length/mean",), unit="tokens"),
    Panel("Truncated completions", ("length/truncated_fraction",), fraction=True),
    Panel("Entropy", ("entropy",), unit="nats"),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Groups without spread", ("groups/zero_spread_fraction",), fraction=True),
    Panel("Rollout throughput", ("throughput/rollout_tokens_per_s",), unit="tokens/s"),
    Panel("Seconds by phase", ("time/rollout", "time/score", "time/learn", "time/sync"), unit="s", stacked=True),
    Panel("Memory", ("memory/peak_rss_mib", "memory/weights_mib", "memory/kv_cache_mib"), unit="MiB"),
)


def points(rows: Rows, metric: str) -> tuple[list[float], list[float]]:
    """(steps, values) where the metric has a finite value."""
    found = [(row["step"], row.get(metric)) for row in rows]
    kept = [(float(s), float(v)) for s, v in found if s is not None and v is not None and math.isfinite(v)]
    return [s for s, _ in kept], [v for _, v in kept]


def draw(panel: Panel, runs: Sequence[Series]) -> str | None:
    """The panel as an `<svg>` element; None if no run has anything to show in it."""
    if not any(points(run.rows, metric)[0] for run in runs for metric in panel.metrics):
        return None
    style: dict[Any, Any] = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY)
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(4.6, 2.5))
        if panel.log:
            _draw_log(axes, panel, runs)
        elif panel.stacked:
            _draw_stacked(axes, panel, runs[0])
        else:
            _draw_lines(axes, panel, runs)
        _finish(axes, panel)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # ids must not collide between the figures of one page
    prefix = re.sub(r"\W", "", panel.title)
    svg = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', svg)
    return re.sub(r"(url\(#|xlink:href=\"#)", rf"\1{prefix}-", svg)


def _draw_lines(axes: Axes, panel: Panel, runs: Sequence[Series]) -> None:
    several = len(runs) > 1
    for i, run in enumerate(runs):
        for j, metric in enumerate(panel.metrics):
            steps, values = points(run.rows, metric)
            color = _COLORS[(i if several else j) % len(_COLORS)]
            label = run.name if several and j == 0 else _short(metric) if len(panel.metrics) > 1 else None
            style = ("-", "--", ":")[j % 3] if several else "-"
            marker = "o" if len(steps) <= 40 else None
            axes.plot(steps, values, style, color=color, label=label, linewidth=1.5, marker=marker, markersize=2.5)
            low, high = _band(run, metric, None if several else panel.band, steps, values)
            if low:
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    if panel.fraction:
        axes.set_ylim(-0.03, 1.03)


def _band(
    run: Series, metric: str, deviation: str | None, steps: list[float], values: list[float]
) -> tuple[list[float], list[float]]:
    """Between the lowest and the highest of several seeds, or a standard deviation around the line; or nothing."""
    low, high = (dict(zip(*points(run.rows, f"{metric}:{end}"))) for end in ("low", "high"))
    if low:
        return [low.get(s, v) for s, v in zip(steps, values)], [high.get(s, v) for s, v in zip(steps, values)]
    spread = dict(zip(*points(run.rows, deviation))) if deviation is not None else {}
    if not spread:
        return [], []
    sides = [[v + sign * spread.get(s, 0.0) for s, v in zip(steps, values)] for sign in (-1, 1)]
    return sides[0], sides[1]


def _draw_log(axes: Axes, panel: Panel, runs: Sequence[Series]) -> None:
    """A logarithmic axis has no zero: exact zeros are drawn as dots on a line of their own, and named."""
    everything = [v for run in runs for v in points(run.rows, panel.metrics[0])[1]]
    positive, any_zero = [v for v in everything if v > 0], any(v <= 0 for v in everything)
    floor = (min(positive) / 10 if any_zero else min(positive)) if positive else 1e-8
    for i, run in enumerate(runs):
        steps, values = points(run.rows, panel.metrics[0])
        color, label = _COLORS[i % len(_COLORS)], run.name if len(runs) > 1 else None
        zeros = [s for s, v in zip(steps, values) if v <= 0]
        axes.plot(steps, [v if v > 0 else math.nan for v in values], color=color, label=label, linewidth=1.5)
        axes.plot(zeros, [floor] * len(zeros), ".", color=color, markersize=3)
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, max(positive) * 3 if positive else 1.0)
    if any_zero:
        axes.annotate("exactly 0", (0.0, floor), xytext=(2, 5), textcoords="offset points", fontsize=8, color=_GREY)


def _draw_stacked(axes: Axes, panel: Panel, run: Series) -> None:
    steps, _ = points(run.rows, panel.metrics[0])
    columns = [dict(zip(*points(run.rows, metric))) for metric in panel.metrics]
    values = [[column.get(step, 0.0) for step in steps] for column in columns]
    axes.stackplot(steps, values, colors=_COLORS, labels=[_short(m) for m in panel.metrics], alpha=0.85, linewidth=0)


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel(panel.axis)
    if panel.unit:
        axes.set_ylabel(panel.unit)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GREY)
    axes.grid(True, axis="y", color=_GREY, alpha=0.2, linewidth=0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_legend_handles_labels()[1]:
        many = len(axes.get_legend_handles_labels()[1]) > _LEGEND_INSIDE
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncol": 3} if many else {"loc": "best"}
        legend = axes.legend(frameon=False, fontsize=8, **below)
        for text in legend.get_texts():
            text.set_color(_GREY)


def _short(metric: str) -> str:
    return metric.rpartition("/")[2].removesuffix("_mib").replace("_", " ")

"""What the experiments of the papers show of their runs: a table each, and a picture.

Left out: the runs (`papers.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """A row of a picture: a series by step, `log` where its axis is, and `lines`, levels that a
    document has published."""

    series: str
    title: str
    log: bool = False
    lines: tuple[tuple[float, str], ...] = ()


_ACCURACY = Panel("held_out", "held-out accuracy")
_KL = Panel("kl_k3", "kl_k3 (no line: 0)", log=True)
PANELS: Mapping[str, tuple[Panel, ...]] = {
    "on-policy": (_ACCURACY, _KL),
    "recalibration": (_KL, Panel("saturated", "share of keys and values clamped"), _ACCURACY),
    "corners": (
        Panel(
            "token_mult_prob_error", "token_mult_prob_error",
            lines=((1.03, "NeMo RL: healthy below"), (1.05, "unhealthy above")),
        ),
        _ACCURACY,
    ),
    "granularity": (_ACCURACY, Panel("grad_norm", "norm of the gradient", log=True)),
    "experts": (
        Panel(
            "kl_k3", "kl_k3 (no line: 0)", log=True,
            lines=((1.5e-3, "FP8-RL, 30B: without replay"), (7.5e-4, "with")),
        ),
        Panel("differing_choices", "differing choices of experts a step"),
        _ACCURACY,
    ),
}  # fmt: skip
"""By experiment, from above."""


def arms_of(runs: Runs) -> dict[tuple[str, str], Runs]:
    """The runs of each case and arm, in the order in which they came, by seed."""
    keys = dict.fromkeys((run["case"], run["arm"]) for run in runs)
    return {
        key: sorted((run for run in runs if (run["case"], run["arm"]) == key), key=lambda r: r["seed"])
        for key in keys
    }  # fmt: skip


def _of(run: Mapping[str, Any], series: str) -> list[tuple[int, float]]:
    """[step, value] of a series; the evaluations have their steps with them, and what was measured
    once has step 1."""
    values = run.get(series, ())
    if series == "held_out":
        return [(int(step), accuracy) for step, accuracy in values]
    numbered = enumerate(values if isinstance(values, list) else (values,), 1)
    return [(step, value) for step, value in numbered if isinstance(value, (int, float))]


def _mean(runs: Runs, series: str, first: float, last: float) -> float | None:
    """Over the runs, of the part of the steps from a share of them to another."""
    parts = []
    for run in runs:
        values = [value for _, value in _of(run, series)]
        parts += values[int(first * len(values)) : max(int(last * len(values)), 1)]
    return fmean(parts) if parts else None


def _cell(value: float | None) -> str:
    """Three digits; an exact 0 is no rounded one."""
    return "" if value is None else f"{value:.3g}".replace("e-0", "e-")


JET_RL = {
    "BF16 learner, FP8 rollout": ((8e3, -10.2), (8e3, -2.9), (1.6e4, -5.0), (1.6e4, -10.3)),
    "one flow": ((8e3, 2.0), (8e3, -1.0), (8e3, -1.1), (1.6e4, -3.0), (1.6e4, -2.7), (1.6e4, -0.9)),
}
"""Published for three models (arXiv 2601.14243, tables 2 and 3): tokens, and points of accuracy
against BF16. Two more runs of the first "did not converge"."""
NOT_DRAWN = ("30 tokens, eight updates", "30 tokens, keys times 256")
"""Cases that the table alone shows."""
COLUMNS = {
    "on-policy": ("entropy",),
    "recalibration": ("saturated", "scale_drift", "largest_difference"),
    "corners": ("token_mult_prob_error",),
    "granularity": ("gradient_error",),
    "experts": ("differing_choices",),
}
"""By experiment: what its table has more than others, means of the last quarter of the steps."""


def table(found: Mapping[str, Any]) -> str:
    """A line for each case and arm in Markdown, means over its seeds."""
    if found["experiment"] == "cache":
        return _cache_table(found["runs"])
    more = COLUMNS[found["experiment"]]
    names = ["case", "arm", "seeds", "accuracy: start", "last three", "reward: first quarter"]
    names += ["last", "kl_k3: first quarter", "last", *(name.replace("_", " ") for name in more)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (case, arm), runs in arms_of(found["runs"]).items():
        last = fmean(accuracy for run in runs for _, accuracy in run["held_out"][-3:])
        cells = [case, f"`{arm}`", str(len(runs))]
        cells += [f"{fmean(run['held_out'][0][1] for run in runs):.2f}", f"{last:.2f}"]
        for series in ("reward", "kl_k3"):
            cells += [_cell(_mean(runs, series, *part)) for part in ((0, 0.25), (0.75, 1))]
        cells += [_cell(_mean(runs, name, 0.75, 1)) for name in more]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cache_table(runs: Runs) -> str:
    names = ["completions", "flow", "pages", "preemptions", "tokens computed twice", "engine steps"]
    names += ["with room for all", "tokens that differ"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for run in runs:
        shown = [run["fixed_pages"], run["fixed_preemptions"], run["recomputed"]]
        shown += [run["fixed_steps"], run["ample_steps"], run["differing"]]
        cells = [run["case"], f"`{run['arm']}`", *(f"{value:,}" for value in shown)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], out: Path) -> None:
    """A column for each case, and a row for each panel: a thin line for every run, a thick one for
    the mean of an arm's, dashed where it has a correction."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    if found["experiment"] == "cache":
        _draw_cache(found["runs"], out)
        return
    panels, arms = PANELS[found["experiment"]], arms_of(found["runs"])
    cases = [case for case in dict.fromkeys(case for case, _ in arms) if case not in NOT_DRAWN]
    arms = {(case, arm): runs for (case, arm), runs in arms.items() if case in cases}
    names = list(dict.fromkeys(arm for _, arm in arms))
    by_length = found["experiment"] == "on-policy"
    rows = len(panels) + by_length
    figure, axes = plt.subplots(
        rows, len(cases), figsize=(3.6 * len(cases) + 2.6, 2.8 * rows), sharey="row",
        squeeze=False, constrained_layout=True,
    )  # fmt: skip
    palette = plt.get_cmap("tab10" if len(names) <= 10 else "tab20")
    colors = [palette(number) for number in range(len(names))]
    for (case, arm), runs in arms.items():
        for row, panel in enumerate(panels):
            axis, style = axes[row, cases.index(case)], {"color": colors[names.index(arm)]}
            series = [_of(run, panel.series) for run in runs]
            if not any(value for values in series for _, value in values) and panel.log:
                continue
            for values in series if len(series) > 1 else ():
                axis.plot(*zip(*values), **style, linewidth=0.5, alpha=0.35)
            if all(series):
                steps = [step for step, _ in min(series, key=len)]
                means = [fmean(values[i][1] for values in series) for i in range(len(steps))]
                line = {"linewidth": 1.7, "linestyle": "--" if "TIS" in arm else "-"}
                axis.plot(steps, _smooth(means, panel), **style, **line, label=arm)
    if by_length:
        for axis in axes[-1, 1:]:
            axis.remove()
        _draw_by_length(axes[-1, 0], arms, dict(zip(names, colors)))
    for row, panel in enumerate(panels):
        for axis in axes[row]:
            axis.grid(alpha=0.3)
            for level, name in panel.lines:
                axis.axhline(level, color="gray", linewidth=0.9, linestyle=":")
                axis.annotate(name, (0.01, level), xycoords=("axes fraction", "data"),
                    fontsize=7, color="gray", va="bottom")  # fmt: skip
            if panel.log:
                axis.set_yscale("log")
        axes[row, 0].set_ylabel(panel.title, fontsize=9)
    for column, case in enumerate(cases):
        axes[0, column].set_title(case, fontsize=10)
        axes[len(panels) - 1, column].set_xlabel("step", fontsize=9)
    handles = {
        name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels())
    }
    shown = [*names, *(name for name in handles if name not in names)]
    shown = [name for name in shown if name in handles]
    figure.legend(
        [handles[name] for name in shown], shown, fontsize=8, loc="outside right upper",
    )  # fmt: skip
    figure.savefig(out, dpi=100)
    plt.close(figure)


def _draw_by_length(axis: Any, arms: Mapping[tuple[str, str], Runs], colors: Any) -> None:
    """Accuracy against that of `bf16`, in points, over the length of a completion; in gray those of
    Jet-RL."""
    for marker, (name, points) in zip("x+", JET_RL.items()):
        axis.plot(*zip(*points), marker, color="gray", label=f"Jet-RL: {name}", markersize=6)
    ends = {
        key: fmean(_mean([run], "held_out", 0.5, 1) or 0.0 for run in arms[key]) for key in arms
    }
    for (case, arm), accuracy in ends.items():
        if case in ("30 tokens", "125 tokens", "245 tokens") and arm != "bf16":
            tokens, marker = int(case.split()[0]), "v" if "TIS" in arm else "o"
            difference = 100 * (accuracy - ends[case, "bf16"])
            axis.plot(tokens, difference, marker, color=colors[arm], markersize=5)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlabel("tokens of a completion", fontsize=9)
    axis.set_ylabel("points against bf16,\nsecond half", fontsize=9)
    axis.grid(alpha=0.3)


def _smooth(values: Sequence[float], panel: Panel) -> list[float]:
    """Means over the five steps around each; evaluations as they are."""
    if panel.series == "held_out":
        return list(values)
    return [fmean(values[max(i - 2, 0) : i + 3]) for i in range(len(values))]


def _draw_cache(runs: Runs, out: Path) -> None:
    """Preemptions, tokens computed twice and engine steps, by length and flow."""
    import matplotlib.pyplot as plt

    arms = list(dict.fromkeys(run["arm"] for run in runs))
    cases = list(dict.fromkeys(run["case"] for run in runs))
    shown = {
        "fixed_preemptions": "preemptions",
        "recomputed": "tokens computed twice",
        "fixed_steps": "engine steps",
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), constrained_layout=True)
    for axis, (name, title) in zip(axes, shown.items()):
        for number, arm in enumerate(arms):
            values = [run[name] for case in cases for run in runs
                if (run["case"], run["arm"]) == (case, arm)]  # fmt: skip
            places = [place + (number - (len(arms) - 1) / 2) * 0.2 for place in range(len(values))]
            bars = axis.bar(places, values, 0.2, label=arm, color=f"C{number}")
            axis.bar_label(bars, fontsize=6)
        axis.set_xticks(range(len(cases)), cases, fontsize=8)
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=7)
    figure.savefig(out, dpi=100)
    plt.close(figure)

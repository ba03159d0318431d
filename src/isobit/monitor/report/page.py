"""The report: one HTML file that shows a run, or several side by side. Reads run directories only;
imports no torch.

Every section is complete in the page; the script turns them into tabs and adds what needs a script:
values on hover, the slider of the heat maps, the tables of prompts and completions. Heat maps,
prompts and completions are made for each run, and the page's byte budget is shared between them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.data.foreign import read_bytes, reason_of
from isobit.errors import IsobitError, brief
from isobit.monitor.report import panels
from isobit.monitor.report.charts import draw, draw_all
from isobit.monitor.report.differences import differing, flattened
from isobit.monitor.report.document import embedded, escaped, html_page
from isobit.monitor.report.heatmap import heat_maps, heat_section
from isobit.monitor.report.rollouts import RolloutIndex, read_rollouts
from isobit.monitor.report.selection import sample_completions
from isobit.monitor.report.series import Series, points
from isobit.monitor.report.solved import prompt_section, prompt_table
from isobit.monitor.report.summary import about, headline, summary
from isobit.monitor.report.tables import html_table
from isobit.run import durable
from isobit.run.completions import COMPLETIONS, HELD_OUT
from isobit.run.directory import (
    CONFIG,
    METRICS,
    QUANTIZATION,
    RESOLVED,
    in_use,
    object_in,
    read_jsonl,
    require_run,
)
from isobit.run.ends import cut_short
from isobit.run.rows import end_of_lines, warn

SCRIPTS = ("charts.js", "tabs.js", "heatmap.js", "prompts.js", "completions.js")
_COMPLETION_BYTES, _HELD_OUT_BYTES, _PROMPT_BYTES = 2_000_000, 400_000, 400_000
_MOST_CONFIG = 1 << 20
_LEARNED = "advantage/nonzero_fraction"  # of a step with completions
_NONE_KEPT = re.compile(r"^  completions: none$", re.MULTILINE)
_STATIC_SAMPLES, _STATIC_LENGTH = 3, 600


@dataclass(frozen=True)
class _Run:
    """The contents of a run directory, made ready for the page."""

    name: str
    config: str
    resolved: Mapping[str, str]
    series: Series
    heat: dict[str, Any] | None
    prompts: dict[str, Any]
    samples: dict[str, Any]
    held_out: dict[str, Any]


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page; returns its path. Raises IsobitError for a run without metrics."""
    directories = [Path(directory) for directory in run_dirs]
    runs = [
        _read(path, name, len(directories))
        for path, name in zip(directories, run_names(directories))
    ]
    series = [run.series for run in runs]
    sections = [
        (
            "Overview",
            headline(series)
            + summary(series)
            + draw_all((*panels.OUTCOME, panels.MISMATCH_FIGURE), series),
        ),
        ("Learning", draw_all(panels.LEARNING, series)),
        ("Turns", draw_all(panels.TURNS, series)),
        ("Mismatch", _mismatch(series)),
        ("Quantization", draw_all(panels.QUANTIZATION, series) + _each(runs, _heat)),
        ("Time and memory", draw_all(panels.COST, series)),
        ("Prompts", _each(runs, _prompts)),
        ("Completions", _each(runs, lambda run: _completions(run.samples))),
        ("Held out", _each(runs, lambda run: _completions(run.held_out))),
        ("Configuration", _configuration(runs)),
    ]
    body = "".join(
        f"<section id='part-{title.lower().replace(' ', '-')}'><h2>{title}</h2>{content}</section>"
        for title, content in sections
        if content
    )
    facts = f"<p class='soft'>{escaped(about(runs[0].config))}</p>" if len(runs) == 1 else ""
    head = (
        "<header><p "
        f"class='mark'>isobit</p><h1>{escaped(', '.join(run.name for run in runs))}</h1>{facts}</header>"
    )
    page = html_page(", ".join(run.name for run in runs), f"{head}<main>{body}</main>", SCRIPTS)
    try:
        durable.write_text(out, page)
    except OSError as error:
        raise IsobitError(f"cannot write report {out}: {error.strerror}") from None
    return out


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return the last part of each path; more parts where these are the same."""
    paths = [directory.resolve().parts for directory in directories]
    for count in range(1, max(len(p) for p in paths) + 1):
        names = ["/".join(p[-count:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{p[-1]} ({i + 1})" for i, p in enumerate(paths)]


def _read(directory: Path, name: str, sharing: int) -> _Run:
    require_run(directory)
    rows = [panels.with_derived(row) for row in read_jsonl(directory / METRICS)]
    if not rows:
        raise IsobitError(
            f"{directory}: no step has been recorded yet, so there is nothing to report"
        )
    recorded = directory / QUANTIZATION
    half = recorded.is_file() and end_of_lines(recorded) < recorded.stat().st_size
    if half and not in_use(directory):
        warn(f"{recorded} ends with half a row, which is left out")
    if (line := cut_short(directory)) is not None:
        warn(line)
    rollouts, config = read_rollouts(directory / COMPLETIONS), _config(directory / CONFIG)
    intervals = rollouts.reward_intervals()
    learned = sum(row.get(_LEARNED) is not None for row in rows)
    if learned and not (rollouts.count or rollouts.lost or _NONE_KEPT.search(config)):
        warn(
            f"{directory / COMPLETIONS}: holds no completions, and {learned:,} steps learned from "
            "some: it was emptied or removed"
        )
    return _Run(
        name,
        config,
        _resolved(directory),
        Series(name, [_with_band(row, intervals, rollouts) for row in rows]),
        heat_maps(list(read_jsonl(recorded)) if recorded.is_file() else []),
        prompt_table(rollouts, _PROMPT_BYTES // sharing),
        sample_completions(rollouts, directory, _COMPLETION_BYTES // sharing),
        sample_completions(
            read_rollouts(directory / HELD_OUT), directory, _HELD_OUT_BYTES // sharing
        ),
    )


def _config(path: Path) -> str:
    try:
        return read_bytes(path, _MOST_CONFIG).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"cannot read config {path}: {reason_of(error)}") from None


def _resolved(directory: Path) -> dict[str, str]:
    """Return what the config left open, as it was computed; empty if it is not recorded."""
    resolved = object_in(directory / RESOLVED)
    if resolved == {}:
        warn(f"{directory / RESOLVED} cannot be read: what the config left open is not on the page")
    return {
        name: brief(value)
        for name, value in (resolved or {}).items()
        if not isinstance(value, (dict, list))
    }


def _with_band(
    row: dict[str, Any], intervals: Mapping[int, float], rollouts: RolloutIndex
) -> dict[str, Any]:
    """Return the row with the ends of its mean reward's interval, which a mean of rewards of this
    run can reach."""
    reward, half = row.get("reward/mean"), intervals.get(int(row["step"]))
    if reward is None or half is None:
        return row
    low = max(reward - half, min(rollouts.lowest, reward))
    high = min(reward + half, max(rollouts.highest, reward))
    return {**row, "reward/mean:low": low, "reward/mean:high": high}


def _mismatch(series: Sequence[Series]) -> str:
    by_position = draw(panels.BY_POSITION, [panels.by_position(run) for run in series])
    charts = draw_all((panels.MISMATCH_FIGURE, *panels.MISMATCH), series, last=by_position)
    if not any(points(run.rows, "mismatch/compared_tokens")[0] for run in series):
        return charts
    return (
        "<p>Log-probabilities of the sampled tokens, as recorded by the rollout and as computed "
        "by the learner with the same weights. A step at which they agree in every bit stands in "
        f"the row named 0.</p>{charts}"
    )


def _each(runs: Sequence[_Run], make: Callable[[_Run], str]) -> str:
    """Return a section of HTML per run, named where there are several runs."""
    contents = [(escaped(run.name), content) for run in runs if (content := make(run))]
    if len(runs) == 1:
        return "".join(content for _, content in contents)
    return "".join(
        f"<div class='of-run' data-run='{name}'><h3>{name}</h3>{content}</div>"
        for name, content in contents
    )


def _heat(run: _Run) -> str:
    return "" if run.heat is None else heat_section(run.heat) + embedded(run.heat)


def _prompts(run: _Run) -> str:
    return prompt_section(run.prompts) + embedded(run.prompts) if run.prompts["total"] else ""


def _completions(samples: Mapping[str, Any]) -> str:
    """Return the best and the worst of a few steps for who reads without a script; all that was
    sampled for the browser."""
    if not samples["rows"]:
        return ""
    count, total = len(samples["rows"]), samples["total"]
    shown = f"All {total:,}" if count == total else f"{count:,} of {total:,}"
    steps = len({row["step"] for row in samples["rows"]})
    static = "".join(_sample(row, samples) for row in _extremes(samples))
    return (
        f"<p>{shown} completions, of {steps:,} of {samples['steps']:,} steps.</p>"
        f"<div class='completion-browser' data-static>{static}</div>{embedded(samples)}"
    )


def _extremes(samples: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    steps = sorted({row["step"] for row in samples["rows"]})
    chosen: list[Mapping[str, Any]] = []
    for step in dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])):
        rows = [row for row in samples["rows"] if row["step"] == step and row["reward"] is not None]
        if rows:
            best = max(rows, key=lambda row: row["reward"])
            worst = min(rows, key=lambda row: row["reward"])
            chosen += [best] if best["reward"] == worst["reward"] else [best, worst]
    return chosen or samples["rows"][:_STATIC_SAMPLES]


def _sample(row: Mapping[str, Any], samples: Mapping[str, Any]) -> str:
    text = row["text"] if "text" in row else "".join(samples["pieces"][i] for i in row["pieces"])
    reward = "not scored" if row["reward"] is None else f"reward {row['reward']:.3g}"
    prompt = _shorten(samples["prompts"][row["prompt"]])
    return (
        f"<article><h4>step {row['step']}, {reward}</h4><pre class='prompt'>{escaped(prompt)}</pre>"
        f"<pre>{escaped(_shorten(text))}</pre></article>"
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _STATIC_LENGTH else text[:_STATIC_LENGTH] + " …"


def _configuration(runs: Sequence[_Run]) -> str:
    """Return the differences first, where there are several runs; then each configuration."""
    different = ""
    if len(runs) > 1:
        rows = differing([_settings(run) for run in runs])
        table = (
            html_table([["", *(run.name for run in runs)], *rows])
            if rows
            else "<p>They do not differ.</p>"
        )
        different = f"<h3>What differs</h3>{table}"
    texts = "".join(
        f"<details{' open' * (len(runs) == 1)}><summary>{escaped(run.name)}</summary>"
        f"<pre>{escaped(run.config)}</pre>{_left_open(run)}</details>"
        for run in runs
    )
    return different + texts


def _settings(run: _Run) -> dict[str, str]:
    """Return the settings of the config, and those that it left open."""
    resolved = {f"resolved: {name}": value for name, value in run.resolved.items()}
    return {**flattened(run.config, f"{run.name}/{CONFIG}"), **resolved}


def _left_open(run: _Run) -> str:
    if not run.resolved:
        return ""
    lines = "\n".join(f"{name}: {value}" for name, value in run.resolved.items())
    return f"<h3>Resolved: what the config left open</h3><pre>{escaped(lines)}</pre>"


__all__ = ["write_report"]

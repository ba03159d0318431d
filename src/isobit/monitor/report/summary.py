"""The head of a report: the outcome of a run, in a sentence and a table."""

from collections.abc import Callable, Sequence
from functools import reduce

from isobit.monitor.report.differences import flattened
from isobit.monitor.report.document import escaped
from isobit.monitor.report.series import MetricRows, Series, points
from isobit.monitor.report.tables import html_table
from isobit.run.directory import CONFIG
from isobit.run.metrics import SUPERVISED_LOSSES
from isobit.run.no_progress import NoProgress

Line = Callable[[MetricRows], str]


def about(config: str) -> str:
    """Return a line about a run: the model, task, algorithm, precision, seed and rank of an adapter
    in its configuration."""
    found = flattened(config, CONFIG)
    names = (
        "model.path",
        "model.sft",
        "model.init.family",
        "task.name",
        "algorithm.preset",
        "precision",
        "precision.preset",
        "seed",
    )
    labels = {name: name.split(".")[0] for name in names} | {"adapter.rank": "adapter of rank"}
    facts = [(label, found.get(name, "null").strip("'\"")) for name, label in labels.items()]
    return " · ".join(f"{name} {value}" for name, value in facts if value != "null")


def _span(*metrics: str) -> Line:
    """Return a line that shows the first value and the mean of the last tenth, for the first of the
    metrics that a run has."""

    def line(rows: MetricRows) -> str:
        values = next(filter(None, (points(rows, name)[1] for name in metrics)), [])
        tail = values[-max(1, len(values) // 10) :]
        return f"{values[0]:.3g} → {sum(tail) / len(tail):.3g}" if values else ""

    return line


def _single(metric: str, pick: Callable[[Sequence[float]], float]) -> Line:
    def line(rows: MetricRows) -> str:
        values = points(rows, metric)[1]
        return _number(pick(values)) if values else ""

    return line


def _differing(rows: MetricRows) -> str:
    differing, compared, comparable = (
        points(rows, f"mismatch/{name}_tokens")[1]
        for name in ("differing", "compared", "comparable")
    )
    more = " compared" if sum(comparable) > sum(compared) else ""  # the headline says of how many
    return f"{sum(differing):,.0f} of {sum(compared):,.0f}{more}" if compared else ""


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


_WIDE = 24
"""The most characters of a figure of single width; a longer one takes the room of two."""
_LINES: tuple[tuple[str, Line], ...] = (
    ("steps", _single("step", max)),
    ("reward, first step → last tenth", _span("reward/mean")),
    ("KL in the reward, first step → last tenth", _span("reward/reference_kl")),
    ("loss, first step → last tenth", _span(*SUPERVISED_LOSSES)),
    ("held-out loss, first → last", _span("loss/held_out")),
    ("margin, first step → last tenth", _span("preference/margin")),
    ("held-out accuracy, first → last", _span("accuracy/held_out")),
    ("tokens that differ", _differing),
    ("largest difference, nats", _single("mismatch/max_abs_logprob_diff", max)),
    ("rollout tokens/s, median", _single("throughput/rollout_tokens_per_s", _median)),
    ("seconds per step, median", _single("time/step", _median)),
    ("peak memory, MiB", _single("memory/peak_rss_mib", max)),
    ("optimizer steps skipped", _single("steps/skipped", sum)),
)


def headline(runs: Sequence[Series]) -> str:
    """Return as HTML, for each run, the sentence about tokens that differ between rollout and
    learner, after a warning if the run's newest steps taught nothing."""
    return "".join(_no_progress(run, len(runs) > 1) + _headline(run, len(runs) > 1) for run in runs)


def summary(runs: Sequence[Series]) -> str:
    """Return as HTML a table with a column for each run; for a single run, figures side by side."""
    cells = [["", *(run.name for run in runs)]]
    for name, line in _LINES:
        values = [line(run.rows) for run in runs]
        if any(values):
            cells.append([name, *(value or "–" for value in values)])
    if len(runs) > 1:
        return html_table(cells)
    wide = {True: " class='wide'", False: ""}
    figures = "".join(
        f"<div{wide[len(value) > _WIDE]}><dt>{name}</dt><dd>{value}</dd></div>"
        for name, value in cells[1:]
    )
    return f"<dl class='figures'>{figures}</dl>"


def _no_progress(run: Series, several: bool) -> str:
    """Return as HTML a warning that the run's newest steps taught nothing; empty if they taught
    something."""
    verdict = reduce(NoProgress.after, run.rows, NoProgress()).verdict
    name = f"{escaped(run.name)}: " if several else ""
    return "" if verdict is None else f"<p class='headline bad'>{name}{escaped(verdict)}.</p>"


def _headline(run: Series, several: bool) -> str:
    _, differing = points(run.rows, "mismatch/differing_tokens")
    if not differing:
        return ""
    clean = sum(value == 0 for value in differing)
    compared, comparable = (
        sum(points(run.rows, f"mismatch/{what}_tokens")[1]) for what in ("compared", "comparable")
    )
    name = f"{escaped(run.name)}: " if several else ""
    of = f" of {comparable:,.0f}" if comparable > compared else ""
    total = (
        f"{name}0 differing tokens in {clean:,} of {len(differing):,} steps, "
        f"{compared:,.0f}{of} tokens compared"
    )
    if clean == len(differing):
        where = " in these" if of else " throughout"
        return (
            f"<p class='headline good'>{total}: rollout and learner computed the same "
            f"bits{where}.</p>"
        )
    _, errors = points(run.rows, "mismatch/token_mult_prob_error")
    # a ratio that overflows is null in the metrics
    largest = f"; largest mean probability ratio error {max(errors):.4f}" if errors else ""
    return f"<p class='headline'>{total}{largest}.</p>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"

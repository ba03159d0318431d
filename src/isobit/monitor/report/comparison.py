"""Several precision flows side by side, from their run directories: tables in plain text, one HTML
page, one JSON file.

A value is the mean over the seeds. Intervals of reward and accuracy are Student's, 95 %, over the
seeds; of a single seed there is none. Mismatch and times are means over all steps. Imports no
torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from isobit.errors import IsobitError
from isobit.monitor.report.charts import Panel, draw_all
from isobit.monitor.report.document import escaped, html_page
from isobit.monitor.report.intervals import mean_interval
from isobit.monitor.report.panels import with_derived
from isobit.monitor.report.series import MetricRows, Series, line, points
from isobit.monitor.report.tables import html_table, text_table
from isobit.run import durable
from isobit.run.directory import METRICS, object_in, read_jsonl

OUTCOME = "outcome.json"
PAGE, DATA = "comparison.html", "comparison.json"
_PHASES = ("sync", "calibrate", "rollout", "score", "learn")

CURVES = ("mismatch/kl_k3", "mismatch/token_mult_prob_error", "accuracy/held_out")
"""What the file keeps of every step, as the page draws it."""

PANELS = (
    Panel("Held-out accuracy, greedy", ("accuracy/held_out",), fraction=True),
    Panel("Reward", ("reward/mean",)),
    Panel("Mismatch", ("mismatch/kl_k3",), log=True, note="k3 estimate of KL(rollout ‖ learner)"),
    Panel(
        "Probability ratio error",
        ("mismatch/token_mult_prob_error-1",),
        log=True,
        note="mean, minus 1",
    ),
    Panel("Entropy", ("entropy",), unit="nats"),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Truncated weights", ("correction/clipped_fraction",)),
    Panel("Effective sample size", ("correction/effective_sample_size_untruncated",)),
)


@dataclass(frozen=True)
class FlowRuns:
    """A precision flow: its name, the metrics of each of its runs, and why runs of it stopped, if
    they did."""

    name: str
    runs: Sequence[MetricRows]
    failures: Sequence[str]


Cell = Callable[[FlowRuns], str]


def write_comparison(directories: Mapping[str, Sequence[Path]], out: Path) -> str:
    """Write the page and the data into `out`; returns the tables as plain text."""
    flows = [_read(name, paths) for name, paths in directories.items()]
    failures = [line for flow in flows for line in flow.failures]
    cells = {title: _cells(columns, flows) for title, columns in TABLES}
    text = "\n\n".join(
        [*(f"{title}\n{text_table(table, rule=True)}" for title, table in cells.items()), *failures]
    )
    tables = "".join(f"<h2>{title}</h2>{html_table(table)}" for title, table in cells.items())
    notes = "".join(f"<p>{escaped(line)}</p>" for line in failures)
    series = [Series(flow.name, _mean_rows(flow.runs)) for flow in flows]
    seeds = max(len(flow.runs) for flow in flows)
    lead = (
        f"<p class='soft'>Means over {seeds} seed{'s' * (seeds != 1)}; intervals are 95 %; "
        "bands reach from the lowest seed to the highest.</p>"
    )
    head = "<header><p class='mark'>isobit</p><h1>Precision flows compared</h1></header>"
    body = f"{head}<main>{lead}{tables}{notes}<h2>Over steps</h2>{draw_all(PANELS, series)}</main>"
    page = html_page("precision flows compared", body)
    data = {
        flow.name: {
            "failures": list(flow.failures),
            **_values(flow),
            "curves": {metric: asdict(line(shown.rows, metric)) for metric in CURVES},
        }
        for flow, shown in zip(flows, series)
    }
    of_flows = ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in data.items())
    try:
        durable.write_text(out / PAGE, page)
        durable.write_text(out / DATA, f"{{{of_flows}}}\n")
    except OSError as error:
        raise IsobitError(f"cannot write the comparison into {out}: {error.strerror}") from None
    return text


def _read(name: str, paths: Sequence[Path]) -> FlowRuns:
    runs, failures = [], []
    for path in paths:
        outcome = object_in(path / OUTCOME) or {
            "finished": False,
            "reason": f"{path / OUTCOME} cannot be read",
        }
        rows = list(read_jsonl(path / METRICS)) if (path / METRICS).is_file() else []
        runs.append([with_derived(row) for row in rows])
        if outcome.get("finished") is not True:
            failures.append(f"{name}, {path.name}: stopped: {outcome.get('reason')}")
    return FlowRuns(name, runs, failures)


def _mean_rows(runs: Sequence[MetricRows]) -> MetricRows:
    """Return, for each step, the mean over the runs that have the metric, with their lowest and
    highest."""
    gathered: dict[float, dict[str, list[float]]] = {}
    for metric in {*CURVES, *(name for panel in PANELS for name in panel.metrics)}:
        for rows in runs:
            for step, value in zip(*points(rows, metric)):
                gathered.setdefault(step, {}).setdefault(metric, []).append(value)
    result: list[dict[str, float | None]] = []
    for step in sorted(gathered):
        row: dict[str, float | None] = {"step": step}
        for metric, values in gathered[step].items():
            row[metric] = sum(values) / len(values)
            if len(runs) > 1:
                row |= {f"{metric}:low": min(values), f"{metric}:high": max(values)}
        result.append(row)
    return result


def _per_run(flow: FlowRuns, metric: str, how: str) -> list[float]:
    """Return one number of each run that has the metric: its last value, the mean of its last
    tenth, its mean, or its sum."""
    numbers = []
    for rows in flow.runs:
        values = points(rows, metric)[1]
        if not values:
            continue
        tail = values[-max(1, len(values) // 10) :]
        pick = {
            "last": values[-1:],
            "end": tail,
            "mean": values,
            "max": [max(values)],
            "sum": [sum(values)],
        }[how]
        numbers.append(sum(pick) / len(pick))
    return numbers


def _number(metric: str, how: str = "mean", form: str = ".4g", scale: float = 1.0) -> Cell:
    def cell(flow: FlowRuns) -> str:
        values = _per_run(flow, metric, how)
        return format(scale * sum(values) / len(values), form) if values else ""

    return cell


def _interval(metric: str, how: str) -> Cell:
    def cell(flow: FlowRuns) -> str:
        values = _per_run(flow, metric, how)
        if not values:
            return ""
        mean, low, high = mean_interval(values)
        if metric.startswith("accuracy"):
            low, high = max(low, 0.0), min(high, 1.0)
        return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} [{low:.3f}, {high:.3f}]"

    return cell


def _differing(flow: FlowRuns) -> str:
    differing, compared = (
        sum(_per_run(flow, f"mismatch/{name}_tokens", "sum")) for name in ("differing", "compared")
    )
    return f"{differing:,.0f} of {compared:,.0f}" if compared else ""


def _runs(flow: FlowRuns) -> str:
    return f"{len(flow.runs) - len(flow.failures)} of {len(flow.runs)}"


TABLES: tuple[tuple[str, tuple[tuple[str, Cell], ...]], ...] = (
    (
        "What was learned",
        (
            ("runs finished", _runs),
            ("reward, last tenth", _interval("reward/mean", "end")),
            ("held-out accuracy, last", _interval("accuracy/held_out", "last")),
            ("skipped steps", _number("steps/skipped", "sum", ".0f")),
        ),
    ),
    (
        "Mismatch between rollout and learner",
        (
            ("differing tokens", _differing),
            ("mult_prob_error", _number("mismatch/token_mult_prob_error", "mean", ".5f")),
            ("kl_k3", _number("mismatch/kl_k3", "mean", ".2e")),
            ("largest |Δlogp|", _number("mismatch/max_abs_logprob_diff", "max", ".3g")),
            ("truncated", _number("correction/clipped_fraction", "mean", ".2e")),
            (
                "ESS, untruncated",
                _number("correction/effective_sample_size_untruncated", "mean", ".4f"),
            ),
        ),
    ),
    (
        "Cost",
        (
            ("rollout tokens/s", _number("throughput/rollout_tokens_per_s", "mean", ",.0f")),
            ("s/step", _number("time/step", "mean", ".3f")),
            *((phase, _number(f"time/{phase}", "mean", ".3f")) for phase in _PHASES),
            ("weights MiB", _number("memory/weights_mib", "last", ".1f")),
            ("KV MiB", _number("memory/kv_cache_mib", "last", ".1f")),
            ("sync MiB", _number("sync/bytes", "mean", ".2f", 2.0**-20)),
        ),
    ),
)


def _cells(columns: Sequence[tuple[str, Cell]], flows: Sequence[FlowRuns]) -> list[list[str]]:
    return [
        ["preset", *(name for name, _ in columns)],
        *([f.name, *(cell(f) for _, cell in columns)] for f in flows),
    ]


def _values(flow: FlowRuns) -> dict[str, list[float]]:
    """Return the numbers that the tables are made of, one per run."""
    wanted = {
        "reward": ("reward/mean", "end"),
        "accuracy": ("accuracy/held_out", "last"),
        "token_mult_prob_error": ("mismatch/token_mult_prob_error", "mean"),
        "kl_k3": ("mismatch/kl_k3", "mean"),
        "max_abs_logprob_diff": ("mismatch/max_abs_logprob_diff", "max"),
        "differing_tokens": ("mismatch/differing_tokens", "sum"),
        "compared_tokens": ("mismatch/compared_tokens", "sum"),
        "rollout_tokens_per_s": ("throughput/rollout_tokens_per_s", "mean"),
        "sync_bytes": ("sync/bytes", "mean"),
        **{f"seconds_{phase}": (f"time/{phase}", "mean") for phase in (*_PHASES, "step")},
    }
    return {name: _per_run(flow, metric, how) for name, (metric, how) in wanted.items()}

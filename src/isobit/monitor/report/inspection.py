"""What `isobit inspect` found, as text with bars for the terminal, and as one HTML page. Imports no
torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError
from isobit.monitor.report.charts import Panel, draw
from isobit.monitor.report.document import escaped, html_page
from isobit.monitor.report.series import Series
from isobit.monitor.report.tables import html_table, text_table
from isobit.run import durable

PAGE, DATA = "inspection.html", "inspection.json"
_RESOLVED = "What its run computed with"
_BAR, _FULL_DB = 20, 40.0
_FLAGS = (("saturated", 1e-3), ("flushed", 0.05), ("outliers", 50.0))
"""What is pointed at: more than this fraction clamped or turned to zero, or a channel that much
above the median."""


def inspection_text(values: Mapping[str, Any]) -> str:
    """Return the whole finding in plain text."""
    parts = []
    if values["tensors"]:
        parts.append(_tensors_text(values["preset"], values["tensors"]))
    parts.append(_gaps_text(values["gaps"]))
    parts += [_sources_text(name, rows) for name, rows in values["sources"].items()]
    if values.get("judgements"):
        parts.append(
            "Scores of the reward model against BF16\n"
            f"{text_table(_judgement_cells(values['judgements']))}"
        )
    if values.get("resolved"):
        parts.append(f"{_RESOLVED}\n{text_table(_resolved_cells(values['resolved']))}")
    return "\n\n".join(parts)


def write_inspection(values: Mapping[str, Any], out: Path) -> Path:
    """Write inspection.html and inspection.json into `out`; returns the page's path."""
    title = (
        f"<header><p class='mark'>isobit</p><h1>{escaped(values['model'])} "
        "inspected</h1></header><main>"
    )
    body = [title, _gaps_html(values["gaps"])]
    body += [_sources_html(name, rows) for name, rows in values["sources"].items()]
    if values.get("judgements"):
        body.append(
            "<h2>Scores of the reward "
            f"model</h2>{html_table(_judgement_cells(values['judgements']))}"
        )
    if values["tensors"]:
        body += [_plots(values["tensors"]), _tensors_html(values["preset"], values["tensors"])]
    if values.get("resolved"):
        body.append(f"<h2>{_RESOLVED}</h2>{html_table(_resolved_cells(values['resolved']))}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        page = html_page(f"{values['model']} inspected", "\n".join([*body, "</main>"]))
        durable.write_text(out / PAGE, page)
        durable.write_text(out / DATA, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise IsobitError(f"cannot write the inspection into {out}: {error.strerror}") from None
    return out / PAGE


def _tensors_text(preset: str, tensors: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per role: the mean over layers, and the worst layer."""
    lines = [
        f"Quantization under {preset}: signal-to-noise ratio, mean over layers",
        f"{'tensor':<24}{'dB':>6}  {'':<{_BAR}}  worst layer  saturated   flushed  outliers  amax",
    ]
    for role, rows in _by_role(tensors).items():
        mean = sum(row["snr_db"] for row in rows) / len(rows)
        worst = min(rows, key=lambda row: row["snr_db"])
        filled = round(_BAR * min(max(mean / _FULL_DB, 0.0), 1.0))
        bar = "█" * filled + "·" * (_BAR - filled)
        peak = {
            key: max(row[key] for row in rows)
            for key in ("saturated", "flushed", "outliers", "amax")
        }
        lines.append(
            f"{role:<24}{mean:>6.1f}  {bar}  {worst['snr_db']:>5.1f} in {worst['layer']:<3}"
            f"{peak['saturated']:>9.1e} {peak['flushed']:>9.1e} {peak['outliers']:>8.1f}  "
            f"{peak['amax']:.3g}"
        )
    flagged = [
        f"layer {row['layer']}, {row['role']}: {key} {row[key]:.3g}"
        for row in tensors
        for key, limit in _FLAGS
        if row[key] is not None and row[key] > limit
    ]
    more = [f"... and {len(flagged) - 8} more"] if len(flagged) > 8 else []
    return "\n".join(
        lines + (["look at:", *(f"  {line}" for line in flagged[:8] + more)] if flagged else [])
    )


def _resolved_cells(resolved: Mapping[str, Any]) -> list[list[str]]:
    """Return a run's resolved.json, in its own order."""
    return [["key", "value"], *([key, json.dumps(value)] for key, value in resolved.items())]


def _by_role(tensors: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    roles: dict[str, list[Mapping[str, Any]]] = {}
    for row in tensors:
        roles.setdefault(row["role"], []).append(row)
    return roles


_COLUMNS = (
    ("differing", "differing_tokens", ",.0f"),
    ("of", "compared_tokens", ",.0f"),
    ("mult_prob_error", "token_mult_prob_error", ".5f"),
    ("kl_k3", "kl_k3", ".2e"),
    ("kl_k1", "kl_k1", ".2e"),
    ("chi2", "chi2", ".2e"),
    ("largest |Δlogp|", "max_abs_logprob_diff", ".3g"),
    ("KV clamped", "kv_saturated", ".1e"),
)


def _gap_cells(gaps: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = ["preset", *(name for name, _, _ in _COLUMNS)]
    return [
        head,
        *([gap["preset"], *(format(gap[key], form) for _, key, form in _COLUMNS)] for gap in gaps),
    ]


def _gaps_text(gaps: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [f"{gap['preset']}: {gap['verdict']}" for gap in gaps]
    return "\n".join(
        ["Mismatch of a rollout against the learner", text_table(_gap_cells(gaps)), "", *verdicts]
    )


def _sources_text(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    top = max(row["alone"] for row in rows)
    lines = [
        f"Where the gap of {name} comes from (kl_k3)",
        f"{'':<14}{'alone':>10}  {'':<{_BAR}}  {'without':>10}",
    ]
    for row in rows:
        filled = round(_BAR * row["alone"] / top) if top > 0 else 0
        bar = "█" * filled + "·" * (_BAR - filled)
        without = "" if row["without"] is None else f"{row['without']:>10.2e}"
        lines.append(f"{row['source']:<14}{row['alone']:>10.2e}  {bar}  {without}".rstrip())
    return "\n".join(lines)


def _gaps_html(gaps: Sequence[Mapping[str, Any]]) -> str:
    verdicts = "".join(
        f"<p class='headline{' good' * (gap['differing_tokens'] == 0)}'>{escaped(gap['preset'])}: "
        f"{escaped(gap['verdict'])}</p>"
        for gap in gaps
    )
    return (
        "<h2>Mismatch of a rollout against the "
        f"learner</h2>{html_table(_gap_cells(gaps))}{verdicts}"
    )


def _sources_html(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [["source", "kl_k3 alone", "kl_k3 without it"]]
    cells += [
        [
            row["source"],
            f"{row['alone']:.2e}",
            "" if row["without"] is None else f"{row['without']:.2e}",
        ]
        for row in rows
    ]
    return f"<h2>Where the gap of {escaped(name)} comes from</h2>{html_table(cells)}"


def _judgement_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = ["preset", "shift / spread", "Kendall's tau", "sign flips", "weights MiB"]
    keys = ("relative_shift", "kendall_tau", "sign_flips", "mib")
    return [head, *([row["preset"], *(f"{row[key]:.4f}" for key in keys)] for row in rows)]


def _plots(tensors: Sequence[Mapping[str, Any]]) -> str:
    figures = []
    for key, title, log in (
        ("snr_db", "Signal-to-noise ratio by layer, dB", False),
        ("flushed", "Fraction flushed to zero", True),
        ("outliers", "Largest channel over the median one", True),
    ):
        series = [
            Series(role, [{"step": row["layer"], key: row[key]} for row in rows])
            for role, rows in _by_role(tensors).items()
        ]
        figures.append(draw(Panel(title, (key,), log=log, axis="layer"), series))
    return f"<h2>By layer</h2><div class='charts'>{''.join(figures)}</div>"


def _tensors_html(preset: str, tensors: Sequence[Mapping[str, Any]]) -> str:
    keys = ("snr_db", "saturated", "flushed", "outliers", "amax")
    cells = [["tensor", "layer", "dB", "saturated", "flushed", "outlier channel", "amax"]]
    cells += [
        [
            row["role"],
            str(row["layer"]),
            *("∞" if row[k] is None else f"{row[k]:.3g}" for k in keys),
        ]
        for row in tensors
    ]
    return f"<h2>Quantization under {escaped(preset)}</h2>{html_table(cells)}"

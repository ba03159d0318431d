"""The report: one HTML file that shows a run, or several side by side. Reads run directories only; imports no torch.

Self-contained: plots are inline SVG, nothing is fetched, there is no script. Completions are text of a model's: they
are escaped, and control characters are dropped.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError
from isobit.report.plots import PANELS, Series, draw, points
from isobit.report.tables import escaped, html_table
from isobit.run import COMPLETIONS, CONFIG, METRICS, read_jsonl, require_run

_SAMPLE_STEPS = 3
_LONGEST = 600
_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f23; --paper: #fdfdfc; --line: #d9d9d4; --soft: #6b6f76; --good: #2c8a55; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e3; --paper: #17181b; --line: #35373c; --soft: #9a9da4; --good: #5fc48d; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .8rem; }
.soft { color: var(--soft); } .headline { font-size: 1.05rem; margin: .6rem 0 0; } .good { color: var(--good); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; } figcaption { font-size: .9rem; font-weight: 600; } svg { width: 100%; height: auto; display:
block; } .wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; width: 100%; } th, td {
text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } pre, code { font:
.82rem/1.45 ui-monospace, monospace; } pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); }
td.text { white-space: pre-wrap; word-break: break-word; font: .82rem/1.45 ui-monospace, monospace; }
"""


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page; returns its path. Raises IsobitError if a run is missing or has no metrics."""
    runs = [_read(Path(directory)) for directory in run_dirs]
    body = [
        f"<h1>isobit: {', '.join(escaped(run.name) for run in runs)}</h1>",
        *(_headline(run, len(runs) > 1) for run in runs),
        _summary(runs),
        _plots(runs),
        *(_completions(Path(directory), run.name, len(runs) > 1) for directory, run in zip(run_dirs, runs)),
        *(_config(Path(directory), run.name, len(runs) > 1) for directory, run in zip(run_dirs, runs)),
    ]
    page = (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>isobit: {escaped(runs[0].name)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise IsobitError(f"cannot write report {out}: {error.strerror}") from None
    return out


def html_page(title: str, body: str) -> str:
    """A whole document around a body."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>isobit: {escaped(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _read(directory: Path) -> Series:
    require_run(directory)
    rows = list(read_jsonl(directory / METRICS))
    if not rows:
        raise IsobitError(f"{directory}: no step has been recorded yet, so there is nothing to report")
    return Series(directory.resolve().name, rows)


def _headline(run: Series, several: bool) -> str:
    """The one sentence that people come for."""
    _, differing = points(run.rows, "mismatch/differing_tokens")
    if not differing:
        return ""
    clean = sum(value == 0 for value in differing)
    compared = sum(points(run.rows, "mismatch/compared_tokens")[1])
    name = f"{escaped(run.name)}: " if several else ""
    total = f"{name}0 differing tokens in {clean} of {len(differing)} steps, {compared:,.0f} tokens compared"
    if clean == len(differing):
        return f"<p class='headline good'>{total}: rollout and learner computed the same bits throughout.</p>"
    _, errors = points(run.rows, "mismatch/token_mult_prob_error")
    return f"<p class='headline'>{total}; largest mean probability ratio error {max(errors):.4f}.</p>"


def _summary(runs: Sequence[Series]) -> str:
    lines = (
        ("steps", "step", "last"),
        ("reward, first", "reward/mean", "first"),
        ("reward, last", "reward/mean", "last"),
        ("held-out accuracy, first", "accuracy/held_out", "first"),
        ("held-out accuracy, last", "accuracy/held_out", "last"),
        ("differing tokens, total", "mismatch/differing_tokens", "sum"),
        ("of tokens compared", "mismatch/compared_tokens", "sum"),
        ("largest |log-probability difference|", "mismatch/max_abs_logprob_diff", "max"),
        ("rollout tokens/s, median", "throughput/rollout_tokens_per_s", "median"),
        ("seconds per step, median", "time/step", "median"),
        ("peak memory, MiB", "memory/peak_rss_mib", "max"),
        ("skipped optimizer steps", "steps/skipped", "sum"),
    )
    cells = [["", *(run.name for run in runs)]]
    for label, metric, how in lines:
        values = [_value(points(run.rows, metric)[1], how) for run in runs]
        if any(values):
            cells.append([label, *(value or "–" for value in values)])
    return f"<h2>Summary</h2>{html_table(cells)}"


def _value(values: Sequence[float], how: str) -> str:
    if not values:
        return ""
    pick = {
        "first": lambda: values[0],
        "last": lambda: values[-1],
        "sum": lambda: sum(values),
        "max": lambda: max(values),
        "median": lambda: sorted(values)[len(values) // 2],
    }
    value = pick[how]()
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def _plots(runs: Sequence[Series]) -> str:
    figures = [(panel.title, draw(panel, runs)) for panel in PANELS]
    drawn = "".join(
        f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in figures if svg is not None
    )
    return f"<h2>Over steps</h2><div class='plots'>{drawn}</div>"


def _completions(directory: Path, name: str, several: bool) -> str:
    path = directory / COMPLETIONS
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in read_jsonl(path) if path.is_file() else ():
        kept = by_step.setdefault(int(row["step"]), [])
        kept.append({key: row.get(key) for key in ("completion", "prompt", "reward", "prompt_index")})
    if not by_step:
        return ""
    steps = sorted(by_step)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})[:_SAMPLE_STEPS]
    rows = "".join(_sample_row(step, kind, sample) for step in chosen for kind, sample in _extremes(by_step[step]))
    title = f"Completions of {escaped(name)}" if several else "Completions"
    return (
        f"<h2>{title}</h2><div class='wide'><table><tr><th>step</th><th></th><th class='number'>reward</th>"
        f"<th>prompt</th><th>completion</th></tr>{rows}</table></div>"
    )


def _extremes(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    scored = [s for s in samples if s["reward"] is not None]
    if not scored:
        return [("unscored", samples[0])]
    best, worst = max(scored, key=lambda s: s["reward"]), min(scored, key=lambda s: s["reward"])
    return [("best", best), ("worst", worst)] if best["reward"] > worst["reward"] else [("all alike", best)]


def _sample_row(step: int, kind: str, sample: Mapping[str, Any]) -> str:
    reward = "none" if sample["reward"] is None else f"{sample['reward']:.3g}"
    return (
        f"<tr><td>{step}</td><td class='soft'>{kind}</td><td class='number'>{reward}</td>"
        f"<td class='text'>{escaped(_shorten(str(sample['prompt'] or '')))}</td>"
        f"<td class='text'>{escaped(_shorten(str(sample['completion'])))}</td></tr>"
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


def _config(directory: Path, name: str, several: bool) -> str:
    text = (directory / CONFIG).read_text(encoding="utf-8")
    title = f"Configuration of {escaped(name)}" if several else "Configuration"
    return f"<h2>{title}</h2><pre>{escaped(text)}</pre>"

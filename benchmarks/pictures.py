"""The pictures of README and docs, from a run of the quickstart: `python -m benchmarks.pictures`.

`quickstart.png` has three curves, `live-view.svg` the live screen at the end, `report.png` the
first tab of the report. `--recipes` draws `recipes.png` of a comparison instead. Needs matplotlib,
and for the report playwright and Chromium (Debian: `chromium`). Left out: the pictures of
experiments, which `benchmarks/experiments` draws, and of endurance, which
`tests/faults/endurance.py` draws.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image
from rich.console import Console

from isobit.monitor.report import write_report
from isobit.monitor.report.series import Line, points
from isobit.monitor.screen.screen import screen
from isobit.monitor.screen.watch import Watched
from isobit.run.directory import METRICS, read_jsonl, require_run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONFIG, RUN, DOCS = "configs/quickstart.yaml", Path("build/pictures/quickstart"), Path("docs")
PANELS = (
    ("accuracy/held_out", "Held-out accuracy, greedy", "#3fa66b"),
    ("reward/mean", "Mean reward of the rollouts", "#3b7dd8"),
    ("mismatch/differing_tokens", "Tokens that differ in any bit", "#d3506a"),
)
RECIPES = ("#555555", "#b08d00", "#d3506a", "#8a4fbf", "#e07b39", "#3fa66b", "#3b7dd8", "#20a4a4")
COLUMNS, LINES = 104, 24
REPORT_WIDTH = 1200
COLOURS = 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--run", type=Path, help=f"a finished run; without it {CONFIG} is trained")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR", help="default: docs")
    parser.add_argument("--no-report", action="store_true", help="leave out what needs Chromium")
    parser.add_argument(
        "--recipes",
        type=Path,
        metavar="JSON",
        help="comparison.json of `isobit compare`: draw recipes.png of it, and nothing else",
    )
    given = parser.parse_args()
    if given.recipes is not None:
        draw_recipes(json.loads(given.recipes.read_text()), given.out / "recipes.png")
        return
    run = given.run or RUN
    if given.run is None:
        train = ["train", CONFIG, "--redo", "--out", str(run)]
        subprocess.run([sys.executable, "-m", "isobit", *train], check=True)
    require_run(run)
    draw_curves(run, given.out / "quickstart.png")
    draw_screen(run, given.out / "live-view.svg")
    if not given.no_report:
        draw_report(run, given.out / "report.png")


def draw_curves(run: Path, out: Path) -> None:
    """Three panels over steps; the last one is flat at zero, or rollout and learner disagreed."""
    rows = list(read_jsonl(run / METRICS))
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.8), constrained_layout=True)
    for axis, (metric, title, color) in zip(axes, PANELS):
        steps, values = points(rows, metric)
        marker = "o" if len(steps) < 20 else None
        axis.plot(steps, values, color=color, linewidth=1.6, marker=marker, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        flat = metric.startswith("mismatch") and not any(values)
        axis.set_ylim(*((-1, 10) if flat else (0, 1.02)))
    figure.savefig(out, dpi=110)
    plt.close(figure)
    _fewer_colours(out)


def draw_recipes(flows: Mapping[str, Any], out: Path) -> None:
    """Draw mismatch by step and held-out accuracy by step, one line a recipe; a mismatch of exactly
    zero at every step has no place on a logarithmic axis, and the legend says so."""
    figure, (mismatch, accuracy) = plt.subplots(1, 2, figsize=(10.5, 3.9), constrained_layout=True)
    for (name, flow), color in zip(flows.items(), RECIPES):
        kl, right = (
            Line(**flow["curves"][metric]) for metric in ("mismatch/kl_k3", "accuracy/held_out")
        )
        exact = not any(kl.values)
        label = f"{name} (mismatch: exactly 0)" if exact else name
        above = kl.positive()
        mismatch.plot(above.steps, above.values, color=color, alpha=0.25, linewidth=0.8)
        smooth = above.smoothed(log=True)
        mismatch.plot(smooth.steps, smooth.values, color=color, linewidth=1.8)
        accuracy.plot(right.steps, right.values, color=color, marker="o", markersize=3, label=label)
        if right.low:
            accuracy.fill_between(right.steps, right.low, right.high, color=color, alpha=0.08)
    mismatch.set(yscale="log", title="Mismatch: KL of rollout and learner (k3)", xlabel="step")
    accuracy.set(ylim=(0, 1.02), title="Held-out accuracy, greedy", xlabel="step")
    for axis in (mismatch, accuracy):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    _fewer_colours(out)


def draw_screen(run: Path, out: Path) -> None:
    """The live screen as `isobit watch RUN` shows it, as SVG."""
    watched = Watched(run)
    watched.look()
    console = Console(
        record=True, width=COLUMNS, height=LINES, force_terminal=True, file=StringIO()
    )
    console.print(screen(watched.history, COLUMNS, LINES))
    svg = console.export_svg(title=f"isobit watch {run.name}", unique_id="live")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # the reader's fonts: no download
    svg = svg.replace("Fira Code, monospace", "ui-monospace, monospace")
    out.write_text("\n".join(map(str.rstrip, svg.splitlines())) + "\n", encoding="utf-8")


def draw_report(run: Path, out: Path) -> None:
    """The first tab of the run's report in Chromium, with light colours."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("report.png needs Chromium, which is not installed; --no-report leaves it out")
    page_path = write_report([run], run / "report.html").resolve()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": REPORT_WIDTH, "height": 600}, color_scheme="light"
        )
        page.goto(page_path.as_uri())
        page.get_by_role("tab", name="Overview").wait_for()
        page.screenshot(path=out, full_page=True)
        browser.close()
    _fewer_colours(out)


def _fewer_colours(png: Path) -> None:
    """Store a drawing with a palette: a third of the bytes, and no difference that one sees."""
    with Image.open(png) as picture:
        palette = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    palette.save(png, optimize=True)


if __name__ == "__main__":
    main()

"""Is training under FP8 as good as under BF16, within a margin? Runs paired by seed, and Student's interval.

Two runs of a pair have the same base model, prompts and random numbers, and differ in the precision flow alone. The
number of a run is the accuracy of its last checkpoint on the held-out prompts, taken twice: under the run's own flow,
and under BF16, which is what a user gets who deploys the weights elsewhere. A flow is *not inferior* where the 95 %
interval of its mean difference to the reference lies above minus the margin (Piaggio et al. 2012, JAMA 308(24), the
CONSORT statement on such trials); the margin was set before the runs.

`isobit compare CONFIG --seeds 15 --out RUNS` makes the runs;
`python -m benchmarks.experiments.non_inferiority RUNS --out FILE` evaluates their checkpoints and writes the numbers,
with `--chart PNG` also a picture; docs/experiments/non-inferiority.md shows what came out. Left out: time and memory.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.command import command, write
from isobit.commands.compare import folder_name
from isobit.errors import IsobitError
from isobit.report.comparison import DATA
from isobit.report.intervals import mean_interval

MARGIN = 0.015
VIEWS = {"own": "under its own flow", "deployed": "under BF16"}


@dataclass(frozen=True)
class Difference:
    """Of a flow to the reference, over pairs: its mean, Student's 95 % interval, and what follows under a margin."""

    mean: float
    low: float
    high: float
    margin: float

    @property
    def verdict(self) -> str:
        """Superiority is not claimed: it was not asked."""
        if self.low > -self.margin:
            return "not inferior"
        return "inferior" if self.high < -self.margin else "not decided"


def difference(flow: Sequence[float], reference: Sequence[float], margin: float = MARGIN) -> Difference:
    """Paired by seed: accuracies [seeds] of both. Raises ValueError where a run has no partner."""
    pairs = list(zip(flow, reference, strict=True))
    return Difference(*mean_interval([one - other for one, other in pairs]), margin)


def measure(runs: Path) -> dict[str, dict[str, list[float]]]:
    """Of each flow of a comparison the accuracies `own` and `deployed`, [seeds]. Raises IsobitError where `runs` is no
    comparison, or one of its runs stopped: what it would have reached is not known, and to leave it out would be unfair
    to the others."""
    path = runs / DATA
    if not path.is_file():
        raise IsobitError(f"{path}: no such file; make the runs with: isobit compare CONFIG --seeds 15 --out {runs}")
    found = {}
    for name, flow in json.loads(path.read_text(encoding="utf-8")).items():
        if flow["failures"]:
            raise IsobitError(f"{path}: a run stopped, and so cannot be paired: {flow['failures'][0]}")
        folders = [runs / folder_name(name) / f"seed-{seed}" for seed in range(len(flow["accuracy"]))]
        found[name] = {
            "own": flow["accuracy"], "deployed": [_accuracy_in_bf16(folder) for folder in folders],
            "differing_tokens": flow["differing_tokens"], "compared_tokens": flow["compared_tokens"],
        }  # fmt: skip
    return found


def _accuracy_in_bf16(run: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, "-m", "isobit", "eval", str(run), "--precision", "bf16", "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise IsobitError(f"{run}: {done.stderr.strip()}")
        summary = json.loads(out.read_text(encoding="utf-8"))["summary"]
        return float(summary["(all)"]["accuracy"]["value"])


def differences(found: dict[str, dict[str, list[float]]], reference: str) -> dict[tuple[str, str], Difference]:
    """By flow and view, of all but the reference."""
    return {
        (name, view): difference(flow[view], found[reference][view])
        for name, flow in found.items()
        for view in VIEWS
        if name != reference
    }


def table(found: dict[str, dict[str, list[float]]], reference: str) -> str:
    """A line for each flow in Markdown: mean accuracy, and the difference to the reference in points."""
    of = differences(found, reference)
    lines = ["| flow | tokens that differ | accuracy under its own flow | difference, points | | accuracy under BF16 |"]
    lines[0] += " difference, points | |"
    lines.append("|---" * 8 + "|")
    for name, flow in found.items():
        cells = [f"`{name}`", f"{sum(flow['differing_tokens']):,.0f} of {sum(flow['compared_tokens']):,.0f}"]
        for view in VIEWS:
            cells.append(f"{mean_interval(flow[view])[0]:.3f}")
            if name == reference:
                cells += ["", ""]
            else:
                d = of[name, view]
                cells += [f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]", d.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, list[float]]], reference: str, out: Path) -> None:
    """A dot for each pair, the mean with its interval over them, and the margin; both views."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in found if name != reference]
    figure, axes = plt.subplots(1, 2, figsize=(10, 1.4 + 0.6 * len(names)), sharey=True, constrained_layout=True)
    of = differences(found, reference)
    for axis, (view, title) in zip(axes, VIEWS.items(), strict=True):
        for place, name in enumerate(reversed(names)):
            pairs = zip(found[name][view], found[reference][view], strict=True)
            dots = [100 * (one - other) for one, other in pairs]
            axis.plot(dots, [place + 0.18] * len(dots), "o", color="#3b7dd8", alpha=0.45, markersize=4)
            d = of[name, view]
            bars = [[100 * (d.mean - d.low)], [100 * (d.high - d.mean)]]
            axis.errorbar([100 * d.mean], [place - 0.12], xerr=bars, fmt="s", color="#222222", capsize=4, markersize=5)
        axis.axvline(0, color="#888888", linewidth=0.8)
        axis.axvline(-100 * MARGIN, color="#c0392b", linestyle="--", linewidth=1)
        axis.set_title(f"Accuracy {title}", fontsize=10)
        axis.set_xlabel(f"points above {reference}; dashed: the margin", fontsize=9)
        axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=9)
        axis.set_ylim(-0.5, len(names) - 0.5)
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = command(__file__, __doc__)
    parser.add_argument("runs", type=Path, help="what `isobit compare` wrote")
    parser.add_argument("--reference", default="bf16", metavar="FLOW", help="default: bf16")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also draw it")
    given = parser.parse_args()
    try:
        found = measure(given.runs)
    except IsobitError as error:
        parser.error(str(error))
    if given.reference not in found:
        parser.error(f"--reference {given.reference}: the comparison has {', '.join(found)}")
    result: dict[str, Any] = {"reference": given.reference, "margin": MARGIN, "flows": found}
    write(given.out, result)
    if given.chart:
        draw(found, given.reference, given.chart)
    print(table(found, given.reference))


if __name__ == "__main__":
    main()

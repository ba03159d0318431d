"""Is training under FP8 as good as under BF16, within a margin? Runs paired by seed, and Student's
interval.

Two runs of a pair have the same base model, prompts and random numbers, and differ in the precision
flow alone. The number of a run is the accuracy of its last checkpoint on the held-out prompts,
taken twice: under the run's own flow, and under BF16, which is what a user gets who deploys the
weights elsewhere. A flow is *not inferior* to another where the interval of its mean difference
lies above minus the margin (Piaggio et al. 2012, JAMA 308(24), the CONSORT statement on such
trials); the margin was set before the runs. Where several differences are looked at, each interval
is wider by Bonferroni's rule, so that all of them together are right 95 times of 100.

`isobit compare configs/non-inferiority.yaml` makes the runs; `python -m
benchmarks.experiments.non_inferiority RUNS --out FILE` evaluates their checkpoints and writes the
numbers, with `--chart PNG` also a picture; docs/experiments/non-inferiority.md shows what came out.
Left out: time and memory.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.command import command, write
from isobit.errors import IsobitError
from isobit.monitor.report.comparison import DATA
from isobit.monitor.report.intervals import mean_interval
from isobit.training.commands.compare import folder_name

MARGIN = 0.015
VIEWS = {"own": "under its own flow", "deployed": "under BF16"}
PLAN = (
    ("fp8-unified", "bf16"),
    ("fp8[kv_cache=bf16]", "bf16"),
    ("fp8", "bf16"),
    ("fp8[kv_cache=bf16]", "fp8-unified"),
    ("fp8", "fp8[kv_cache=bf16]"),
)
"""What is compared with what: three flows with BF16, then what the scales change, then what the
cache does. Written down before the runs were evaluated."""


@dataclass(frozen=True)
class Difference:
    """Of a flow to another, over pairs: its mean, Student's interval, and what follows under a
    margin."""

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


Pair = tuple[str, str]
Found = Mapping[str, Mapping[str, Sequence[float]]]


def difference(
    flow: Sequence[float], reference: Sequence[float], margin: float = MARGIN, looks: int = 1
) -> Difference:
    """Paired by seed: accuracies [seeds] of both; `looks`: how many differences are looked at
    together. Raises ValueError where a run has no partner."""
    pairs = list(zip(flow, reference, strict=True))
    return Difference(
        *mean_interval([one - other for one, other in pairs], 1 - 0.05 / looks), margin
    )


def measure(runs: Path) -> dict[str, dict[str, list[float]]]:
    """Of each flow of a comparison the accuracies `own` and `deployed`, [seeds]. Raises IsobitError
    where `runs` is no comparison, or one of its runs stopped: what it would have reached is not
    known, and to leave it out would be unfair to the others."""
    path = runs / DATA
    if not path.is_file():
        raise IsobitError(
            f"{path}: no such file; make the runs with: isobit compare configs/non-inferiority.yaml"
        )
    found = {}
    for name, flow in json.loads(path.read_text(encoding="utf-8")).items():
        if flow["failures"]:
            raise IsobitError(
                f"{path}: a run stopped, and so cannot be paired: {flow['failures'][0]}"
            )
        folders = sorted(
            (runs / folder_name(name)).glob("seed-*"),
            key=lambda path: int(path.name[len("seed-") :]),
        )
        assert len(folders) == len(flow["accuracy"]), (
            f"{runs} also holds seeds of another comparison"
        )
        found[name] = {
            "own": flow["accuracy"], "deployed": [_accuracy_in_bf16(folder) for folder in folders],
            "differing_tokens": flow["differing_tokens"],
            "compared_tokens": flow["compared_tokens"],
        }  # fmt: skip
    return found


def _accuracy_in_bf16(run: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [
            sys.executable,
            "-m",
            "isobit",
            "eval",
            str(run),
            "--precision",
            "bf16",
            "--out",
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise IsobitError(f"{run}: {done.stderr.strip()}")
        summary = json.loads(out.read_text(encoding="utf-8"))["summary"]
        return float(summary["(all)"]["accuracy"]["value"])


def differences(
    found: Found, pairs: Sequence[Pair], views: Sequence[str] = tuple(VIEWS)
) -> dict[Pair, dict[str, Difference]]:
    """By pair and view. All that are returned are looked at together."""
    looks = len(pairs) * len(views)
    return {
        (flow, other): {
            view: difference(found[flow][view], found[other][view], looks=looks) for view in views
        }
        for flow, other in pairs
    }


def accuracies(found: Found) -> str:
    """A line for each flow in Markdown: bits, and mean accuracy in both views."""
    lines = [
        "| flow | tokens that differ | accuracy under its own flow | accuracy under BF16 |",
        "|---" * 4 + "|",
    ]
    for name, flow in found.items():
        means = " | ".join(f"{mean_interval(flow[view])[0]:.3f}" for view in VIEWS)
        differing, compared = sum(flow["differing_tokens"]), sum(flow["compared_tokens"])
        lines.append(f"| `{name}` | {differing:,.0f} of {compared:,.0f} | {means} |")
    return "\n".join(lines)


def table(found: Found, pairs: Sequence[Pair], views: Sequence[str] = tuple(VIEWS)) -> str:
    """A line for each pair in Markdown, in points."""
    columns = "".join(f" {VIEWS[view]} | |" for view in views)
    lines = [f"| flow | compared with |{columns}", "|---" * (2 + 2 * len(views)) + "|"]
    for (flow, other), of in differences(found, pairs, views).items():
        cells = [f"`{flow}`", f"`{other}`"]
        for d in of.values():
            cells += [f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]", d.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Found, pairs: Sequence[Pair], out: Path) -> None:
    """A dot for each pair of runs, the mean with its interval over them, and the margin; both
    views."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 2, figsize=(11, 1.4 + 0.6 * len(pairs)), sharey=True, constrained_layout=True
    )
    for axis, (view, title) in zip(axes, VIEWS.items(), strict=True):
        for place, ((flow, other), of) in enumerate(
            reversed(differences(found, pairs, [view]).items())
        ):
            runs = zip(found[flow][view], found[other][view], strict=True)
            dots = [100 * (one - another) for one, another in runs]
            axis.plot(
                dots, [place + 0.18] * len(dots), "o", color="#3b7dd8", alpha=0.45, markersize=4
            )
            d = of[view]
            bars = [[100 * (d.mean - d.low)], [100 * (d.high - d.mean)]]
            axis.errorbar(
                [100 * d.mean],
                [place - 0.12],
                xerr=bars,
                fmt="s",
                color="#222222",
                capsize=4,
                markersize=5,
            )
        axis.axvline(0, color="#888888", linewidth=0.8)
        axis.axvline(-100 * MARGIN, color="#c0392b", linestyle="--", linewidth=1)
        axis.set_title(f"Accuracy {title}", fontsize=10)
        axis.set_xlabel("points above what it is compared with; dashed: the margin", fontsize=9)
        names = [f"{flow}\nwith {other}" for flow, other in reversed(pairs)]
        axis.set_yticks(range(len(names)), names, fontsize=9)
        axis.set_ylim(-0.5, len(names) - 0.5)
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = command(__file__, __doc__)
    parser.add_argument("runs", type=Path, help="what `isobit compare` wrote")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also draw it")
    given = parser.parse_args()
    try:
        found = measure(given.runs)
    except IsobitError as error:
        parser.error(str(error))
    pairs = [pair for pair in PLAN if {*pair} <= found.keys()]
    if not pairs:
        parser.error(
            f"the comparison has {', '.join(found)}; expected two flows that the plan compares"
        )
    result: dict[str, Any] = {"margin": MARGIN, "pairs": pairs, "flows": found}
    write(given.out, result)
    if given.chart:
        draw(found, pairs, given.chart)
    print(
        f"{accuracies(found)}\n\n{table(found, pairs, ['own'])}\n\n"
        f"{table(found, pairs, ['deployed'])}"
    )


if __name__ == "__main__":
    main()

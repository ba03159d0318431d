"""Draw the picture of the README from a run: `python docs/plot_run.py RUN OUT.png`."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from isobit.monitor.report.series import points
from isobit.run.directory import METRICS, read_jsonl, require_run

PANELS = (
    ("accuracy/held_out", "Held-out accuracy, greedy", "#3fa66b"),
    ("reward/mean", "Mean reward of the rollouts", "#3b7dd8"),
    ("mismatch/differing_tokens", "Tokens that differ in any bit", "#d3506a"),
)


def main(run: Path, out: Path) -> None:
    """Three panels over steps; the last one is flat at zero, or the product is broken."""
    require_run(run)
    rows = list(read_jsonl(run / METRICS))
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.8), constrained_layout=True)
    for axis, (metric, title, color) in zip(axes, PANELS):
        steps, values = points(rows, metric)
        axis.plot(steps, values, color=color, linewidth=1.6, marker="o" if len(steps) < 20 else None, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(*((-1, 10) if metric.startswith("mismatch") and not any(values) else (0, 1.02)))
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

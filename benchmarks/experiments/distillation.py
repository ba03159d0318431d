"""What preference and distillation do on a small task: additions of two digits.

A small student gets about two fifths of them right, and copies an answer that its prompt shows
first. From it six runs go on, by the configs of the gallery: DPO on pairs of a right and a wrong
sum, against the student, and against a reference that follows; KTO on sums that are right or wrong;
on-policy distillation from a larger teacher; self-distillation, whose teacher is the student shown
the answer (SDFT); and self-distillation by success, whose teacher is the policy shown a completion
of the group that was right (SDPO). Measured are the curves that each should show, and greedy
accuracy on 256 problems that none has seen.

`python -m benchmarks.experiments.distillation WORK --out FILE --chart PNG` trains all in the folder
WORK; docs/experiments/preference-and-distillation.md shows what came out. Left out: other seeds, and
any claim about larger models.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from benchmarks.experiments.command import command, write
from isobit.run.directory import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
OF_ANSWERS = ("preference", "preference-following", "kto")
TAUGHT = ("distillation", "self-distillation", "self-distillation-success")
ARMS = (*OF_ANSWERS, *TAUGHT)
SUPERVISED = ("student-sft", "teacher-sft", *OF_ANSWERS)
"""By `isobit sft`; the other configs by `isobit train`."""
KEPT = (
    "accuracy/held_out",
    "reward/reference_kl",
    "groups/unshown",
    "preference/margin",
    "preference/kl",
    "preference/accuracy",
    "preference/held_out_accuracy",
    "mismatch/differing_tokens",
    "reward/mean",
)
NAMES = {
    "preference": "DPO",
    "preference-following": "DPO, reference follows",
    "kto": "KTO",
    "distillation": "on-policy distillation",
    "self-distillation": "self-distillation (SDFT)",
    "self-distillation-success": "self-distillation by success (SDPO)",
}


def run(name: str, work: Path, *changes: str) -> list[dict[str, Any]]:
    """The rows of the metrics of a config's run in WORK, made there unless it is there already."""
    metrics = work / "runs" / name.removesuffix("-sft") / "metrics.jsonl"
    if not metrics.is_file():
        (work / "runs").mkdir(parents=True, exist_ok=True)
        if not (work / "configs").exists():
            (work / "configs").symlink_to(ROOT / "configs")
        what = "sft" if name in SUPERVISED else "train"
        isobit = [sys.executable, "-m", "isobit", what, f"configs/{name}.yaml", *changes, "--quiet"]
        environment = os.environ | {"ISOBIT_CACHE": os.environ.get("ISOBIT_CACHE", str(work))}
        subprocess.run(isobit, check=True, cwd=work, env=environment)
    return list(read_jsonl(metrics))


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """[step, value] of each metric that is shown."""
    return {
        name: [[row["step"], row[name]] for row in rows if row.get(name) is not None]
        for name in KEPT
        if any(row.get(name) is not None for row in rows)
    }


def measure(work: Path, *changes: str) -> dict[str, Any]:
    """All runs: what each has by step, and the teacher's accuracy."""
    run("student-sft", work, *changes)
    teacher = run("teacher-sft", work, *changes)
    found = {name: curves(run(name, work, *changes)) for name in ARMS}
    accuracies = curves(teacher)["accuracy/held_out"]
    return {"teacher": accuracies[-1][1], "arms": found}


def table(found: Mapping[str, Any]) -> str:
    """A line for each run, in Markdown: its first and last values."""
    lines = [
        "| run | steps | accuracy before | after | reverse KL, first ten steps | last ten | margin, "
        "first step | last ten steps | held-out answers in order, after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, curve in found["arms"].items():
        accuracy = values(curve["accuracy/held_out"])
        cells = [f"{accuracy[0]:.3f}", f"{accuracy[-1]:.3f}"]
        if distances := values(curve.get("reward/reference_kl", [])):
            cells += [f"{mean(distances[:10]):.2f}", f"{mean(distances[-10:]):.2f}", "", "", ""]
        else:
            margins = values(curve["preference/margin"])
            pairs = values(curve["preference/held_out_accuracy"])
            cells += ["", "", f"{margins[0]:g}", f"{mean(margins[-10:]):.3f}", f"{pairs[-1]:.3f}"]
        steps = int(curve["accuracy/held_out"][-1][0])
        lines.append(f"| {NAMES[name]} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def values(curve: Sequence[Sequence[float]]) -> list[float]:
    """Of a curve, without the steps."""
    return [value for _, value in curve]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Accuracy of all, the reverse KL of those with a teacher, and of those that learn from given
    answers the margin and how many held-out answers are in order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((accuracy, distance), (margin, order)) = pyplot.subplots(2, 2, figsize=(11, 7.4))
    shown = {
        "reward/reference_kl": (distance, "reverse KL of a completion, nats", {}),
        "preference/margin": (margin, "margin", {}),
        "preference/held_out_accuracy": (order, "held-out answers in order", {"marker": "o"}),
    }
    for index, (name, curve) in enumerate(found["arms"].items()):
        given: dict[str, Any] = {"color": f"C{index}", "label": NAMES[name], "markersize": 3}
        accuracy.plot(*zip(*curve["accuracy/held_out"]), marker="o", **given)
        for metric, (axes, _, style) in shown.items():
            if metric in curve:
                axes.plot(*zip(*curve[metric]), **given, **style)
    accuracy.axhline(found["teacher"], color="gray", linestyle=":", label="the larger teacher")
    accuracy.set(title="held-out accuracy, greedy", xlabel="step", ylim=(0, 1.02))
    order.set(ylim=(0, 1.02))
    for axes, title, _ in shown.values():
        axes.set(title=title, xlabel="step")
    for axes in (distance, margin):
        axes.axhline(0, color="gray", linewidth=0.6)
    for axes in (accuracy, distance, margin, order):
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = command(__file__, __doc__)
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for runs")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also draw it")
    arguments = parser.parse_args()
    found = measure(arguments.work)
    write(arguments.out, found)
    if arguments.chart:
        draw(found, arguments.chart)
    print(table(found))


if __name__ == "__main__":
    main()

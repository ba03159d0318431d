"""What the experiment on long completions shows of its runs: a table by flow, one by run, and a
picture.

Left out: the runs (`sparse_long.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.monitor.report.intervals import mean_interval, proportion

ARMS = (
    ("bf16", "none"),
    ("fp8", "none"),
    ("fp8-rollout", "none"),
    ("nvfp4-rollout", "none"),
    ("bf16", "token_tis"),
    ("fp8", "token_tis"),
    ("fp8-rollout", "token_tis"),
    ("nvfp4-rollout", "token_tis"),
)
"""Flow and correction, in the order in which they are run for each seed."""


def arms_of(
    runs: Sequence[Mapping[str, Any]],
) -> dict[tuple[float, str, str], list[Mapping[str, Any]]]:
    """The runs of each rate, flow and correction, in the order of `ARMS`."""
    keys = [(rate, *arm) for rate in sorted({run["rate"] for run in runs}) for arm in ARMS]
    found = {
        key: [run for run in runs if (run["rate"], run["flow"], run["correction"]) == key]
        for key in keys
    }
    return {key: sorted(each, key=lambda run: run["seed"]) for key, each in found.items() if each}


def _mean(values: Sequence[float | None]) -> float:
    return mean_interval([value for value in values if value is not None] or [0.0])[0]


def _quarters(values: Sequence[float | None]) -> list[float]:
    """Means of the four quarters of a run."""
    return [_mean(values[i * len(values) // 4 : (i + 1) * len(values) // 4]) for i in range(4)]


def _lines(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)
    ).replace("e-0", "e-")


def _named(rate: float, flow: str, correction: str) -> list[str]:
    return [f"{rate:.0e}", f"`{flow}`", correction.replace("_", " ").replace("tis", "TIS")]


def arms_table(found: Mapping[str, Any]) -> str:
    """A line for each rate, flow and correction: how many runs survived, with Wilson's 95 %
    interval of the share, and means over the seeds."""
    names = [
        "rate",
        "flow",
        "correction",
        "survived",
        "interval",
        "accuracy: start",
        "last three",
        "kl_k3: start",
        "end",
    ]
    names += ["largest difference: start", "end", "gradient norm: first quarter", "last"]
    rows = []
    for key, runs in arms_of(found["runs"]).items():
        survived = sum(run["collapsed_at"] is None for run in runs)
        share = proportion(survived, len(runs))
        last = _mean([accuracy for run in runs for _, accuracy in run["held_out"][-3:]])
        cells = [f"{survived} of {len(runs)}", f"{share.low:.2f} to {share.high:.2f}"]
        cells += [f"{_mean([run['held_out'][0][1] for run in runs]):.2f}", f"{last:.2f}"]
        for name, form in (("kl_k3", ".1e"), ("max_abs_logprob_diff", ".2f")):
            gaps = [_mean([run["mismatch"][i][name] for run in runs]) for i in (0, -1)]
            cells += [f"{gap:{form}}" if gap else "0" for gap in gaps]
        norms = [_quarters(run["grad_norm"]) for run in runs]
        cells += [f"{_mean([each[i] for each in norms]):.2f}" for i in (0, -1)]
        rows.append([*_named(*key), *cells])
    return _lines(names, rows)


def runs_table(found: Mapping[str, Any]) -> str:
    """A line for each run: evaluations and checkpoints at every quarter, and means of the
    quarters."""
    names = [
        "rate",
        "flow",
        "correction",
        "seed",
        "collapse",
        "accuracy",
        "reward",
        "kl_k3",
        "kl_k3 of older weights",
    ]
    rows = []
    for key, runs in arms_of(found["runs"]).items():
        for one in runs:
            marks = {gap["step"] for gap in one["mismatch"]}
            accuracy = [f"{value:.2f}" for step, value in one["held_out"] if step in marks]
            cells = [
                str(one["seed"]),
                "" if one["collapsed_at"] is None else str(one["collapsed_at"]),
            ]
            cells += [
                ", ".join(accuracy),
                ", ".join(f"{value:.2f}" for value in _quarters(one["reward"])),
            ]
            cells.append(
                ", ".join(f"{gap['kl_k3']:.1e}" if gap["kl_k3"] else "0" for gap in one["mismatch"])
            )
            cells.append(", ".join(f"{value:.1e}" for value in _quarters(one["staleness_kl_k3"])))
            cells.append(", ".join(f"{value:.2f}" for value in _quarters(one["entropy"])))
            rows.append([*_named(*key), *cells])
    return _lines([*names, "entropy"], rows)


def draw(found: Mapping[str, Any], out: Path) -> None:
    """By rate and flow, where a rate has several: held-out accuracy of every run, and below it the
    distance between rollout and learner, dots at fixed weights and lines for samples of older
    weights."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    arms = arms_of(found["runs"])
    rates = [
        rate
        for rate in sorted({key[0] for key in arms})
        if len({key[1] for key in arms if key[0] == rate}) > 1
    ]
    flows = list(dict.fromkeys(arm[0] for arm in ARMS if any(key[1] == arm[0] for key in arms)))
    shape, size = (2 * len(rates), len(flows)), (2.7 * len(flows), 3.6 * len(rates))
    figure, axes = plt.subplots(
        *shape, figsize=size, sharex=True, sharey="row", constrained_layout=True, squeeze=False
    )
    for (rate, flow, correction), runs in arms.items():
        if rate not in rates:
            continue
        top, color = 2 * rates.index(rate), "#3b7dd8" if correction == "none" else "#e0903a"
        above, below = axes[top, flows.index(flow)], axes[top + 1, flows.index(flow)]
        for number, one in enumerate(runs):
            label = None if number else {"none": "no correction"}.get(correction, "token TIS")
            above.plot(*zip(*one["held_out"]), color=color, linewidth=1.2, alpha=0.8, label=label)
            below.plot(
                range(1, len(one["reward"]) + 1),
                one["staleness_kl_k3"],
                color=color,
                linewidth=0.7,
                alpha=0.6,
            )
            dots = [(gap["step"], gap["kl_k3"]) for gap in one["mismatch"] if gap["kl_k3"]]
            below.plot(
                [step for step, _ in dots], [kl for _, kl in dots], "o", color=color, markersize=3.5
            )
        above.set_title(f"{flow}, rate {rate:.0e}".replace("e-0", "e-"), fontsize=9)
        above.set_ylim(0, 1)
        above.legend(fontsize=7, loc="lower left")
        below.set_yscale("log")
    for number, row in enumerate(axes):
        row[0].set_ylabel("kl_k3" if number % 2 else "held-out accuracy", fontsize=9)
        for axis in row:
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=9)
    figure.savefig(out, dpi=100)

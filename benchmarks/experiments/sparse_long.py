"""Do runs of two engines collapse where those of one flow survive: long completions, a sparse reward, stale samples?

The prompt is five digits, and the completion goes on from them: every digit is the sum of the last one and the one
four places before it, without its tens. After `TERMS` such sums come `#` and the last three digits once more. The
reward is 1 where those three are right, else 0, so one wrong sum costs all of it. Each batch, two steps old when it is
learned from (`rollouts_ahead`), is passed over twice with four optimizer steps each.

A run *collapses* at the first evaluation from which on the held-out accuracy stays below half of what it was at the
start, to the end of the run and for at least two evaluations; a run that stops by itself has collapsed too. This rule
was set before the runs, the rates after trials with this base and another. On the ladder `bf16` without a correction
goes up until it collapses; all flows are then run at the largest rate that it survived, and with `--beyond` at the next
one, too.

`mismatch` is measured after a run on its checkpoints, at fixed weights: while a run learns from older samples its own
metrics (`staleness`) hold the distance of two engines and of two steps together.

`python -m benchmarks.experiments.sparse_long WORK --out FILE` runs what is not in FILE yet, under WORK, and prints a
table; docs/experiments/sparse-long.md shows what came out. Left out: other models, tasks, objectives and corrections.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.experiments.command import command, write
from isobit import Model, Sampling, resume, train
from isobit.errors import RunFailed
from isobit.inspection.mismatch import measure_gap
from isobit.report.intervals import mean_interval, proportion
from isobit.run.directory import read_jsonl

START, LAG = 5, 5
"""Digits of a prompt; a digit is the sum of the last one and the one `LAG` before itself."""
ARMS = (
    ("bf16", "none"),
    ("fp8", "none"),
    ("fp8-rollout", "none"),
    ("fp8-rollout", "token_tis"),
    ("nvfp4-rollout", "none"),
    ("nvfp4-rollout", "token_tis"),
    ("fp8-rollout-kv", "none"),
    ("bf16", "token_tis"),
)
"""Flow and correction, in the order in which they are run for each seed."""
LADDER = (2e-5, 4e-5, 8e-5, 1.6e-4)
SERIES = {
    "reward": "reward/mean",
    "staleness_kl_k3": "staleness/kl_k3",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "clip_fraction": "clip_fraction",
    "length": "length/mean",
}
"""Of every step of a run: what is kept, and its name in metrics.jsonl."""


@dataclass(frozen=True)
class Size:
    """How large runs are; what is kept of them with their numbers."""

    terms: int = 120
    hidden: int = 64
    base_steps: int = 600
    steps: int = 80
    prompts: int = 8
    group: int = 8
    evaluate_every: int = 10
    held_out: int = 256
    measured: int = 32

    @property
    def new_tokens(self) -> int:
        """A right completion's, and one: `#`, three digits and the end come after the sums."""
        return self.terms + 6


@dataclass(frozen=True)
class Job:
    """One run."""

    flow: str
    correction: str
    rate: float
    seed: int

    @property
    def folder(self) -> str:
        flow = re.sub(r"[^A-Za-z0-9.]+", "-", self.flow).strip("-")
        return f"{flow}-{self.correction}-{self.rate:g}-seed-{self.seed}"


def problem(digits: Sequence[int], terms: int) -> dict[str, str]:
    """A prompt, its right completion, and the answer that is rewarded."""
    row = list(digits)
    for _ in range(terms):
        row.append((row[-1] + row[-LAG]) % 10)
    text = "".join(map(str, row))
    return {"prompt": text[:START], "completion": f"{text[START:]}#{text[-3:]}", "answer": text[-3:]}


def write_data(work: Path, size: Size) -> None:
    """train.jsonl and held_out.jsonl, which have no prompt in common."""
    numbers = random.Random(0).sample(range(10**START), 20_000)
    rows = [json.dumps(problem([int(digit) for digit in f"{n:0{START}d}"], size.terms)) + "\n" for n in numbers]
    work.mkdir(parents=True, exist_ok=True)
    (work / "held_out.jsonl").write_text("".join(rows[: size.held_out]), encoding="utf-8")
    (work / "train.jsonl").write_text("".join(rows[size.held_out :]), encoding="utf-8")


def base_config(work: Path, size: Size) -> dict[str, Any]:
    """Of `isobit sft`, for the base that all runs share; the reward is there for its evaluation. A constant rate: bases
    from a fast one are brittle (docs/log.md)."""
    shape = {"hidden_size": size.hidden, "intermediate_size": 3 * size.hidden, "num_layers": 2, "num_heads": 4}
    shape |= {"head_dim": 32, "max_positions": 256}
    return {
        "model": {"init": {"family": "qwen3", **shape, "vocabulary": "0123456789#"}},
        "task": {"path": str(work / "train.jsonl")},
        "precision": "bf16",
        "optimizer": {"learning_rate": 6e-4, "warmup_steps": 20, "betas": [0.9, 0.99], "micro_batch_tokens": 4096},
        "steps": size.base_steps,
        "batch_size": 32,
    }  # fmt: skip


def run_config(work: Path, size: Size, job: Job) -> dict[str, Any]:
    """Of `isobit train`."""
    return {
        "model": {"sft": str(work / "base.yaml")},
        "task": {"path": str(work / "train.jsonl"), "held_out_path": str(work / "held_out.jsonl")},
        "rewards": {"functions": [{"function": "exact_match", "options": {"extract": r"#(\d{3})$"}}]},
        "precision": job.flow,
        "prompts_per_step": size.prompts,
        "rollouts_ahead": 2,
        "sampling": {"group_size": size.group, "max_new_tokens": size.new_tokens},
        "algorithm": {"preset": "grpo", "correction": job.correction, "updates_per_batch": 4, "epochs": 2},
        "optimizer": {
            "learning_rate": job.rate, "warmup_steps": 10, "betas": [0.9, 0.999], "micro_batch_tokens": 4096,
        },
        "evaluation": {"every": size.evaluate_every, "samples": size.held_out, "keep_best": False},
        "run": {
            "dir": str(work / "runs" / job.folder), "checkpoint_every": 2 * size.evaluate_every, "keep_last": 1000,
            "quantization_every": 0, "completions": "none", "check_memory": False, "report": False,
        },
        "steps": size.steps,
        "seed": job.seed,
    }  # fmt: skip


def perform(work: Path, size: Size, job: Job) -> dict[str, Any]:
    """The run, resumed where it was begun, and what is kept of it."""
    config, stopped = run_config(work, size, job), ""
    try:
        begun = Path(config["run"]["dir"], "config.yaml").is_file()
        if (resume(config["run"]["dir"]) if begun else train(config)).exit_code:
            raise KeyboardInterrupt
    except RunFailed as failure:
        stopped = str(failure)
    folder = Path(config["run"]["dir"])
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    held_out = [[int(row["step"]), row["accuracy/held_out"]] for row in rows if "accuracy/held_out" in row]
    series = {name: [_rounded(row.get(key)) for row in rows if row["step"] > 0] for name, key in SERIES.items()}
    gaps = mismatch(work, size, job.flow, folder)
    found = {**asdict(job), "held_out": held_out, "stopped": stopped, "mismatch": gaps, **series}
    return {**found, "collapsed_at": collapse(held_out, stopped, len(series["reward"]))}


def _rounded(value: float | None) -> float | None:
    """To four digits, which are more than any of them is known to."""
    return None if value is None else float(f"{value:.4g}")


def mismatch(work: Path, size: Size, flow: str, run: Path) -> list[dict[str, float]]:
    """Of each checkpoint: the distance between rollout and learner on completions of held-out prompts."""
    rows = (work / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[: size.measured]
    sampling = Sampling(n=1, max_new_tokens=size.new_tokens, seed=0)
    found = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        step = int(folder.name.removeprefix("step-"))
        if step % (2 * size.evaluate_every) and step != size.steps:
            continue  # a run was interrupted there
        gap = measure_gap(Model.load(folder, flow), flow, [json.loads(row)["prompt"] for row in rows], sampling).metrics
        kept = {name: _rounded(gap[name]) for name in ("kl_k3", "max_abs_logprob_diff", "differing_tokens")}
        found.append({"step": step, **kept})
    return found


def collapse(held_out: Sequence[Sequence[float]], stopped: str, last: int) -> int | None:
    """The step of a run's collapse, by the rule above, or None: of evaluations [step, accuracy]."""
    below = [accuracy < held_out[0][1] / 2 for _, accuracy in held_out]
    lasting = next((i for i in range(len(below)) if all(below[i:])), len(below))
    if lasting < len(below) - 1:
        return int(held_out[lasting][0])
    return last if stopped else None


def ladder(runs: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """(the largest rate that `bf16` without a correction survived with seed 0, the next one, at which it collapsed)."""
    survived = None
    for rate in LADDER:
        one = next((run for run in runs if Job(*ARMS[0], rate, 0) == _job(run)), None)
        if one is None:
            return survived, None
        if one["collapsed_at"] is not None:
            return survived, rate
        survived = rate
    return survived, None


def _job(run: Mapping[str, Any]) -> Job:
    return Job(run["flow"], run["correction"], run["rate"], run["seed"])


def planned(runs: Sequence[Mapping[str, Any]], seeds: int, beyond: bool, arms: Sequence[tuple[str, str]]) -> Job | None:
    """The next run that is not there yet: the ladder first, then all arms for one seed after the other."""
    done = {_job(run) for run in runs}
    survived, failed = ladder(runs)
    if failed is None and (left := [rate for rate in LADDER if Job(*ARMS[0], rate, 0) not in done]):
        return Job(*ARMS[0], left[0], 0)
    rates = [rate for rate in (survived, failed if beyond else None) if rate is not None]
    wanted = (Job(*arm, rate, seed) for rate in rates for seed in range(seeds) for arm in arms)
    return next((job for job in wanted if job not in done), None)


def run(
    work: Path, size: Size, runs: list[dict[str, Any]], seeds: int, beyond: bool, arms: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Add to `runs` those that are missing, one after the other."""
    write_data(work, size)
    (work / "base.yaml").write_text(json.dumps(base_config(work, size)), encoding="utf-8")  # which YAML contains
    while (job := planned(runs, seeds, beyond, arms)) is not None:
        runs.append(perform(work, size, job))
        yield runs[-1]


def arms_of(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[float, str, str], list[Mapping[str, Any]]]:
    """The runs of each rate, flow and correction, in the order of `ARMS`."""
    keys = [(rate, *arm) for rate in sorted({run["rate"] for run in runs}) for arm in ARMS]
    found = {key: [run for run in runs if (run["rate"], run["flow"], run["correction"]) == key] for key in keys}
    return {key: sorted(each, key=lambda run: run["seed"]) for key, each in found.items() if each}


def _mean(values: Sequence[float | None]) -> float:
    return mean_interval([value for value in values if value is not None] or [0.0])[0]


def _quarters(values: Sequence[float | None]) -> list[float]:
    """Means of the four quarters of a run."""
    return [_mean(values[i * len(values) // 4 : (i + 1) * len(values) // 4]) for i in range(4)]


def _lines(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)).replace("e-0", "e-")


def _named(rate: float, flow: str, correction: str) -> list[str]:
    return [f"{rate:g}", f"`{flow}`", correction.replace("_", " ").replace("tis", "TIS")]


def arms_table(found: Mapping[str, Any]) -> str:
    """A line for each rate, flow and correction: how many runs survived, with Wilson's 95 % interval of the share, and
    means over the seeds."""
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
    """A line for each run: evaluations and checkpoints at every quarter, and means of the quarters."""
    names = ["rate", "flow", "correction", "seed", "collapse", "accuracy", "reward", "kl_k3", "kl_k3 of older weights"]
    rows = []
    for key, runs in arms_of(found["runs"]).items():
        for one in runs:
            marks = {gap["step"] for gap in one["mismatch"]}
            accuracy = [f"{value:.2f}" for step, value in one["held_out"] if step in marks]
            cells = [str(one["seed"]), "" if one["collapsed_at"] is None else str(one["collapsed_at"])]
            cells += [", ".join(accuracy), ", ".join(f"{value:.2f}" for value in _quarters(one["reward"]))]
            cells.append(", ".join(f"{gap['kl_k3']:.1e}" if gap["kl_k3"] else "0" for gap in one["mismatch"]))
            cells.append(", ".join(f"{value:.1e}" for value in _quarters(one["staleness_kl_k3"])))
            cells.append(", ".join(f"{value:.2f}" for value in _quarters(one["entropy"])))
            rows.append([*_named(*key), *cells])
    return _lines([*names, "entropy"], rows)


def draw(found: Mapping[str, Any], out: Path) -> None:
    """By rate and flow, where a rate has several: held-out accuracy of every run, and below it the distance between
    rollout and learner, dots at fixed weights and lines for samples of older weights."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    arms = arms_of(found["runs"])
    rates = [rate for rate in sorted({key[0] for key in arms}) if len({key[1] for key in arms if key[0] == rate}) > 1]
    flows = list(dict.fromkeys(arm[0] for arm in ARMS if any(key[1] == arm[0] for key in arms)))
    shape, size = (2 * len(rates), len(flows)), (2.7 * len(flows), 3.6 * len(rates))
    figure, axes = plt.subplots(*shape, figsize=size, sharex=True, sharey="row", constrained_layout=True, squeeze=False)
    for (rate, flow, correction), runs in arms.items():
        if rate not in rates:
            continue
        top, color = 2 * rates.index(rate), "#3b7dd8" if correction == "none" else "#e0903a"
        above, below = axes[top, flows.index(flow)], axes[top + 1, flows.index(flow)]
        for number, one in enumerate(runs):
            label = None if number else {"none": "no correction"}.get(correction, "token TIS")
            above.plot(*zip(*one["held_out"]), color=color, linewidth=1.2, alpha=0.8, label=label)
            below.plot(range(1, len(one["reward"]) + 1), one["staleness_kl_k3"], color=color, linewidth=0.7, alpha=0.6)
            dots = [(gap["step"], gap["kl_k3"]) for gap in one["mismatch"] if gap["kl_k3"]]
            below.plot([step for step, _ in dots], [kl for _, kl in dots], "o", color=color, markersize=3.5)
        above.set_title(f"{flow}, rate {rate:g}", fontsize=9)
        above.set_ylim(0, 1)
        above.legend(fontsize=7, loc="upper right")
        below.set_yscale("log")
    for number, row in enumerate(axes):
        row[0].set_ylabel("kl_k3" if number % 2 else "held-out accuracy", fontsize=9)
        for axis in row:
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=9)
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = command(__file__, __doc__, "JSON; runs that are in it are not done again")
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for data and runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each flow and correction")
    parser.add_argument("--beyond", action="store_true", help="also at the first rate at which bf16 collapses")
    names = {":".join(arm): arm for arm in ARMS}
    parser.add_argument("--arm", action="append", choices=list(names), help="may be given several times; default: all")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also draw it")
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default: {value}")
    given = parser.parse_args()
    size = replace(Size(), **{name: getattr(given, name) for name in asdict(Size())})
    found = {"size": asdict(size), "runs": []}
    if given.out.is_file():
        found = json.loads(given.out.read_text(encoding="utf-8"))
        if found["size"] != asdict(size):
            parser.error(f"{given.out} has runs of another size: {found['size']}")
    arms = [names[name] for name in given.arm or names]
    for _ in run(given.work, size, found["runs"], given.seeds, given.beyond, arms):
        write(given.out, found)
    if given.chart:
        draw(found, given.chart)
    print(arms_table(found), runs_table(found), sep="\n\n")


if __name__ == "__main__":
    main()

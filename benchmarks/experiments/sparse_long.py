"""Do runs of two engines collapse where those of one flow survive: long completions, a sparse reward, stale samples?

The prompt is five digits, and the completion goes on from them: every digit is the sum of the last one and the one
four places before it, without its tens. After `TERMS` such sums come `#` and the last three digits once more. The
reward is 1 where those three are right, else 0, so one wrong sum costs all of it. Each batch, two steps old when it is
learned from (`rollouts_ahead`), is passed over twice with four optimizer steps each.

A run *collapses* at the first evaluation from which on the held-out accuracy stays below half of what it was at the
start, to the end of the run and for at least two evaluations; a run that stops by itself has collapsed too. This rule,
and the ladder of rates, were set before the runs. On the ladder `bf16` without a correction goes up until it collapses;
all flows are then run at the largest rate that it survived, and with `--beyond` at the next one, too.

`mismatch` is measured after a run on its checkpoints, at fixed weights: while a run learns from older samples its own
metrics (`staleness`) hold the distance of two engines and of two steps together.

`python -m benchmarks.experiments.sparse_long WORK --out FILE` runs what is not in FILE yet, under WORK, and prints a
table; docs/experiments/sparse-long.md shows what came out. Left out: other models, tasks, objectives and corrections.
"""

import json
import random
import re
import time
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
    ("nvfp4-rollout", "none"),
    ("fp8-rollout", "token_tis"),
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
    config, stopped, began = run_config(work, size, job), "", time.monotonic()
    try:
        begun = Path(config["run"]["dir"], "config.yaml").is_file()
        if (resume(config["run"]["dir"]) if begun else train(config)).exit_code:
            raise KeyboardInterrupt
    except RunFailed as failure:
        stopped = str(failure)
    seconds, folder = time.monotonic() - began, Path(config["run"]["dir"])
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    held_out = [[int(row["step"]), row["accuracy/held_out"]] for row in rows if "accuracy/held_out" in row]
    series = {name: [_rounded(row.get(key)) for row in rows if row["step"] > 0] for name, key in SERIES.items()}
    gaps = mismatch(work, size, job.flow, folder)
    found = {**asdict(job), "held_out": held_out, "stopped": stopped, "mismatch": gaps, **series}
    return {**found, "collapsed_at": collapse(held_out, stopped, len(rows) - 1), "seconds": round(seconds)}


def _rounded(value: float | None) -> float | None:
    """To four digits, which are more than any of them is known to."""
    return None if value is None else float(f"{value:.4g}")


def mismatch(work: Path, size: Size, flow: str, run: Path) -> list[dict[str, float]]:
    """Of each checkpoint: the distance between rollout and learner on completions of held-out prompts."""
    rows = (work / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[: size.measured]
    sampling = Sampling(n=1, max_new_tokens=size.new_tokens, seed=0)
    found = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        gap = measure_gap(Model.load(folder, flow), flow, [json.loads(row)["prompt"] for row in rows], sampling).metrics
        kept = {name: _rounded(gap[name]) for name in ("kl_k3", "max_abs_logprob_diff", "differing_tokens")}
        found.append({"step": int(folder.name.removeprefix("step-")), **kept})
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


def table(found: Mapping[str, Any]) -> str:
    """A line for each rate, flow and correction in Markdown."""
    names = ["rate", "flow", "correction", "survived", "95 % interval", "held-out accuracy: start", "end"]
    names += [
        "kl_k3 of a checkpoint: first",
        "last",
        "largest difference",
        "gradient norm: first ten steps",
        "last ten",
    ]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for rate, flow, correction in sorted(
        {(run["rate"], run["flow"], run["correction"]) for run in found["runs"]},
        key=lambda each: (each[0], [arm[0] for arm in ARMS].index(each[1]), each[2]),
    ):
        runs = [r for r in found["runs"] if (r["rate"], r["flow"], r["correction"]) == (rate, flow, correction)]
        lines.append(f"| {rate:g} | `{flow}` | {correction.replace('_', ' ')} | {' | '.join(_cells(runs))} |")
    return "\n".join(lines).replace("e-0", "e-")


def _cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the seeds of an arm."""
    survived = sum(run["collapsed_at"] is None for run in runs)
    share = proportion(survived, len(runs))

    def mean(values: Sequence[float | None]) -> float:
        return mean_interval([value for value in values if value is not None])[0]

    starts, ends = (mean([run["held_out"][i][1] for run in runs]) for i in (0, -1))
    gaps = [f"{mean([run['mismatch'][i]['kl_k3'] for run in runs]):.1e}" for i in (0, -1)]
    largest = max(gap["max_abs_logprob_diff"] for run in runs for gap in run["mismatch"])
    norms = [mean([x for run in runs for x in run["grad_norm"][part]]) for part in (slice(10), slice(-10, None))]
    cells = [f"{survived} of {len(runs)}", f"{share.low:.2f} to {share.high:.2f}", f"{starts:.2f}", f"{ends:.2f}"]
    return [*cells, *gaps, f"{largest:.2f}", *(f"{norm:.2f}" for norm in norms)]


def draw(found: Mapping[str, Any], out: Path) -> None:
    """Held-out accuracy of every run over its steps: a row for each rate, a column for each flow, both corrections."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({run["rate"] for run in found["runs"]})
    flows = [flow for flow in dict.fromkeys(arm[0] for arm in ARMS) if any(r["flow"] == flow for r in found["runs"])]
    size = (2.5 * len(flows), 0.6 + 2.2 * len(rates))
    figure, axes = plt.subplots(
        len(rates), len(flows), figsize=size, sharex=True, sharey=True, constrained_layout=True, squeeze=False
    )
    for row, rate in zip(axes, rates, strict=True):
        for axis, flow in zip(row, flows, strict=True):
            for correction, color in (("none", "#3b7dd8"), ("token_tis", "#e0903a")):
                runs = [r for r in found["runs"] if (r["rate"], r["flow"], r["correction"]) == (rate, flow, correction)]
                for number, one in enumerate(runs):
                    label = {"label": correction.replace("_", " ")} if not number else {}
                    axis.plot(*zip(*one["held_out"], strict=True), color=color, linewidth=1.2, alpha=0.8, **label)
            axis.set_title(f"{flow}, rate {rate:g}", fontsize=9)
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=9)
    for row in axes:
        row[0].set_ylabel("held-out accuracy", fontsize=9)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = command(__file__, __doc__, "JSON; runs that are in it are not done again")
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for data and runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each flow and correction")
    parser.add_argument("--beyond", action="store_true", help="also at the first rate at which bf16 collapses")
    parser.add_argument("--flow", action="append", choices=sorted({arm[0] for arm in ARMS}), help="default: all")
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
    arms = [arm for arm in ARMS if given.flow is None or arm[0] in given.flow]
    for _ in run(given.work, size, found["runs"], given.seeds, given.beyond, arms):
        write(given.out, found)
    if given.chart:
        draw(found, given.chart)
    print(table(found))


if __name__ == "__main__":
    main()

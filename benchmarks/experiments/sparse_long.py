"""Do runs of two engines collapse where those of one flow survive: long completions, a sparse
reward, stale samples?

The prompt is five digits, and the completion goes on from them: every digit is the sum of the last
one and the one four places before it, without its tens. After `TERMS` such sums come `#` and the
last three digits once more. The reward is 1 where those three are right, else 0, so one wrong sum
costs all of it. Each batch, two steps old when it is learned from (`rollouts_ahead`), is passed
over twice with four optimizer steps each.

A run *collapses* at the first evaluation from which on the held-out accuracy stays below half of
what it was at the start, to the end of the run and for at least two evaluations; a run that stops
by itself has collapsed too. This rule was set before the runs, the rates after trials with this
base and another. On the ladder `bf16` without a correction goes up until it collapses; all flows
are then run at the largest rate that it survived, or at those of `--rate`.

`mismatch` is measured after a run on its checkpoints, at fixed weights: while a run learns from
older samples its own metrics (`staleness`) hold the distance of two engines and of two steps
together.

`python -m benchmarks.experiments.sparse_long WORK --out FILE` runs what is not in FILE yet, under
WORK, and prints a table; the same line in a second process takes the runs that the first has not
begun. docs/experiments/sparse-long.md shows what came out. Left out: other models, tasks,
objectives and corrections.
"""

import fcntl
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.experiments.command import command, write
from benchmarks.experiments.sparse_long_tables import ARMS, arms_table, draw, runs_table
from isobit import Model, Sampling, resume, train
from isobit.errors import IsobitError, RunFailed
from isobit.evaluation.inspection.mismatch import measure_gap
from isobit.run.directory import Lock, read_jsonl

START, LAG = 5, 5
"""Digits of a prompt; a digit is the sum of the last one and the one `LAG` before itself."""
LADDER = (2e-5, 5e-5, 1e-4, 2e-4)
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
    steps: int = 100
    prompts: int = 32
    group: int = 16
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


@dataclass(frozen=True)
class Wanted:
    """Which runs there should be; without rates, at the one that the ladder finds."""

    seeds: int = 3
    arms: tuple[tuple[str, str], ...] = ARMS
    rates: tuple[float, ...] = ()


def problem(digits: Sequence[int], terms: int) -> dict[str, str]:
    """A prompt, its right completion, and the answer that is rewarded."""
    row = list(digits)
    for _ in range(terms):
        row.append((row[-1] + row[-LAG]) % 10)
    text = "".join(map(str, row))
    return {
        "prompt": text[:START],
        "completion": f"{text[START:]}#{text[-3:]}",
        "answer": text[-3:],
    }


def write_data(work: Path, size: Size) -> None:
    """train.jsonl and held_out.jsonl, which have no prompt in common."""
    numbers = random.Random(0).sample(range(10**START), 20_000)
    rows = [
        json.dumps(problem([int(digit) for digit in f"{n:0{START}d}"], size.terms)) + "\n"
        for n in numbers
    ]
    work.mkdir(parents=True, exist_ok=True)
    (work / "held_out.jsonl").write_text("".join(rows[: size.held_out]), encoding="utf-8")
    (work / "train.jsonl").write_text("".join(rows[size.held_out :]), encoding="utf-8")


def base_config(work: Path, size: Size) -> dict[str, Any]:
    """Of `isobit sft`, for the base that all runs share; the reward is there for its evaluation. A
    constant rate: bases from a fast one are brittle (docs/log.md)."""
    shape = {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_layers": 2,
        "num_heads": 4,
    }
    shape |= {"head_dim": 32, "max_positions": 256}
    return {
        "model": {"init": {"family": "qwen3", **shape, "vocabulary": "0123456789#"}},
        "task": {"path": str(work / "train.jsonl")},
        "precision": "bf16",
        "optimizer": {"learning_rate": 6e-4, "warmup_steps": 20, "betas": [0.9, 0.99],
            "micro_batch_tokens": 4096},
        "steps": size.base_steps,
        "batch_size": 32,
    }  # fmt: skip


def run_config(work: Path, size: Size, job: Job) -> dict[str, Any]:
    """Of `isobit train`."""
    return {
        "model": {"sft": str(work / "base.yaml")},
        "task": {"path": str(work / "train.jsonl"), "held_out_path": str(work / "held_out.jsonl")},
        "rewards": {"functions": [{"function": "exact_match",
            "options": {"extract": r"#(\d{3})$"}}]},
        "precision": job.flow,
        "prompts_per_step": size.prompts,
        "rollouts_ahead": 2,
        "sampling": {"group_size": size.group, "max_new_tokens": size.new_tokens},
        "algorithm": {"preset": "grpo", "correction": job.correction, "updates_per_batch": 4,
            "epochs": 2},
        "optimizer": {
            "learning_rate": job.rate, "warmup_steps": 10, "betas": [0.9, 0.999],
            "micro_batch_tokens": 4096,
        },
        "evaluation": {"every": size.evaluate_every, "samples": size.held_out, "keep_best": False},
        "run": {
            "dir": str(work / "runs" / job.folder), "checkpoint_every": 2 * size.evaluate_every,
            "keep_last": 1000,
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
    held_out = [
        [int(row["step"]), row["accuracy/held_out"]] for row in rows if "accuracy/held_out" in row
    ]
    series = {
        name: [_rounded(row.get(key)) for row in rows if row["step"] > 0]
        for name, key in SERIES.items()
    }
    gaps = mismatch(work, size, job.flow, folder)
    found = {**asdict(job), "held_out": held_out, "stopped": stopped, "mismatch": gaps, **series}
    return {**found, "collapsed_at": collapse(held_out, stopped, len(series["reward"]))}


def _rounded(value: float | None) -> float | None:
    """To four digits, which are more than any of them is known to."""
    return None if value is None else float(f"{value:.4g}")


def mismatch(work: Path, size: Size, flow: str, run: Path) -> list[dict[str, float]]:
    """Of each checkpoint: the distance between rollout and learner on completions of held-out
    prompts."""
    rows = (work / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[: size.measured]
    sampling = Sampling(n=1, max_new_tokens=size.new_tokens, seed=0)
    found = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        step = int(folder.name.removeprefix("step-"))
        if step % (2 * size.evaluate_every) and step != size.steps:
            continue  # a run was interrupted there
        gap = measure_gap(
            Model.load(folder, flow), flow, [json.loads(row)["prompt"] for row in rows], sampling
        ).metrics
        kept = {
            name: _rounded(gap[name])
            for name in ("kl_k3", "max_abs_logprob_diff", "differing_tokens")
        }
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
    """(the largest rate that `bf16` without a correction survived with seed 0, the next one, at
    which it collapsed)."""
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


def missing(runs: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[Job]:
    """The runs that are not there yet, in their order: the ladder's next one, then all arms for one
    seed after the other, at the given rates, or at the largest that the ladder's runs survived once
    these are all there."""
    done = {_job(run) for run in runs}
    survived, failed = ladder(runs)
    rungs = [Job(*ARMS[0], rate, 0) for rate in LADDER if failed is None]
    left = [job for job in rungs if job not in done][:1]
    known = survived is not None and not left
    rates = wanted.rates or ((survived,) if known else ())
    arms = [
        Job(*arm, rate, seed)
        for rate in rates
        for seed in range(wanted.seeds)
        for arm in wanted.arms
    ]
    return left + [job for job in arms if job not in done and job not in left]


@contextmanager
def claimed(work: Path, job: Job) -> Iterator[bool]:
    """Whether a run is this process's, until it ends; False where another has it."""
    place = work / "claims" / job.folder
    place.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock(place)
    except IsobitError:
        yield False
        return
    with closing(lock):
        yield True


def read(out: Path, size: Size) -> dict[str, Any]:
    """What is in the file; raises ValueError where it has runs of another size."""
    found: dict[str, Any] = {"size": asdict(size), "runs": []}
    if out.is_file():
        found = json.loads(out.read_text(encoding="utf-8"))
    if found["size"] != asdict(size):
        raise ValueError(f"{out} has runs of another size: {found['size']}")
    return found


def add(out: Path, size: Size, one: Mapping[str, Any]) -> None:
    """A run to those in the file, to which another process may be adding."""
    with out.with_name(f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = read(out, size)
        found["runs"].append(one)
        write(out, found)


def run(work: Path, size: Size, out: Path, wanted: Wanted) -> None:
    """Do the runs that are missing in `out` and that no other process has begun."""
    write_data(work, size)
    (work / "base.yaml").write_text(
        json.dumps(base_config(work, size)), encoding="utf-8"
    )  # which YAML contains
    while any(
        _take(work, size, out, wanted, job) for job in missing(read(out, size)["runs"], wanted)
    ):
        pass


def _take(work: Path, size: Size, out: Path, wanted: Wanted, job: Job) -> bool:
    """Do one run, unless another process has it or has just ended it."""
    with claimed(work, job) as mine:
        if not mine or job not in missing(read(out, size)["runs"], wanted):
            return False
        add(out, size, perform(work, size, job))
        return True


def main() -> None:
    parser = command(__file__, __doc__, "JSON; runs that are in it are not done again")
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for data and runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each flow and correction")
    parser.add_argument(
        "--rate", type=float, action="append", help="of all flows; may be given several times"
    )
    names = {":".join(arm): arm for arm in ARMS}
    parser.add_argument(
        "--arm",
        action="append",
        choices=list(names),
        help="may be given several times; default: all",
    )
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also draw it")
    for name, value in asdict(Size()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help=f"default: {value}"
        )
    given = parser.parse_args()
    size = replace(Size(), **{name: getattr(given, name) for name in asdict(Size())})
    arms = tuple(names[name] for name in given.arm or names)
    try:
        read(given.out, size)
    except ValueError as error:
        parser.error(str(error))
    run(given.work, size, given.out, Wanted(given.seeds, arms, tuple(given.rate or ())))
    found = read(given.out, size)
    if given.chart:
        draw(found, given.chart)
    print(arms_table(found), runs_table(found), sep="\n\n")


if __name__ == "__main__":
    main()

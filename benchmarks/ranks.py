"""Several ranks on one machine: what they send, and what they cost, as ratios measured side by
side.

    python -m benchmarks ranks

Bytes: gradients and weights that every rank sends in a step, over gloo, beside a model of them.
Seconds: a step of one rank that a launcher has started, over one that nobody has; of two ranks with
one thread each, over one with two; and of the ordered exchange of gradients between two processes,
over a library's all_reduce of as many bytes. Contestants take turns, so a ratio means more than a
time.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from benchmarks import rewards
from benchmarks.common import Claim, Result, Row, race, row
from benchmarks.models import save_model
from benchmarks.steps import open_run
from isobit import Model
from isobit.distributed import ALONE, Ranks, Shards
from isobit.distributed.exchange import GradientSum, buckets
from isobit.distributed.launch import joined
from isobit.precision.flow import LINEAR_LAYERS
from isobit.rl import OptimizerSettings, Sample, for_precision
from isobit.rl.algorithm.objective import OBJECTIVES
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.run.directory import read_jsonl
from isobit.training.loop import training_step

SIZES = (2, 3, 4)
SAMPLES, PROMPT, COMPLETION, MICRO = (
    10,
    3,
    5,
    2,
)  # of a learner's step: samples, tokens of each, samples a micro-batch
EXCHANGED = (32, 256)  # MiB
BLOCK = 128


@dataclass(frozen=True)
class Bytes:
    """What a rank sends to others in a step."""

    gradients: int
    weights: int


@dataclass(frozen=True)
class Ratio:
    """A ratio of seconds, and the least and the largest of the turns; at most `target`, if there is
    one."""

    what: str
    value: float
    least: float
    largest: float
    target: float | None = None

    @staticmethod
    def of(
        what: str, above: Sequence[float], below: Sequence[float], target: float | None = None
    ) -> "Ratio":
        """The median over the turns."""
        turns = [a / b for a, b in zip(above, below, strict=True)]
        return Ratio(what, median(turns), min(turns), max(turns), target)


@dataclass
class Found(Result):
    """A benchmark's result with its ratios."""

    ratios: list[Ratio] = field(default_factory=list)

    def print(self) -> None:
        super().print()
        print(table([asdict(each) for each in self.ratios]))

    def write(self, folder: Path) -> Path:
        path = super().write(folder)
        content = json.loads(path.read_text()) | {"ratios": [asdict(each) for each in self.ratios]}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path


def table(ratios: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| seconds of | ratio | least and largest | target |", "|---|---|---|---|"]
    for each in ratios:
        missed = "" if each["target"] is None or each["value"] <= each["target"] else ": missed"
        target = "none" if each["target"] is None else f"at most {each['target']:g}{missed}"
        lines.append(
            f"| {each['what']} | {each['value']:.3f} | {each['least']:.3f} to "
            f"{each['largest']:.3f} | {target} |"
        )
    return "\n".join(lines)


def run(rounds: int) -> Found:
    result = Found("ranks")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, experts in (("dense", 0), ("mixture of experts", 4)):
            model = save_model(folder / label, 256, 2, 512, 64, experts)
            for size in SIZES:
                off = max(
                    abs(a - b) for pair in _ranks(size, "bytes", str(model)) for a, b in zip(*pair)
                )
                what = (
                    f"bytes that a rank sends in a step and the model's, {label}, {size} "
                    "ranks, largest difference"
                )
                result.claims.append(Claim(what, off, "<=", 0))
        small = save_model(folder / "small", 128, 4, 64, 64)
        _add(
            result,
            "a step of one launched rank over one that is alone",
            _overhead(small, rounds),
            1.02,
        )
        large = save_model(folder / "large", 512, 4, 512, 64)
        _add(
            result,
            "a step of two ranks with a thread each over one with two",
            _pairs(folder, large, rounds),
            1.25,
        )
        for mib in EXCHANGED:
            seconds = _ranks(2, "exchange", str(mib), str(rounds))[0]
            _add(
                result,
                f"the ordered exchange of {mib} MiB between two ranks over all_reduce",
                seconds,
            )
    return result


def _add(
    result: Found, what: str, seconds: Sequence[Sequence[float]], target: float | None = None
) -> None:
    """The seconds of two contestants, turn by turn."""
    above, below = seconds
    result.rows += [row(what, "numerator", list(above)), row(what, "denominator", list(below))]
    result.ratios.append(Ratio.of(what, above, below, target))


def _ranks(size: int, *arguments: str) -> list[Any]:
    """What each of `size` processes found, by rank, with a thread each."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "found.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = [sys.executable, *launcher, "-m", "benchmarks.ranks", str(out), *arguments]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=_ROOT)
        found: list[Any] = json.loads(out.read_text())
    return found


_ROOT = Path(__file__).resolve().parents[1]


def main(out: str, part: str, *arguments: str) -> None:
    """One rank's part."""
    with joined(120) as ranks:
        if part == "bytes":
            own = measured_bytes(ranks, arguments[0]), modelled_bytes(ranks, arguments[0])
            found: Any = [list(asdict(each).values()) for each in own]
        elif part == "overhead":
            found = _overhead_of(ranks, Path(arguments[0]), int(arguments[1]))
        else:
            found = _exchange_of(ranks, int(arguments[0]), int(arguments[1]))
        of_all = ranks.all_gather_json(found)
        if ranks.first:
            Path(out).write_text(json.dumps(of_all))


def measured_bytes(ranks: Any, directory: str | Path) -> Bytes:
    """Of a step of the learner and the sync after it; `ranks` counts `bytes_sent`."""
    model = Model.load(directory, "fp8", ranks=ranks)
    optimizer = ShardedOptimizer(
        model.named_parameters(), OptimizerSettings(), model.transformer.masters.shards
    )
    objective = for_precision(OBJECTIVES["grpo"], model.precision, stale=False)
    tokens = MICRO * (PROMPT + COMPLETION)
    learner = Learner(model, optimizer, objective, micro_batch_tokens=tokens)
    began = ranks.bytes_sent
    learner.learn(_samples(model.weights_version), [(-1.0) ** i for i in range(SAMPLES)], 0)
    learned = ranks.bytes_sent
    model.sync()
    return Bytes(learned - began, ranks.bytes_sent - learned)


def _samples(version: int) -> list[Sample]:
    return [
        Sample(
            prompt_index=i // 2,
            sample_index=i % 2,
            prompt_ids=tuple(range(1, 1 + PROMPT)),
            completion_ids=tuple(5 + (i + j) % 50 for j in range(COMPLETION)),
            rollout_logprobs=(-4.0,) * COMPLETION,
            completion="",
            truncated=False,
            weights_version=version,
        )
        for i in range(SAMPLES)
    ]


def modelled_bytes(ranks: Ranks, directory: str | Path) -> Bytes:
    """The same from shapes alone. Gradients: in a round, each rank that has a micro-batch sends,
    for each bucket, to every other rank that owns some of it, those rows in FP32 and a number for
    each master. Weights: a rank sends its rows to all others; a code is a byte and the scale of a
    block four, what is not quantized has two, a router four."""
    shapes = {
        name: tuple(leaf.shape) for name, leaf in Model.load(directory).named_parameters().items()
    }
    shards = Shards.of(shapes, ranks)
    own, others = ranks.rank, [rank for rank in range(ranks.size) if rank != ranks.rank]
    numbers = 0
    for names in buckets(list(shapes)):
        for other in others:
            count = sum(shards.count(name, other) for name in names)
            numbers += count + len(names) if count else 0
    rounds = sum(micro % ranks.size == own for micro in range(-(-SAMPLES // MICRO)))
    weights = sum(
        _stored_bytes(name, shards.own_shape(name)) for name in shapes if shards.owned(name)
    )
    return Bytes(4 * numbers * rounds, weights * len(others))


def _stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    kind = name.rpartition(".")[2]
    if kind in LINEAR_LAYERS:
        return math.prod(shape) + 4 * math.prod(-(-side // BLOCK) for side in shape)
    return math.prod(shape) * (4 if kind == "router" else 2)


def _overhead(model: Path, rounds: int) -> list[list[float]]:
    found: list[list[float]] = _ranks(1, "overhead", str(model), str(4 * rounds))[0]
    return found


def _overhead_of(ranks: Ranks, model: Path, rounds: int) -> list[list[float]]:
    """Seconds of steps of a run on these ranks, and of one that is alone in the same process, in
    turns."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        steps = {}
        for label, those in (("launched", ranks), ("alone", ALONE)):
            folder = Path(name) / label
            folder.mkdir()
            session = open_run(folder, model, "fp8", stack, ranks=those)
            steps[label] = lambda session=session: training_step(session)
        return _turns(steps, rounds)


def _turns(contestants: dict[str, Any], rounds: int) -> list[list[float]]:
    """Seconds of each contestant, turn by turn."""
    turns: list[list[Row]] = [race("", contestants, 1, warmup=0) for _ in range(rounds + 1)]
    return [[turn[place].median_s for turn in turns[1:]] for place in range(len(contestants))]


def _pairs(folder: Path, model: Path, rounds: int) -> list[list[float]]:
    """Seconds of a step of two ranks and of one: of runs in turns, the median of the steps after
    the first."""
    seconds: list[list[float]] = [[], []]
    for turn in range(-(-rounds // 2)):
        for place, size in enumerate((2, 1)):
            directory = folder / f"of {size}, {turn}"
            _train(folder, model, directory, size)
            steps = [line["time/step"] for line in read_jsonl(directory / "metrics.jsonl")]
            seconds[place].append(median(steps[1:]))
    return seconds


def _train(folder: Path, model: Path, directory: Path, size: int) -> None:
    """A run of 16 prompts x 8 completions of 8 tokens on `size` ranks that have two threads
    together."""
    values = {
        "model": {"path": str(model)},
        "task": {"name": "arithmetic", "options": {"digits": 3}},
        "rewards": {"functions": [{"function": f"{rewards.__file__}:digits"}]},
        "precision": "fp8",
        "prompts_per_step": 16,
        "sampling": {"group_size": 8, "max_new_tokens": 8, "ignore_eos": True},
        "optimizer": {"micro_batch_tokens": 256},
        "run": {"dir": str(directory), "checkpoint_every": 0, "report": False},
        "steps": 3,
        "ranks": size,
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "isobit", "train", str(config)]
    threads = {"OMP_NUM_THREADS": str(2 // size)}
    subprocess.run(command, check=True, env=os.environ | threads, stdout=subprocess.DEVNULL)


def _exchange_of(ranks: Ranks, mib: int, rounds: int) -> list[list[float]]:
    """Seconds of the sum of two micro-batches' gradients by the ordered exchange, messages and
    additions included, and by one all_reduce of as many bytes."""
    shapes = dict.fromkeys(
        ("embed", *(f"layers.{layer}.o" for layer in range(7))), (1024, 256 * mib // 8)
    )
    gradients = [torch.randn(shape) for shape in shapes.values()]
    leaves = {
        name: torch.zeros(()).expand(shape).requires_grad_() for name, shape in shapes.items()
    }
    shards = Shards.of(shapes, ranks)
    parameters = {name: torch.nn.Parameter(torch.zeros(shards.own_shape(name))) for name in shapes}
    total = GradientSum(leaves, parameters, shards)
    buffer = torch.cat([each.view(-1) for each in gradients])

    def exchange() -> None:
        total.begin()
        with total.round(0, ranks.size):
            for leaf, gradient in zip(reversed(leaves.values()), gradients):
                leaf.backward(gradient)
        total.finish()

    def all_reduce() -> Tensor:
        dist.all_reduce(buffer)
        return buffer.mul_(0.5)  # so that it stays finite

    return _turns({"exchange": exchange, "all_reduce": all_reduce}, rounds)


if __name__ == "__main__":
    main(*sys.argv[1:])

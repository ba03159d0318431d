"""Ranks that hold one model together: the memory of each beside its plan, and the bytes that a
forward of the rollout receives beside their formula.

    python -m benchmarks divided

Two steps of GRPO of a random dense model of 123 million parameters under fp8, in processes of one
thread over gloo. Memory is the peak of what is resident, beyond what was when Python and its
libraries were there, of the rank with the most. Bytes are counted where they come in
(`RowOps.bytes_received`); the formula knows the model's sizes alone. No second is measured: ranks
share this machine's cores.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Claim, Result
from benchmarks.memory_plan import written
from benchmarks.models import save_model
from isobit import Model
from isobit.config import load_config
from isobit.distributed import Ranks
from isobit.distributed.launch import joined
from isobit.distributed.layout import Layout
from isobit.kernels import Layout as Rows
from isobit.kernels import get_ops
from isobit.model.divided.by_rows import layout_of, rollout_model
from isobit.training.loop import training_loop
from isobit.training.plan import job_of, plan
from isobit.training.plan.host import this_machine
from isobit.training.plan.memory import PYTHON, MemoryPlan
from isobit.training.train import open_run

SIZES = (1, 2, 4)
_TOKENS, _NEW, _PROMPT = 48, 24, 4
_ROOT = Path(__file__).resolve().parents[1]


def run(rounds: int) -> Result:
    result = Result("divided")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", 768, 16, 1024)
        config = written(folder, _NEW)
        job = job_of(load_config(config), this_machine(get_ops()), _PROMPT)
        for size in SIZES:
            peak = max(_ranks(folder, size, "train", str(config)))
            planned = _beyond_python(plan(job.on(size).together(size)))
            what = (
                f"{size} together: {planned >> 20} MiB planned, {peak >> 20} MiB measured, the "
                "larger over the smaller"
            )
            ratio = max(planned, peak) / min(planned, peak)
            result.claims.append(Claim(what, ratio, "<=", 1.15))
        for size in SIZES[1:]:
            counted = _ranks(folder, size, "bytes", str(folder / "model"))
            for rank, (received, formula) in enumerate(counted):
                what = (
                    f"bytes of a token that rank {rank} of {size} receives, {received / _TOKENS:,.0f}"
                    ", and the formula's"
                )
                result.claims.append(Claim(what, abs(received - formula), "<=", 0))
    return result


def bytes_received(layout: Layout, layers: int, rank: int) -> int:
    """The bytes of a token that a rank receives in a forward under fp8, without the head: columns
    before and behind the products that need all of them, and a row of the embedding of each other
    rank. Codes have a byte and a scale of four for 128 of them, what is not quantized two."""
    hidden = layout.shapes["embed"][1]
    total = 2 * hidden * (layout.size - 1)
    for role in ("o", "down"):
        name = f"layers.0.{role}"
        columns = [width for r, width in enumerate(layout.columns(name) or ()) if r != rank]
        rows = sum(hi - lo for lo, hi in layout.rows(name, rank))
        total += layers * (sum(width + 4 * -(-width // 128) for width in columns))
        total += layers * 2 * (hidden - rows)
    return total


def _ranks(folder: Path, size: int, *arguments: str) -> list[Any]:
    """What each of `size` processes found, by rank, with a thread each."""
    out = folder / "found.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [sys.executable, *launcher, "-m", "benchmarks.divided", str(out), *arguments]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=_ROOT)
    found: list[Any] = json.loads(out.read_text())
    return found


def _beyond_python(planned: MemoryPlan) -> int:
    return planned.total - dict(planned.held).get(PYTHON, 0)


def _trained(ranks: Ranks, config: str) -> int:
    """The peak of this process's resident memory beyond what it has now, in bytes."""
    empty = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    directory = Path(config).parent / f"run-{ranks.size}"
    given = [f"divided={ranks.size}", f"run.dir={directory}"]
    with open_run(load_config(config, given), quiet=True, ranks=ranks) as opened:
        training_loop(opened)
        opened.finish()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - empty


def counted(ranks: Ranks, path: str) -> tuple[int, int]:
    """The bytes that a rank received for some tokens, and those of the formula."""
    model = Model.load(path, "fp8", ranks=ranks, divided=ranks.size)
    transformer, config = rollout_model(model).transformer, model.config
    operators: Any = transformer.ops["rollout"]
    before = operators.bytes_received
    transformer.hidden(torch.arange(_TOKENS), Rows.packed([_TOKENS]), use="rollout")
    token = bytes_received(layout_of(config, ranks.size), config.num_layers, ranks.rank)
    return operators.bytes_received - before, _TOKENS * token


def main(out: str, part: str, path: str) -> None:
    """One rank's part."""
    with joined(600) as ranks:
        found = _trained(ranks, path) if part == "train" else counted(ranks, path)
        every = ranks.all_gather_json(found)
        if ranks.first:
            Path(out).write_text(json.dumps(every))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compiles every kernel of the benchmarks' models before one runs, on all processors at once, into
the shared cache.

Compiled when first launched, by one process at a time, they would take minutes of a lease. The
launches are recorded as in `benchmarks/kernel_table.py`, and Triton compiles what it would compile
for them (`JITFunction.warmup`), so that the launch finds it. Each is loaded too: one that wants
more shared memory than the GPU has is found here. The check's kernels come first, then those that
most models have. A machine that is new to the script has none: what another compiled is carried
there (`kernel_cache.py`), and a mark in the cache says that nothing is left to compile.

`python -m benchmarks.gpu.compiling INDEX COUNT` is one worker: it compiles every COUNTth kernel,
and prints a line of JSON for each.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cross_compile import kernel_name
from benchmarks.gpu import adapters, bits, comparing, kernel_cache
from benchmarks.gpu.common import Bench, described
from benchmarks.gpu.results import digests
from benchmarks.gpu.shapes import SHAPES
from benchmarks.kernel_table import META, launches, signature
from isobit.kernels import get_ops
from isobit.kernels.backends import self_check
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.gpu import find_gpu, versions
from isobit.kernels.product.triton import product as product_module
from isobit.kernels.triton.launch import KernelLaunch, record_launches, target

MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-1.7B", "Qwen3-30B-A3B")
PRESETS = ("fp8", "bf16", "fp8-unified")
_MOST_WORKERS = 14  # each has a context on the GPU, of half a gigabyte


def code(side: str) -> str:
    """A name for what is compiled: of the source, the versions, the architecture, and the sides of
    the rows."""
    gpu = find_gpu()
    found = versions() | {"gpu": "none" if gpu is None else gpu.architecture}
    known = [*digests().values(), *found.values(), side, Path(__file__).read_text()]
    return hashlib.sha256(" ".join(known).encode()).hexdigest()[:16]


def run(bench: Bench) -> None:
    """One case, on every machine that has not all of them; a row for every kernel that failed, and
    one for all."""
    _open_gpu()
    with bench.case("kernels of real models") as case:
        start = time.perf_counter()
        count = 1 if bench.rehearsal else min(_MOST_WORKERS, os.cpu_count() or 2)
        found, whole = _by_workers(count, bench)
        for line in found:
            if "failure" in line:
                case.failures.append(
                    {"contestant": f"{line['kernel']} {line['constants']}", **line["failure"]}
                )
        case.row(
            "compiled", time.perf_counter() - start, kernels=len(found), workers=count, whole=whole,
            seconds_of_all=sum(line["took_s"] for line in found),
        )  # fmt: skip
        if not found:
            raise RuntimeError("no worker has compiled anything: see what it printed")
        if whole and not bench.rehearsal:
            kernel_cache.mark(code(self_check.side())).touch()


def _by_workers(count: int, bench: Bench) -> tuple[list[dict[str, Any]], bool]:
    """What all of them have done in the stage's time, and whether that is all; a rehearsal lists
    the kernels, and compiles none."""
    command = [sys.executable, "-m", "benchmarks.gpu.compiling"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    listed = ["--list"] if bench.rehearsal else []
    workers = [
        subprocess.Popen(
            [*command, str(i), str(count), *listed],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    lines: list[dict[str, Any]] = []
    whole = True
    for worker in workers:
        try:
            out, _ = worker.communicate(timeout=300 if bench.rehearsal else max(bench.left_s, 1))
        except subprocess.TimeoutExpired:  # what is left is compiled when it is launched
            worker.kill()
            out, _ = worker.communicate()
        whole &= worker.returncode == 0
        lines += [
            json.loads(line)
            for line in out.splitlines()
            if line.startswith("{") and line.endswith("}")
        ]
    return lines, whole


def distinct() -> list[KernelLaunch]:
    """One launch of every kernel that Triton compiles for itself, in an order that is the same in
    every process."""
    _open_gpu()
    first: dict[tuple[object, ...], KernelLaunch] = {}
    for launch in (*_check(), *_models(), *_tiles(), *_adapters()):
        first.setdefault((*signature(launch), *_alignments(launch)), launch)
    return list(first.values())


def _open_gpu() -> None:
    """Its tiles, and the sides of the rows, in this process."""
    if find_gpu() is not None:
        get_ops("triton")


def _alignments(launch: KernelLaunch) -> Iterator[bool]:
    """Of tensors in memory, which others are like: whether a kernel may load 16 bytes at once."""
    for value in launch.arguments:
        if isinstance(value, torch.Tensor):
            yield value.is_meta or value.data_ptr() % 16 == 0


def _check() -> list[KernelLaunch]:
    """The check of a first start; nothing is computed, so that what it finds means nothing."""
    with record_launches() as found:
        self_check.failures(TritonOps("bitwise", "recorded", torch.device("cpu")), target().fp8)
    return found


def _models() -> Iterator[KernelLaunch]:
    for name in MODELS:
        for preset in PRESETS:
            yield from (launch for _, launch in launches(SHAPES[name], preset))


def _tiles() -> list[KernelLaunch]:
    """The products of the stage `bits` by every tile."""
    ops = TritonOps("bitwise", "recorded", META)
    with record_launches() as found:
        for outputs, inputs in bits.sizes_of({name: SHAPES[name] for name in bits.MODELS}).values():
            for kind in ("fp8", "bf16"):
                x, w = comparing.operands(kind, bits.ROWS_OF_TILES, outputs, inputs, ops)
                firsts = bits.TOKENS_FIRST if kind == "fp8" else ()
                tiles = [*((tile, False) for tile in bits.TILES), *((t, True) for t in firsts)]
                for tile, tokens_first in tiles:
                    with bits.forced(tile, tokens_first):
                        product_module.product(x, w, None, torch.float32)
    return found


def _adapters() -> list[KernelLaunch]:
    """Several adapters at once, and each alone, of the stage `bits`."""
    with record_launches() as found:
        adapters.launched(TritonOps("bitwise", "recorded", META))
    return found


def compile_all(chosen: list[KernelLaunch]) -> Iterator[dict[str, object]]:
    """Compile each as its launch would (`isobit.kernels.triton.launch.launch`); what fails says
    why."""
    for launch in chosen:
        start = time.perf_counter()
        constants = {name: str(value) for name, value in launch.constants.items()}
        line: dict[str, object] = {"kernel": kernel_name(launch), "constants": constants}
        try:
            made = launch.kernel.warmup(
                *launch.arguments, grid=launch.grid, **launch.constants, num_warps=launch.num_warps,
                num_stages=launch.num_stages, enable_fp_fusion=False,
            )  # fmt: skip
            if torch.cuda.is_available():
                made._init_handles()  # as a launch does first
        except Exception as error:  # of a compiler, anything
            line["failure"] = described(error)
        yield line | {"took_s": time.perf_counter() - start}


def main() -> None:
    index, count = (int(word) for word in sys.argv[1:3])
    chosen = distinct()[index::count]
    for line in _listed(chosen) if "--list" in sys.argv else compile_all(chosen):
        print(json.dumps(line), flush=True)


def _listed(chosen: list[KernelLaunch]) -> Iterator[dict[str, object]]:
    yield from ({"kernel": kernel_name(launch), "took_s": 0.0} for launch in chosen)


if __name__ == "__main__":
    main()

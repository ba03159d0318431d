"""NVIDIA's compute-sanitizer over every kernel of a small model: addresses, races in shared memory,
barriers.

`python -m benchmarks.gpu.sanitizer` is the program that it watches: prefill, decoding and a
learner's backward of a model with the real widths of heads and blocks, one layer, experts beside.
PyTorch's cache of memory is off, so that a read beyond a tensor is one beyond an allocation.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import torch

from benchmarks.gpu.common import Bench, Case, random_model, run_limited
from benchmarks.gpu.decode import decode_step
from benchmarks.gpu.shapes import SHAPES
from isobit.kernels import Layout
from isobit.model import Experts

TOOLS = ("memcheck", "racecheck", "synccheck")
PROGRAM = "compute-sanitizer"
_KEPT = 40
_ERROR_STATUS = 86
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


def run(bench: Bench) -> None:
    """A case for every tool; missing where there is no such program."""
    program = shutil.which(PROGRAM)
    for tool in TOOLS[:1] if bench.rehearsal else TOOLS:
        if not bench.wants(tool):
            continue
        if program is None and not bench.rehearsal:
            bench.miss(tool, f"{PROGRAM} is not on this machine")
            continue
        with bench.case(tool) as case:
            _watch(case, tool, program, bench)


def _watch(case: Case, tool: str, program: str | None, bench: Bench) -> None:
    watched = [
        sys.executable,
        "-m",
        "benchmarks.gpu.sanitizer",
        *(["--rehearse"] if bench.rehearsal else []),
    ]
    options = ["--tool", tool, "--error-exitcode", str(_ERROR_STATUS), "--print-limit", "20"]
    command = watched if program is None else [program, *options, *watched]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.perf_counter()
    limit = 300 if bench.rehearsal else max(bench.left_s, 30)
    done = run_limited(
        command, limit, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = done.stdout.splitlines()
    summary = _SUMMARY.findall(done.stdout)
    found = [line for line in lines if line.startswith("=========")][:_KEPT]
    clean = done.returncode == 0 and (program is None or bool(summary))
    case.row(
        tool, time.perf_counter() - start, holds=clean, exit_status=done.returncode,
        summary=summary,
        found=found, tail=[] if clean else lines[-_KEPT:],
    )  # fmt: skip


def watched(rehearsal: bool) -> None:
    """Every kernel of a rollout and of a learner's step, once."""
    dense = replace(SHAPES["Qwen3-0.6B"], num_layers=1, vocab_size=1000)
    experts = replace(
        SHAPES["Qwen3-30B-A3B"], num_layers=1, vocab_size=1000, experts=Experts(4, 2, 768)
    )
    lengths, batch, context = [130, 70, 1], 3, 300
    if rehearsal:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
        }
        dense = replace(dense, vocab_size=64, **sizes)
        experts = replace(experts, vocab_size=64, experts=Experts(4, 2, 32), **sizes)
        lengths, batch, context = [3, 2], 2, 20
    for config in (dense, experts):
        for preset in ("fp8",) if rehearsal else ("fp8", "bf16"):
            model = random_model(config, preset)
            decode_step(model, batch, context)()
            layout = Layout.packed(lengths).to(model.ops.device)
            tokens = torch.arange(sum(lengths), device=model.ops.device) % config.vocab_size
            hidden = model.transformer.hidden(tokens, layout)
            logprobs = model.transformer.head_logprobs(hidden, tokens.roll(-1))[0]
            logprobs.sum().backward()
            if not bool((logprobs < 0).any()):
                raise RuntimeError("there are no log-probabilities: the kernels compute nothing")
            model.sync()
            model.ops.raise_faults()
    if not rehearsal:
        torch.cuda.synchronize()


if __name__ == "__main__":
    watched("--rehearse" in sys.argv[1:])

"""Where a step's time goes on the GPU: the seconds and launches of every kernel by its grid, of a
decode step and of a learner's forward and backward, by preset.

PyTorch's profiler says when each kernel began and ended. A few layers of a large model are enough,
since the others run the same kernels. Kernels that are launched by Python one by one leave the GPU
idle between them, so the sum here is what a captured step takes, not an eager one. Left out: what
runs on the host, and counters of the hardware (`ncu` reads those).
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import Bench, Case, random_model, shapes
from benchmarks.gpu.decode import decode_step
from benchmarks.gpu.learner import forward_backward
from isobit.kernels import Layout
from isobit.model import ModelConfig

_MODEL, _LAYERS = "Qwen3-8B", 4
_PRESETS = ("fp8", "bf16")
_DECODED = ((512, 1024), (64, 1024), (64, 8192))
_LEARNED = (8, 2048)
_CALLS = 3
_MOST = 40  # rows of a case; what is beyond them is one more
_Call = Callable[[], object]


def run(bench: Bench) -> None:
    """A case for each part of a step, by preset."""
    models = shapes(bench)
    name = next(iter(models)) if bench.rehearsal else _MODEL
    config = models[name] if bench.rehearsal else replace(models[name], num_layers=_LAYERS)
    shown = f"{name}, {config.num_layers} layers"
    for preset in _PRESETS[:1] if bench.rehearsal else _PRESETS:
        for what, make in _parts(config, preset, bench).items():
            case_name = f"{shown}, {what}, {preset}"
            if bench.wants(case_name):
                with bench.case(case_name) as case:
                    _profile(case, make(), bench)


def _parts(config: ModelConfig, preset: str, bench: Bench) -> dict[str, Callable[[], _Call]]:
    """What is profiled, and what makes it."""
    decoded, (sequences, length) = ((2, 20),), (1, 3)
    if not bench.rehearsal:
        decoded, (sequences, length) = _DECODED, _LEARNED

    def decoding(batch: int, context: int) -> _Call:
        return decode_step(random_model(config, preset, trained=False), batch, context)

    def learning() -> _Call:
        return forward_backward(random_model(config, preset), Layout.packed([length] * sequences))

    found: dict[str, Callable[[], _Call]] = {
        f"decoding, batch {batch}, context {context}": lambda b=batch, c=context: decoding(b, c)  # type: ignore[misc]
        for batch, context in decoded
    }
    return found | {f"learning, {sequences} x {length} tokens": learning}


def _profile(case: Case, call: _Call, bench: Bench) -> None:
    """A row for every kernel and grid, most seconds first; their sum."""
    call()  # compiles
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU] if bench.rehearsal else [activity.CUDA]
    calls = 1 if bench.rehearsal else _CALLS
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(calls):
            call()
        if not bench.rehearsal:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    found = by_kernel(events, "cpu_op" if bench.rehearsal else "kernel")
    total = sum(seconds for seconds, _ in found.values()) / calls
    if total == 0:
        raise RuntimeError("the profiler has seen no kernel")
    case.row("all kernels", total, launches=sum(n for _, n in found.values()) / calls)
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    for (kernel, grid), (seconds, count) in ordered[:_MOST]:
        each = seconds / calls
        case.row(
            kernel[:80], each, grid=grid, launches=count / calls, of_all=round(each / total, 4)
        )
    if rest := ordered[_MOST:]:
        case.row("the others", sum(seconds for _, (seconds, _) in rest) / calls, kinds=len(rest))


def by_kernel(
    events: list[dict[str, Any]], category: str
) -> dict[tuple[str, tuple[int, ...]], tuple[float, int]]:
    """(seconds, launches) by name and grid, of a trace in Chrome's format, whose times are in
    microseconds. What copies and fills memory is counted by its name."""
    found: dict[tuple[str, tuple[int, ...]], tuple[float, int]] = {}
    for event in events:
        if event.get("cat") in (category, "gpu_memcpy", "gpu_memset") and "dur" in event:
            key = (event["name"], tuple(event.get("args", {}).get("grid", ())))
            seconds, count = found.get(key, (0.0, 0))
            found[key] = (seconds + event["dur"] / 1e6, count + 1)
    return found

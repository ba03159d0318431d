"""How many kernels a layer launches, by phase: those of a model of two layers less those of a model of one.

The model runs on PyTorch's meta device; Triton's launches are recorded, and PyTorch's own operators counted one each,
but for those that launch nothing (views and allocations). A stable sort is one here and several kernels on a GPU.
Products of a backward are Triton's in this count, where a GPU takes cuBLAS's, one launch as well.

`python -m benchmarks.launch_count --out DIR` writes launches.json and prints the table; a file that is there keeps its
first counts, as `before`. Must not run where TRITON_INTERPRET is set.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cross_compile import kernel_name
from benchmarks.gpu.shapes import SHAPES
from benchmarks.kernel_table import META, _store
from isobit.kernels import Layout
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.triton.launch import record_launches
from isobit.model import ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.transformer import Transformer
from isobit.precision import precision_from

MODELS = ("Qwen3-8B", "Qwen3-30B-A3B")
PRESETS = ("fp8", "bf16")
PHASES = ("decode", "forward", "backward")
DECODED, LEARNED = 64, 8192
_NOTHING = {"alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select", "slice",
            "split", "t", "transpose", "unbind", "unsqueeze", "view", "new_empty_strided"}  # fmt: skip
_AUTOGRAD = {"copy_"}  # of a gradient that this mode keeps a reference of; without it autograd takes it as it is


class _Counting(TorchDispatchMode):
    """Counts operators that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).split(".")[1]
        self.found[name] += name not in _NOTHING | _AUTOGRAD
        return function(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> Counter[str]:
    """Launches of a call by kernel: Triton's by module and function, PyTorch's as `torch.NAME`."""
    with record_launches() as found, _Counting() as counting:
        call()
    ours = Counter(kernel_name(launch) for launch in found)
    return ours + Counter({f"torch.{name}": count for name, count in counting.found.items()})


def of_model(config: ModelConfig, preset: str, layers: int) -> dict[str, Counter[str]]:
    """Launches by phase of a model of so many layers, without its output head."""
    config = replace(config, num_layers=layers, windows=(config.windows * layers)[:layers])
    shapes = parameter_shapes(config)
    masters = {name: torch.empty(shape, device=META).requires_grad_() for name, shape in shapes.items()}
    with record_launches():
        transformer = Transformer(config, precision_from(preset), TritonOps("bitwise", "counted", META), masters)
    pages = 256
    table = torch.arange(DECODED * pages, dtype=torch.int32).view(DECODED, pages)
    layout, packed = Layout.build([1] * DECODED, [4000] * DECODED, table, 16), Layout.packed([LEARNED // 4] * 4)
    stores = [_store(transformer, layout) for _ in range(layers)]
    decoded, learned = (torch.empty(rows, dtype=torch.int64, device=META) for rows in (DECODED, LEARNED))
    results: list[torch.Tensor] = []
    with torch.no_grad():
        decode = counted(lambda: transformer.hidden(decoded, layout, stores, "rollout"))
    forward = counted(lambda: results.append(transformer.hidden(learned, packed)))
    return {"decode": decode, "forward": forward, "backward": counted(lambda: results[0].sum().backward())}


def counts(models: Sequence[str] = MODELS, presets: Sequence[str] = PRESETS) -> dict[str, dict[str, dict[str, int]]]:
    """Launches a layer by "MODEL PRESET", phase and kernel."""
    found = {}
    for name in models:
        for preset in presets:
            two, one = of_model(SHAPES[name], preset, 2), of_model(SHAPES[name], preset, 1)
            found[f"{name} {preset}"] = {phase: dict(sorted((two[phase] - one[phase]).items())) for phase in PHASES}
    return found


def table(kept: Mapping[str, Any]) -> str:
    """A line for each model and phase in Markdown: launches by Triton and by PyTorch, before and now."""
    lines = ["| a layer of | phase | before: Triton, PyTorch | now: Triton, PyTorch |", "|---|---|---|---|"]
    for model in kept["now"]:
        for phase in PHASES:
            before, now = (_sums(kept[when][model][phase]) for when in ("before", "now"))
            lines.append(f"| {model} | {phase} | {before[0]}, {before[1]} | {now[0]}, {now[1]} |")
    return "\n".join(lines)


def _sums(launched: Mapping[str, int]) -> tuple[int, int]:
    torch_s = sum(count for name, count in launched.items() if name.startswith("torch."))
    return sum(launched.values()) - torch_s, torch_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_count", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write launches.json there")
    arguments = parser.parse_args()
    now = counts()
    path = None if arguments.out is None else arguments.out / "launches.json"
    before = json.loads(path.read_text(encoding="utf-8"))["before"] if path is not None and path.exists() else now
    kept = {"before": before, "now": now}
    print(table(kept))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How many bytes of memory a layer reads and writes a token, kernel by kernel, against the least
possible. Needs no GPU.

A layer runs on PyTorch's meta device, where nothing is computed and every launch is recorded. What
a kernel reads and what it writes is taken from its IR, each tensor whole and once: so this counts
what has to cross memory if nothing is read twice, whatever caches do. PyTorch's own operators are
counted likewise. *Least* are the matrix products and attention alone, with their operands and
results: all that stands between them could at best be done by them, on the way in or out.

`python -m benchmarks.layer_bytes --out DIR` writes layer_bytes.json there and prints the table;
what the file has as "before" stays. Must not run where TRITON_INTERPRET is set.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.counts import before_and_now
from benchmarks.cross_compile import kernel_name, triton_ir
from benchmarks.gpu.shapes import SHAPES
from benchmarks.kernel_table import META, signature
from isobit.kernels import KVStore, Layout
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.triton.launch import KernelLaunch, record_launches
from isobit.model import ModelConfig
from isobit.model.forward.accumulate_grad import adding_in_place
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.transformer import Transformer
from isobit.precision import precision_from

MODELS = (("Qwen3-8B", "fp8"), ("Qwen3-8B", "bf16"), ("Qwen3-30B-A3B", "fp8"))
PHASES = {"decode": 64, "forward": 8192, "backward": 8192}
"""Rows of each: sequences that decode one token, and a learner's micro-batch."""
_LEAST = re.compile(r"(product|experts)\..*product|experts\..*weight_gradient|attention\..*"
    r"(attend|join_splits|dq|dkv)$")  # fmt: skip


@dataclass(frozen=True)
class Moved:
    """Bytes a layer moves: those of products and attention, and of all else, by kernel."""

    least: float
    between: dict[str, float]

    @property
    def whole(self) -> float:
        return self.least + sum(self.between.values())


def moved(config: ModelConfig, preset: str, phase: str) -> Moved:
    """Bytes a token of one layer: what two layers move, less what one does."""
    one, two = (_counted(config, preset, phase, layers) for layers in (1, 2))
    rows = PHASES[phase]
    layer = {name: (two[name] - one[name]) / rows for name in two if two[name] != one[name]}
    least = sum(size for name, size in layer.items() if _LEAST.match(name))
    return Moved(least, {name: size for name, size in layer.items() if not _LEAST.match(name)})


def _counted(config: ModelConfig, preset: str, phase: str, layers: int) -> Counter[str]:
    config = replace(config, num_layers=layers, windows=config.windows[:layers])
    ops = TritonOps("bitwise", "recorded", META)
    masters = {n: torch.empty(s, device=META) for n, s in parameter_shapes(config).items()}
    with record_launches():
        transformer = Transformer(config, precision_from(preset), ops, masters)
    run = _decoding(transformer) if phase == "decode" else _learning(transformer, phase)
    with record_launches() as found, _Bytes() as others:
        run()
    total = others.found
    for launch in found:
        total[kernel_name(launch)] += _of_launch(launch)
    return total


def _decoding(transformer: Transformer) -> Callable[[], object]:
    config, flow = transformer.config, transformer.precision.rollout
    rows, pages = PHASES["decode"], 256
    table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
    layout = Layout.build([1] * rows, [4000] * rows, table, 16)
    shape = layout.num_slots, config.num_kv_heads, config.head_dim
    stores = [
        KVStore.allocate(*shape, flow.kv, flow.compute, None, META)
        for _ in range(config.num_layers)
    ]
    tokens = torch.empty(rows, dtype=torch.int64, device=META)

    def run() -> object:
        with torch.no_grad():
            return transformer.hidden(tokens, layout, stores, "rollout")

    return run


def _learning(transformer: Transformer, phase: str) -> Callable[[], object]:
    tokens = torch.empty(PHASES[phase], dtype=torch.int64, device=META)
    layout = Layout.packed([2048] * (PHASES[phase] // 2048))
    if phase == "forward":
        return lambda: transformer.hidden(tokens, layout)
    with record_launches():
        hidden = transformer.hidden(tokens, layout)
    holders = transformer.masters.holders.values()
    for master in holders:
        master.grad = torch.empty_like(master)  # of the micro-batches before

    def run() -> None:
        with adding_in_place(holders):
            hidden.backward(torch.empty_like(hidden))

    return run


class _Bytes(TorchDispatchMode):
    """Counts what PyTorch's own operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe")):
            given = [x for x in args if isinstance(x, torch.Tensor)]
            made = result if isinstance(result, (tuple, list)) else [result]
            reads = [] if name.startswith(("zero", "fill", "new_z")) else given
            tensors = [*reads, *(x for x in made if isinstance(x, torch.Tensor))]
            size = sum(_size(x) for x in tensors if x.is_meta)
            if size:
                self.found[f"PyTorch's {name}"] += size
        return result


def _size(x: torch.Tensor) -> int:
    """Bytes of its elements, of an expanded one those that there are."""
    there = [n for n, stride in zip(x.shape, x.stride()) if stride or n == 1]
    return x.element_size() * (torch.Size(there).numel() if x.numel() else 0)


def _of_launch(launch: KernelLaunch) -> int:
    given = dict(zip(launch.kernel.arg_names, launch.arguments))
    sizes = {n: _size(x) for n, x in given.items() if isinstance(x, torch.Tensor)}
    if isinstance(slots := given.get("slots"), torch.Tensor):  # of a cache those that are written
        for name in ("k_data", "v_data", "k_scale", "v_scale"):
            if name in sizes:
                sizes[name] = sizes[name] * len(slots) // len(given[name])
    return sum(sizes.get(name, 0) for name in _touched(_Key(launch)))


class _Key:
    """A launch by what decides its IR."""

    def __init__(self, launch: KernelLaunch) -> None:
        self.launch, self._value = launch, signature(launch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@cache
def _touched(key: _Key) -> tuple[str, ...]:
    """The pointers that a kernel reads, and those that it writes: twice what it does both with."""
    roots: dict[str, set[str]] = {}
    read, written = set[str](), set[str]()
    for line in (re.sub(r" loc\(.*$", "", line).strip() for line in _lines(key.launch)):
        names = re.findall(r"%[\w]+(?:#\d+)?", line.partition(" : ")[0])
        if line.startswith("tt.func"):
            roots |= {f"%{name}": {name} for name in re.findall(r"%(\w+): !tt.ptr", line)}
        elif " = scf.for " in line or line.startswith("scf.for"):
            pairs = re.findall(r"(%\w+) = (%[\w#]+)", line.partition("iter_args(")[2])
            roots |= {name: roots.get(given, set()) for name, given in pairs}
            result = re.match(r"(%\w+)(?::\d+)? = ", line)
            for index, (_, given) in enumerate(pairs if result is not None else ()):
                assert result is not None
                name = result[1] if len(pairs) == 1 else f"{result[1]}#{index}"
                roots[name] = roots.get(given, set())
        elif "tt.load" in line:
            read |= roots.get(names[1], set())
        elif line.startswith(("tt.store", "tt.atomic")):
            written |= roots.get(names[0], set())
        elif "=" in line and "!tt.ptr" in line and names:
            roots[names[0]] = set[str]().union(*(roots.get(name, set()) for name in names[1:]))
    return (*sorted(read), *sorted(written))


def _lines(launch: KernelLaunch) -> list[str]:
    """Of its IR, the arguments' locations left out."""
    text = re.sub(r" loc\(\"?[\w]*\"?\(#loc\d*\)\)", "", triton_ir(launch))
    return text.splitlines()


def counted() -> dict[str, dict[str, Any]]:
    """Bytes a token and layer by "model preset phase"."""
    found = {}
    for model, preset in MODELS:
        for phase in PHASES:
            each = moved(SHAPES[model], preset, phase)
            between = {name: round(size) for name, size in sorted(each.between.items())}
            found[f"{model} {preset} {phase}"] = {"least": round(each.least), "between": between}
    return found


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """KB a token in Markdown: products and attention, what stands between them, before and now, and
    the whole over the least."""
    lines = [
        "| a layer of | phase | least: products and attention, KB a token | between them, before | "
        "now | whole over least, before | now |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, now in results["now"].items():
        before = results["before"].get(name, now)
        model, preset, phase = name.rsplit(" ", 2)
        between = [sum(each["between"].values()) for each in (before, now)]
        ratios = [1 + size / each["least"] for size, each in zip(between, (before, now))]
        cells = [f"{now['least'] / 1000:,.0f}", *(f"{size / 1000:,.0f}" for size in between)]
        cells += [f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {model} {preset} | {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    before_and_now("layer_bytes", __doc__, counted, table)


if __name__ == "__main__":
    main()

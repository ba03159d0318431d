"""Which Triton kernels a model of real size runs, and what they become on each architecture. Needs
no GPU.

The model itself is asked: its forward, its sampler and its backward run on PyTorch's meta device,
where nothing is computed, and every launch is recorded (`record_launches`). So no kernel can be
forgotten, and an operator that waited for the GPU, to read a number on the host, would raise. The
distinct launches are then compiled: for sm_90 with a row for each kernel, for the other
architectures of `isobit.kernels.gpu.ARCHITECTURES` with a row for all.

`python -m benchmarks.kernel_table --out DIR` writes kernel_table.json and architectures.json and
prints both tables; must not run where TRITON_INTERPRET is set.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.cross_compile import Compiled, compile_launch, kernel_name
from benchmarks.gpu.shapes import SHAPES
from isobit.kernels import KVStore, Layout
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.gpu import ARCHITECTURES, HOPPER
from isobit.kernels.triton.launch import KernelLaunch, compile_for, record_launches
from isobit.model import ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.transformer import Transformer
from isobit.precision import precision_from

META = torch.device("meta")
MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B")
_PLAIN = ("bf16", "bf16[kv_cache=int8]")
_PRESETS = ("fp8", "fp8[kv_cache=e4m3]", "fp8-unified", "bf16")


def launches(
    config: ModelConfig, precision: str, lengths: Sequence[int] = (2048,) * 4
) -> Iterator[tuple[str, KernelLaunch]]:
    """(phase, launch) of one layer and what is outside the layers: sync, decoding, prefill,
    learner; the last two over sequences of these `lengths`."""
    config = replace(config, num_layers=1, windows=config.windows[:1])
    ops = TritonOps("bitwise", "recorded", META)
    masters = {
        name: torch.empty(shape, device=META) for name, shape in parameter_shapes(config).items()
    }
    with record_launches() as found:
        transformer = Transformer(config, precision_from(precision), ops, masters)
    yield from (("sync", launch) for launch in found)
    for batch in (1, 64, 512):
        yield from (("decode", launch) for launch in _decode(transformer, batch))
    with record_launches() as found, torch.no_grad():
        layout, rows = Layout.packed(lengths), sum(lengths)
        transformer.hidden(
            torch.empty(rows, dtype=torch.int64), layout, [_store(transformer, layout)], "rollout"
        )
    yield from (("prefill", launch) for launch in found)
    with record_launches() as found:
        hidden = transformer.hidden(
            torch.empty(rows, dtype=torch.int64, device=META), Layout.packed(lengths)
        )
        targets = torch.empty(rows, dtype=torch.int64, device=META)
        transformer.head_logprobs(hidden, targets)[0].sum().backward()
    yield from (("learn", launch) for launch in found)


def _decode(transformer: Transformer, batch: int) -> Sequence[KernelLaunch]:
    ops, pages = transformer.ops["rollout"], 256
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    layout = Layout.build([1] * batch, [4000] * batch, table, 16)
    keys = torch.empty(batch, 4, dtype=torch.int64, device=META)
    with record_launches() as found, torch.no_grad():
        tokens = torch.empty(batch, dtype=torch.int64)
        hidden = transformer.hidden(tokens, layout, [_store(transformer, layout)], "rollout")
        ops.head_sample(hidden, transformer.head_weight("rollout"), keys, 1.0)
    return found


def _store(transformer: Transformer, layout: Layout) -> KVStore:
    config, flow = transformer.config, transformer.precision.rollout
    shape = (layout.num_slots, config.num_kv_heads, config.head_dim)
    return KVStore.allocate(*shape, flow.kv, flow.compute, None, META)


def signature(launch: KernelLaunch) -> tuple[object, ...]:
    """What makes Triton compile a kernel anew: types, constants, and which integers are 1 or
    multiples of 16."""
    parts: list[object] = [kernel_name(launch), launch.num_warps, launch.num_stages]
    parts += sorted((name, str(value)) for name, value in launch.constants.items())
    for parameter, value in zip(launch.kernel.params, launch.arguments):
        if isinstance(value, torch.Tensor):
            parts.append(value.dtype)
        elif isinstance(value, int) and not parameter.do_not_specialize:
            parts.append(("int", value == 1, value % 16 == 0, value >= 2**31))
        else:
            parts.append(type(value))
    return tuple(parts)


def for_architecture(
    capability: tuple[int, int], models: Sequence[str] = MODELS, variants: int | None = None
) -> dict[str, object]:
    """What became of all kernels of these models on an architecture: FP8 presets too, where it
    multiplies FP8."""
    architecture = ARCHITECTURES[capability]
    compile_for(architecture)
    try:
        presets = _PRESETS if architecture.fp8 else _PLAIN
        rows = compiled(models, presets, variants, 10 * capability[0] + capability[1])
    finally:
        compile_for(HOPPER)
    spills = [int(str(row["spilled_bytes"])) for row in rows if "failure" not in row]
    classes = Counter(str(row.get("instruction_class")) for row in rows)
    return {
        "architecture": f"sm_{capability[0]}{capability[1]}",
        "cards": architecture.cards,
        "presets": list(presets),
        "variants": len(rows),
        "failures": [row for row in rows if "failure" in row],
        "spilling": sum(size > 0 for size in spills),
        "most_spilled_bytes": max(spills),
        "most_shared_kib": max(
            int(str(row["shared_bytes"])) for row in rows if "failure" not in row
        )
        / 1024,
        "shared_limit_kib": architecture.shared_kib,
        "instruction_classes": dict(sorted(classes.items())),
    }


def compiled(
    models: Sequence[str] = MODELS,
    presets: Sequence[str] = _PRESETS,
    variants: int | None = None,
    capability: int = 90,
) -> list[dict[str, object]]:
    """A row for every distinct kernel of these models, with the models and phases that run it; with
    `variants`, for the so many of each kernel that have the largest constants, such as tiles. What
    fails to compile has a row that says why."""
    uses: dict[tuple[object, ...], set[str]] = {}
    first: dict[tuple[object, ...], KernelLaunch] = {}
    for name in models:
        for preset in presets:
            for phase, launch in launches(SHAPES[name], preset):
                key = signature(launch)
                first.setdefault(key, launch)
                uses.setdefault(key, set()).add(f"{name} {preset} {phase}")
    by_size = sorted(
        first, key=lambda key: -sum(v for v in first[key].constants.values() if type(v) is int)
    )
    by_kernel: dict[object, list[tuple[object, ...]]] = {}
    for key in by_size:
        by_kernel.setdefault(key[0], []).append(key)
    chosen = [key for keys in by_kernel.values() for key in keys[:variants]]
    rows = [_tried(first[key], capability) | {"uses": sorted(uses[key])} for key in chosen]
    return sorted(rows, key=lambda row: (str(row["kernel"]), str(row["constants"])))


def _tried(launch: KernelLaunch, capability: int) -> dict[str, object]:
    try:
        return _row(compile_launch(launch, capability))
    except Exception as error:  # of a compiler, anything
        constants = {name: str(value) for name, value in launch.constants.items()}
        failure = f"{type(error).__name__}: {error}"[:300]
        return {"kernel": kernel_name(launch), "constants": constants, "failure": failure}


def _row(made: Compiled) -> dict[str, object]:
    return asdict(made) | {
        "instruction_class": made.instruction_class,
        "constants": {name: str(value) for name, value in made.constants.items()},
    }


def table(rows: Sequence[dict[str, object]]) -> str:
    """A line for each kernel in Markdown: over its variants, the most registers, spills and shared
    memory."""
    lines = [
        "| kernel | matrix instructions | registers | spilled bytes | shared KiB | warps | "
        "variants | phases |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kernel in sorted({str(row["kernel"]) for row in rows}):
        own = [row for row in rows if row["kernel"] == kernel]
        phases = sorted({str(use).rsplit(" ", 1)[1] for row in own for use in row["uses"]})  # type: ignore[attr-defined]
        warps = "/".join(
            str(count) for count in sorted({int(str(row["num_warps"])) for row in own})
        )
        most = {
            key: max(int(str(row[key])) for row in own)
            for key in ("registers", "spilled_bytes", "shared_bytes")
        }
        classes = ", ".join(sorted({str(row["instruction_class"]) for row in own}))
        lines.append(
            f"| `{kernel}` | {classes} | {most['registers']} | {most['spilled_bytes']} | "
            f"{most['shared_bytes'] / 1024:.0f} | {warps} | {len(own)} | {', '.join(phases)} |"
        )
    return "\n".join(lines)


def architecture_table(found: Sequence[dict[str, object]]) -> str:
    """A line for each architecture in Markdown."""
    lines = [
        "| architecture | cards | presets | variants | failures | spilling | spilled bytes | "
        "shared KiB, of | matrix |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        classes = [name for name in one["instruction_classes"] if name not in ("none", "None")]  # type: ignore[attr-defined]
        lines.append(
            f"| `{one['architecture']}` | {one['cards']} | {', '.join(one['presets'])} | "
            f"{one['variants']} | "  # type: ignore[arg-type]
            f"{len(one['failures'])} | {one['spilling']} | {one['most_spilled_bytes']} | "  # type: ignore[arg-type]
            f"{one['most_shared_kib']:.0f}, {one['shared_limit_kib']} | "
            f"{', '.join(classes) or 'not named'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write kernel_table.json there"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    rows = compiled(arguments.models)
    print(table(rows))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"target": "sm_90", "kernels": rows}, indent=1)
        (arguments.out / "kernel_table.json").write_text(text + "\n", encoding="utf-8")
    found = [for_architecture(capability, arguments.models) for capability in ARCHITECTURES]
    print(architecture_table(found))
    if arguments.out is not None:
        text = json.dumps(found, indent=1)
        (arguments.out / "architectures.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

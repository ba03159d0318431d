"""On how many GPUs of a memory a model trains, and which models one GPU trains, as `isobit plan` counts bytes: two
tables for the documentation.

    python -m benchmarks fits

Qwen3-8B, or the largest dense Qwen3, 64 prompts of 512 tokens with 16 completions of at most 2,048, micro-batches of
one such sequence, `activation_checkpointing: true` and `engine.sleep: always`. A run fits where a tenth of the memory
is left. Nothing is measured here.
"""

from dataclasses import replace

from benchmarks.common import Result
from benchmarks.plan_jobs import job
from isobit.plan import Lengths, device_named
from isobit.plan.devices import GIB
from isobit.plan.memory import memory
from isobit.precision import precision_from

MEMORIES = {"24 GB": 23.5, "48 GB": 47.4, "80 GB": 79.1, "141 GB": 139.8}
"""GiB that a program finds on a GPU that is sold with so many GB."""
PRESETS = ("bf16", "fp8", "fp8-e2e")
FROZEN = ("nvfp4[activation=bf16]",)
"""Of a base that nothing trains, besides: two codes to a byte."""
TRAINED = {
    "all weights": (),
    "all weights, 8-bit moments": ("optimizer.state=8bit",),
    "all weights, BF16 masters": ("optimizer.masters=bf16",),
    "all weights, BF16 masters, 8-bit moments": ("optimizer.masters=bf16", "optimizer.state=8bit"),
    "an adapter of rank 32": ("adapter.rank=32",),
}
ADAPTED = tuple(TRAINED)[-1]
_RANKS = (1, 2, 4, 8, 16, 32, 64)
ONE_GPU = {"24 GB": 23.5, "32 GB": 31.4, "48 GB": 47.4, "80 GB": 79.1, "141 GB": 139.8}
RECIPES = (
    ("all weights", "fp8", ()),
    ("all weights, BF16 masters, 8-bit moments", "fp8", ("optimizer.masters=bf16", "optimizer.state=8bit")),
    ("an adapter of rank 32", "fp8", ("adapter.rank=32",)),
    ("an adapter of rank 32", "nvfp4[activation=bf16]", ("adapter.rank=32",)),
)
SIZES = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
_LEFT = 0.1


def run(rounds: int) -> Result:
    print("\n".join([*table(), "", *largest()]))
    return Result("fits")


def table() -> list[str]:
    """In Markdown: what is trained, the preset, and for each memory the fewest GPUs with the GiB of each."""
    lines = [f"| trained | preset | {' | '.join(MEMORIES)} |", f"|---|---|{'---|' * len(MEMORIES)}"]
    for what, changes in TRAINED.items():
        for preset in (*PRESETS, *(FROZEN if what == ADAPTED else ())):
            cells = (_fewest(preset, changes, size * GIB) for size in MEMORIES.values())
            lines.append(f"| {what} | `{preset}` | {' | '.join(cells)} |")
    return lines


def largest() -> list[str]:
    """In Markdown: what is trained and how, and for each memory the largest model that one GPU trains."""
    lines = [f"| trained | preset | {' | '.join(ONE_GPU)} |", f"|---|---|{'---|' * len(ONE_GPU)}"]
    for what, preset, changes in RECIPES:
        cells = (_largest(preset, changes, size * GIB) for size in ONE_GPU.values())
        lines.append(f"| {what} | `{preset}` | {' | '.join(cells)} |")
    return lines


def _largest(preset: str, changes: tuple[str, ...], size: float) -> str:
    for name in reversed(SIZES):
        if (total := _fitting(name, preset, changes, size, 1)) is not None:
            return f"{name.removeprefix('Qwen3-')}: {total / GIB:.0f} GiB"
    return "none"


def _fewest(preset: str, changes: tuple[str, ...], size: float) -> str:
    for ranks in _RANKS:
        if (total := _fitting("Qwen3-8B", preset, changes, size, ranks)) is not None:
            return f"{ranks}: {total / GIB:.0f} GiB"
    return "none"


def _fitting(name: str, preset: str, changes: tuple[str, ...], size: float, ranks: int) -> float | None:
    """Bytes of a GPU, or None where they are too many or a completion finds no room in the cache."""
    given = job(
        name,
        *changes,
        f"precision={preset}",
        "optimizer.micro_batch_tokens=2560",
        "optimizer.activation_checkpointing=true",
        "engine.sleep=always",
        device=replace(device_named("h200"), memory=size),
        lengths=Lengths(512, 1024, 2048),
    )
    planned = memory(given.under(precision_from(preset), ranks))
    fits = planned.total <= (1 - _LEFT) * size and planned.cache_tokens >= planned.longest
    return planned.total if fits else None

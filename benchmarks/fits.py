"""On how many GPUs of a memory a model trains, as `isobit plan` counts bytes: a table for the documentation.

    python -m benchmarks fits

Qwen3-8B, 64 prompts of 512 tokens with 16 completions of at most 2,048, micro-batches of one such sequence,
`activation_checkpointing: true` and `engine.sleep: always`. A run fits where a tenth of the memory is left.
Nothing is measured here.
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
_LEFT = 0.1


def run(rounds: int) -> Result:
    print("\n".join(table()))
    return Result("fits")


def table() -> list[str]:
    """In Markdown: what is trained, the preset, and for each memory the fewest GPUs with the GiB of each."""
    lines = [f"| trained | preset | {' | '.join(MEMORIES)} |", f"|---|---|{'---|' * len(MEMORIES)}"]
    for what, changes in TRAINED.items():
        for preset in (*PRESETS, *(FROZEN if what == ADAPTED else ())):
            cells = (_fewest(preset, changes, size * GIB) for size in MEMORIES.values())
            lines.append(f"| {what} | `{preset}` | {' | '.join(cells)} |")
    return lines


def _fewest(preset: str, changes: tuple[str, ...], size: float) -> str:
    given = job(
        "Qwen3-8B",
        *changes,
        f"precision={preset}",
        "optimizer.micro_batch_tokens=2560",
        "optimizer.activation_checkpointing=true",
        "engine.sleep=always",
        device=replace(device_named("h200"), memory=size),
        lengths=Lengths(512, 1024, 2048),
    )
    for ranks in _RANKS:
        planned = memory(given.under(precision_from(preset), ranks))
        if planned.total <= (1 - _LEFT) * size and planned.cache_tokens >= planned.longest:
            return f"{ranks}: {planned.total / GIB:.0f} GiB"
    return "none"

"""On how many GPUs of a memory a model trains, and which models one GPU trains, as `isobit plan`
counts bytes: two tables for the documentation.

    python -m benchmarks fits

Qwen3-8B, or the largest dense Qwen3, 64 prompts of 512 tokens with 16 completions of at most 2,048,
micro-batches of one such sequence, `activation_checkpointing: true` and `engine.sleep: always`. A
run fits where a tenth of the memory is left. Nothing is measured here.
"""

from benchmarks.common import Result
from benchmarks.plan_jobs import job
from isobit.training.plan import plan
from isobit.training.plan.advice import fits_well
from isobit.training.plan.cards import GIB

ONE_GPU = {
    "24 GB": "rtx4090",
    "32 GB": "rtx5090",
    "48 GB": "l40s",
    "80 GB": "h100",
    "141 GB": "h200",
}
MEMORIES = {name: card for name, card in ONE_GPU.items() if name != "32 GB"}
"""What a card is sold with, and one of them."""
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
RECIPES = (
    ("all weights", "fp8", ()),
    (
        "all weights, BF16 masters, 8-bit moments",
        "fp8",
        ("optimizer.masters=bf16", "optimizer.state=8bit"),
    ),
    ("an adapter of rank 32", "fp8", ("adapter.rank=32",)),
    ("an adapter of rank 32", "nvfp4[activation=bf16]", ("adapter.rank=32",)),
)
SIZES = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")


def run(rounds: int) -> Result:
    print("\n".join([*table(), "", *largest()]))
    return Result("fits")


def table() -> list[str]:
    """In Markdown: what is trained, the preset, and for each memory the fewest GPUs with the GiB of
    each."""
    lines = [f"| trained | preset | {' | '.join(MEMORIES)} |", f"|---|---|{'---|' * len(MEMORIES)}"]
    for what, changes in TRAINED.items():
        for preset in (*PRESETS, *(FROZEN if what == ADAPTED else ())):
            cells = (_fewest(preset, changes, card) for card in MEMORIES.values())
            lines.append(f"| {what} | `{preset}` | {' | '.join(cells)} |")
    return lines


def largest() -> list[str]:
    """In Markdown: what is trained and how, and for each memory the largest model that one GPU
    trains."""
    lines = [f"| trained | preset | {' | '.join(ONE_GPU)} |", f"|---|---|{'---|' * len(ONE_GPU)}"]
    for what, preset, changes in RECIPES:
        cells = (_largest(preset, changes, card) for card in ONE_GPU.values())
        lines.append(f"| {what} | `{preset}` | {' | '.join(cells)} |")
    return lines


def _largest(preset: str, changes: tuple[str, ...], card: str) -> str:
    for name in reversed(SIZES):
        if (total := _fitting(name, preset, changes, card, 1)) is not None:
            return f"{name.removeprefix('Qwen3-')}: {total / GIB:.0f} GiB"
    return "none"


def _fewest(preset: str, changes: tuple[str, ...], card: str) -> str:
    for ranks in _RANKS:
        if (total := _fitting("Qwen3-8B", preset, changes, card, ranks)) is not None:
            return f"{ranks}: {total / GIB:.0f} GiB"
    return "none"


def _fitting(
    name: str, preset: str, changes: tuple[str, ...], card: str, ranks: int
) -> float | None:
    """Bytes of a GPU, or None where they are too many or a completion finds no room in the
    cache."""
    given = job(
        name,
        *changes,
        f"precision={preset}",
        "sampling.max_new_tokens=2048",
        "optimizer.micro_batch_tokens=2560",
        "optimizer.activation_checkpointing=true",
        "engine.sleep=always",
        card=card,
        ranks=ranks,
    )
    planned = plan(given)
    return (
        planned.total
        if fits_well(given, planned) and planned.cache_tokens >= given.longest
        else None
    )

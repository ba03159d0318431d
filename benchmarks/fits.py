"""On how many GPUs of a memory a model trains, and which models one GPU trains, as `isobit plan`
counts bytes, and models that GPUs hold together: three tables for the documentation.

    python -m benchmarks fits

Qwen3-8B, or the largest dense Qwen3, 64 prompts of 512 tokens with 16 completions of at most 2,048,
micro-batches of one such sequence, `activation_checkpointing: true` and `engine.sleep: always`. A
run fits where a tenth of the memory is left. Nothing is measured here.
"""

from benchmarks.common import Result
from benchmarks.plan_jobs import job
from isobit.training.plan import Job, MemoryPlan, plan
from isobit.training.plan.advice import fits_well
from isobit.training.plan.cards import GIB
from isobit.training.plan.divided import resolved

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
ALL, *_, ALL_SMALL, ADAPTED = TRAINED
TOGETHER = ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B", "Qwen3-30B-A3B", "Qwen3-235B-A22B")
_MANY_RANKS = (8, 16, 32, 64, 128)
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
    print("\n".join([*table(), "", *largest(), "", *together()]))
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


def together() -> list[str]:
    """In Markdown: of models that several GPUs hold together the bytes of one of eight GPUs, and
    the fewest GPUs that train them."""
    cards = {name: card for name, card in MEMORIES.items() if name in ("80 GB", "141 GB")}
    columns = [*(f"8 x {name}" for name in cards), *(f"fewest of {name}" for name in cards)]
    lines = [f"| model | trained | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for name in TOGETHER:
        for what in (ALL, ALL_SMALL):
            given = [_job(name, "fp8", TRAINED[what], card, 8) for card in cards.values()]
            eight = [_cell(one) for one in given]
            fewest = [_fewest_together(one) for one in given]
            lines.append(f"| {name} | {what} | {' | '.join([*eight, *fewest])} |")
    return lines


def _cell(given: Job) -> str:
    given = resolved(given)
    planned = plan(given)
    size = f"{planned.total / GIB:.0f} GiB, `divided={given.divided}`"
    return size if _fits(given, planned) else f"no: {size}"


def _fewest_together(given: Job) -> str:
    for ranks in _MANY_RANKS:
        if _fits(one := resolved(given.on(ranks)), planned := plan(one)):
            return f"{ranks}: {planned.total / GIB:.0f} GiB, `divided={one.divided}`"
    return "none"


def _fits(given: Job, planned: MemoryPlan) -> bool:
    """Whether a tenth of the memory is left, and a completion finds room in the cache."""
    return fits_well(given, planned) and planned.cache_tokens >= given.longest


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
    given = _job(name, preset, changes, card, ranks)  # each GPU with whole weights
    planned = plan(given)
    return planned.total if _fits(given, planned) else None


def _job(name: str, preset: str, changes: tuple[str, ...], card: str, ranks: int) -> Job:
    return job(
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

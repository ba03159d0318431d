"""The Triton kernels compiled for AMD's data-centre cards, as far as that goes without one.

The kernels are those that a model launches (`kernel_table.launches`), with the tiles that they have for NVIDIA cards of
as much shared memory. isobit does not run on these cards; the table says what its kernels would need there. Left out:
any claim beyond "compiled".

`python -m benchmarks.amd_table --out DIR` writes amd.json and prints the table; must not run where TRITON_INTERPRET is
set.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from triton.backends.compiler import GPUTarget

from benchmarks.cross_compile import kernel_name, triton_compile
from benchmarks.gpu.shapes import SHAPES
from benchmarks.kernel_table import launches, signature
from isobit.kernels.gpu import HOPPER, Architecture
from isobit.kernels.triton.launch import KernelLaunch, compile_for

CARDS = {"gfx942": Architecture("MI300X, MI325X", 64), "gfx950": Architecture("MI350X, MI355X", 160)}
"""With the KiB of local data share that a workgroup may take (AMD's instruction set guides of CDNA 3 and 4)."""
PRESETS = ("bf16", "fp8")
_WAVE = 64


def chosen(models: Sequence[str], preset: str, variants: int) -> Iterator[KernelLaunch]:
    """So many launches of each kernel that differ, those with the largest constants."""
    found = {signature(launch): launch for name in models for _, launch in launches(SHAPES[name], preset)}
    by_size = sorted(found.values(), key=lambda each: -sum(v for v in each.constants.values() if type(v) is int))
    taken: dict[str, int] = {}
    for launch in by_size:
        name = kernel_name(launch)
        taken[name] = taken.get(name, 0) + 1
        if taken[name] <= variants:
            yield launch


def compiled(launch: KernelLaunch, card: str) -> dict[str, object]:
    """What a launch became: registers and spilled registers of a thread, bytes of local data share, the matrix
    instructions; or why it did not compile."""
    row: dict[str, object] = {
        "kernel": kernel_name(launch),
        "constants": {k: str(v) for k, v in launch.constants.items()},
    }
    try:
        made = triton_compile(launch, GPUTarget("hip", card, _WAVE))
    except Exception as error:  # of a compiler, anything
        return row | {"failure": f"{type(error).__name__}: {error}"[:300]}
    text = made.asm["amdgcn"]
    counts = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
    return (
        row | counts | {"shared_bytes": made.metadata.shared, "matrix": sorted(set(re.findall(r"v_s?mfma\w*", text)))}
    )


def of_card(card: str, models: Sequence[str], variants: int) -> list[dict[str, object]]:
    """A row for each preset."""
    found = []
    for preset in PRESETS:
        compile_for(CARDS[card])
        try:
            rows = [compiled(launch, card) for launch in chosen(models, preset, variants)]
        finally:
            compile_for(HOPPER)
        found.append({"card": card, "preset": preset, "models": list(models), "kernels": rows})
    return found


def table(found: Sequence[dict]) -> str:
    """A line for each card and preset in Markdown."""
    heads = ("architecture", "cards", "preset", "compiled, of", "spill registers", "exceed the data share", "matrix")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for one in found:
        rows = [row for row in one["kernels"] if "failure" not in row]
        card = CARDS[one["card"]]
        spilling = sorted({row["kernel"].split(".")[1] for row in rows if row["vgpr_spill_count"]})
        large = sorted({row["kernel"].split(".")[1] for row in rows if row["shared_bytes"] > card.shared_kib * 1024})
        classes = sorted({name.removeprefix("v_mfma_") for row in rows for name in row["matrix"]})
        names = [", ".join(f"`{name}`" for name in some) or "none" for some in (spilling, large, classes)]
        cells = (one["card"], card.cards, one["preset"], f"{len(rows)}, {len(one['kernels'])}", *names)
        lines.append("| `" + "` | ".join((cells[0], " | ".join(cells[1:]))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.amd_table", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write amd.json there")
    parser.add_argument("--models", nargs="+", default=["Qwen3-8B", "Qwen3-30B-A3B"])
    parser.add_argument("--variants", type=int, default=2, help="of each kernel")
    arguments = parser.parse_args()
    found = [row for card in CARDS for row in of_card(card, arguments.models, arguments.variants)]
    print(table(found))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "amd.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

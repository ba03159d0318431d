"""What a block of keys costs in attention's kernel: instructions of a warp in the loop over keys,
compiled for sm_90. Needs no GPU, and measures none.

A warp has 16 rows of a tile where rows stand on the long side of the matrix instruction, so a count
of prefill is that for each 64 rows, however many a tile has; of decoding it is that for a tile.

`python -m benchmarks.attention_loop --out DIR` writes attention_loop.json there and prints the
table; what the file has as "before" stays. Must not run where TRITON_INTERPRET is set.
"""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from benchmarks.counts import before_and_now
from benchmarks.cross_compile import compile_launch, matrix_loop, triton_compile
from isobit.kernels import KVStore, Layout
from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.triton.launch import KernelLaunch, record_launches
from isobit.precision import BF16, E4M3, INT8, QuantSpec

META = torch.device("meta")
HEADS, KV_HEADS, DIM = 32, 8, 128
"""Qwen3-8B's."""
_CACHES = {"int8": QuantSpec(INT8, "row"), "e4m3": QuantSpec(E4M3, "row", "ue8m0"), "bf16": None}
_PHASES = {"decode": 1, "prefill": 2048}
"""Rows of a sequence."""


def _launch(phase: str, cache: str) -> KernelLaunch:
    """Of four sequences with 4,096 keys; the result is numbers, as a learner keeps them."""
    rows, keys, page = _PHASES[phase], 4096, 16
    slots = 4 * keys
    store = KVStore.allocate(slots, KV_HEADS, DIM, _CACHES[cache], BF16, device=META)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    table, count = numbers(4, keys // page, dtype=torch.int32), 4 * rows
    layout = Layout(
        numbers(5), numbers(4), table, page, numbers(count), numbers(count), rows, keys, slots
    )
    q = numbers(count, HEADS, DIM, dtype=torch.bfloat16)
    with record_launches() as found:
        attention.attention(q, store, layout, DIM**-0.5)
    return found[0]


def counted() -> dict[str, dict[str, Any]]:
    """Rows of a tile, instructions, registers and shared memory by "phase cache"."""
    found = {}
    for phase in _PHASES:
        for cache in _CACHES:
            launch = _launch(phase, cache)
            made = compile_launch(launch)
            sass = triton_compile(launch, GPUTarget("cuda", 90, 32)).asm["sass"]
            found[f"{phase} {cache}"] = {
                "rows": launch.constants["ROWS"] * launch.constants["GROUP"],  # type: ignore[operator]
                "instructions": len(matrix_loop(sass)),
                "registers": made.registers,
                "spilled_bytes": made.spilled_bytes + made.stack_bytes,
                "shared_kib": made.shared_bytes // 1024,
            }
    return found


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A line for each phase and cache in Markdown, before → now."""
    lines = [
        "| phase | cache | rows of a tile | instructions | registers | shared KiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, now in results["now"].items():
        both = results["before"].get(name, now), now
        cells = [
            "{} → {}".format(*(one[column] for one in both))
            for column in ("rows", "instructions", "registers", "shared_kib")
        ]
        lines.append(f"| {name.replace(' ', ' | ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    before_and_now("attention_loop", __doc__, counted, table)


if __name__ == "__main__":
    main()

"""What the place of tokens in a matrix instruction costs: FP8 products compiled for sm_90 with
weights on the long side and with tokens there. Needs no GPU, and measures none.

Counted are a warp's instructions in the loop over K, for 128 columns of K. A warp has 16 rows of the
long side and all of the other.

`python -m benchmarks.orientation --out DIR` writes orientation.json there and prints the table; must
not run where TRITON_INTERPRET is set.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from benchmarks.cross_compile import compile_launch, matrix_loop, triton_compile
from isobit.kernels.experts.triton import grouped
from isobit.kernels.matrices import Stacked
from isobit.kernels.product.triton import plan as plans
from isobit.kernels.product.triton import product as products
from isobit.kernels.triton.launch import KernelLaunch, record_launches
from isobit.precision import E4M3, QTensor, QuantSpec

_ROW, _BLOCK = QuantSpec(E4M3, "1x128"), QuantSpec(E4M3, "128x128")
_WEIGHTS = {(64, 64): 4, (128, 64): 8, (128, 128): 8}
"""Warps of a tile (of weights, of tokens) with weights on the long side; with tokens there they
stand along the tokens."""
SIDES = ("weights first", "tokens first")


def _codes(rows: int, columns: int, spec: QuantSpec) -> QTensor:
    high, wide = spec.block((rows, columns))
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
    return QTensor(data, torch.empty(-(-rows // high), -(-columns // wide), device="meta"), spec)


def _product(tile: tuple[int, int], tokens_first: bool, chunks: int) -> KernelLaunch:
    """Of 8,192 rows, 4,096 outputs and as many inputs, in this tile."""
    high, wide = tile
    chosen = replace(
        plans.plan(8192, 4096, 4096, torch.uint8),
        tile_n=high, tile_m=wide, tokens_first=tokens_first, splits=chunks, apart=False,
        chunk=32 // chunks, num_warps=wide // 16 if tokens_first else _WEIGHTS[tile],
        num_stages=5 if tile == (64, 64) else 4,
    )  # fmt: skip
    own, products.plan = products.plan, lambda *_: chosen  # type: ignore[assignment]
    try:
        with record_launches() as found:
            products.product(_codes(8192, 4096, _ROW), _codes(4096, 4096, _BLOCK))
    finally:
        products.plan = own
    return found[0]


def _experts(tokens_first: bool) -> KernelLaunch:
    """Of 128 experts, 1,536 outputs and 2,048 inputs: a Qwen3-30B-A3B's."""
    data = torch.empty(128, 1536, 2048, dtype=torch.float8_e4m3fn, device="meta")
    weights = Stacked(data, torch.empty(128, 12, 16, device="meta"), _BLOCK)
    offsets = torch.empty(129, dtype=torch.int64, device="meta")
    with record_launches() as found:
        grouped.grouped_product(_codes(65536, 2048, _ROW), weights, offsets, torch.bfloat16)
    return replace(found[-1], constants=found[-1].constants | {"TOKENS_FIRST": tokens_first})


def counted() -> list[dict[str, Any]]:
    """A row for each tile: warps, instructions and registers by the side."""
    cases: list[tuple[str, tuple[int, int], list[KernelLaunch]]] = [
        ("dense", tile, [_product(tile, first, 1) for first in (False, True)]) for tile in _WEIGHTS
    ]
    chunked = [_product((128, 64), first, 2) for first in (False, True)]
    cases.append(("dense, in chunks", (128, 64), chunked))
    cases.append(("experts", (128, 64), [_experts(first) for first in (False, True)]))
    return [{"product": name, "tile": tile} | _counts(launches) for name, tile, launches in cases]


def _counts(launches: list[KernelLaunch]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side, launch in zip(SIDES, launches):
        made = compile_launch(launch)
        sass = triton_compile(launch, GPUTarget("cuda", 90, 32)).asm["sass"]
        found[side] = {
            "warps": made.num_warps,
            "instructions": len(matrix_loop(sass)),
            "registers": made.registers,
            "spilled_bytes": made.spilled_bytes + made.stack_bytes,
            "shared_kib": made.shared_bytes // 1024,
        }
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each tile in Markdown, weights first → tokens first."""
    lines = [
        "| product | tile: weights x tokens | warps | instructions a warp | a tile | registers | "
        "shared KiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = [row[side] for side in SIDES]
        whole = [one["warps"] * one["instructions"] for one in each]
        cells = ["{} → {}".format(*(one[name] for one in each)) for name in
            ("warps", "instructions", "registers", "shared_kib")]  # fmt: skip
        cells.insert(2, "{:,} → {:,}".format(*whole))
        high, wide = row["tile"]
        lines.append(f"| {row['product']} | {high} x {wide} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.orientation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write orientation.json there")
    arguments = parser.parse_args()
    rows = counted()
    print(table(rows))
    if arguments.out is not None:
        text = json.dumps(rows, indent=1) + "\n"
        (arguments.out / "orientation.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""What attention costs in instructions: those of its loop over keys, counted by class in the machine code for sm_90.

A scheduler of a multiprocessor issues one instruction a cycle, and has one of four warps; so `a scheduler` below is the
loop's instructions times warps / 4, for 64 keys of one key head and all rows of a tile. `cycles` is what the busiest
unit takes for them, from the throughput that NVIDIA publishes (CUDA C++ Programming Guide, table of arithmetic
instructions, 9.0): an estimate of the bound, not of the time. Needs no GPU.

`python -m benchmarks.attention_sass --out DIR` also writes attention_sass.json, beside what it says of the kernel that
had 64 rows first in every tile; docs/gpu.md shows both.
"""

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from benchmarks.cross_compile import compile_launch, triton_compile
from isobit.kernels import KVStore, Layout
from isobit.kernels.attention.triton.forward import attention
from isobit.kernels.triton.launch import KernelLaunch, record_launches
from isobit.precision import BF16, E4M3, INT8, QuantSpec

CACHES = {"int8": QuantSpec(INT8, "row", "fp32"), "e4m3": QuantSpec(E4M3, "row", "ue8m0"), "bf16": None}
ROWS = {"decode": 1, "prefill": 2048}
CLASSES = (
    ("matrix", r"[QHI]?G?MMA|[QHI]MMA"),
    ("exponentials", "MUFU"),
    ("shuffles", "SHFL|VOTE|REDUX"),
    ("shared memory", "LDS|STS|LDSM|STSM|LDGSTS|ATOMS"),
    ("global memory", "LDG|STG"),
    ("barriers", "BAR|WARPGROUP|WARPSYNC|DEPBAR|LDGDEPBAR|FENCE|MEMBAR|SYNCS|NOP|BRA|BSSY|BSYNC|ELECT"),
    ("float32", "FADD|FMUL|FFMA"),
    ("float16", "HADD2|HMUL2|HFMA2"),
    ("conversions", "F2F|F2FP|I2F|I2FP|F2I|I2I"),
    ("comparisons", "FMNMX|FSEL|FSETP|ISETP|SEL|VIMNMX|IMNMX|PLOP3|P2R|R2P"),
    ("integers", "IMAD|IADD3|LOP3|SHF|LEA|PRMT|SGXT|MOV|CS2R|S2R|IABS|BREV|FLO|LOP|R2UR|U\\w+"),
)
"""The first that matches an instruction's name."""
_CYCLES = {"FADD": 1, "FMUL": 1, "FFMA": 1, "HADD2": 1, "HMUL2": 1, "HFMA2": 1, "MUFU": 8, "SHFL": 4, "IMAD": 2}
_UNITS = {"FADD": "fma", "FMUL": "fma", "FFMA": "fma", "IMAD": "fma", "HADD2": "fma", "HMUL2": "fma", "HFMA2": "fma"}
_UNITS |= {"MUFU": "special", "SHFL": "shuffle"}


def launch_of(cache: str, rows: int, heads: tuple[int, int, int] = (32, 8, 128)) -> KernelLaunch:
    """Attention of four sequences of `rows` rows each, whose keys are 4,000 at the most; heads, key heads, channels."""
    count, meta = 4 * rows, torch.device("meta")
    store = KVStore.allocate(4096, *heads[1:], CACHES[cache], BF16, None, meta)
    starts, contexts, slots = (torch.empty(size, dtype=torch.int64, device=meta) for size in (5, 4, count))
    table = torch.empty(4, 256, dtype=torch.int32, device=meta)
    layout = Layout(starts, contexts, table, 16, slots, slots, rows, 4000, 4096)
    q = torch.empty(count, heads[0], heads[2], dtype=torch.bfloat16, device=meta)
    with record_launches() as found:
        attention(q, store, layout, 0.1)
    return found[0]


def loop_of(sass: str) -> list[str]:
    """The names of the instructions, with their suffixes, of the shortest loop with a product."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {
        line.removeprefix(".").rstrip(":"): at for at, line in enumerate(lines) if re.match(r"\.?LBB\w+:?$", line)
    }
    bodies = []
    for at, line in enumerate(lines):
        jump = re.search(r"\bBRA\S*\s+.*?`?\(?(LBB\w+)", line)
        if jump and labels.get(jump[1], at) < at:
            body = lines[labels[jump[1]] : at + 1]
            if any("MMA" in one for one in body):
                bodies.append(body)
    found = (re.search(r"\t(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line) for line in min(bodies, key=len))
    return [match[1] for match in found if match]


def class_of(name: str) -> str:
    base = name.split(".")[0]
    return next((kind for kind, pattern in CLASSES if re.fullmatch(pattern, base)), "others")


def busiest(names: Sequence[str]) -> tuple[str, int]:
    """The unit of a scheduler that these take longest, and its cycles: units work beside each other, issuing is one."""
    cycles = Counter({"issue": len(names)})
    for name in names:
        base = name.split(".")[0]
        if class_of(name) in ("comparisons", "conversions", "integers") and base != "IMAD":
            cycles["integer"] += 0 if base.startswith("U") or base == "R2UR" else 2
        elif base in _CYCLES:
            cycles[_UNITS[base]] += _CYCLES[base]
    return cycles.most_common(1)[0]


def measured(cache: str, phase: str) -> dict[str, object]:
    """The loop of one kernel: instructions of a warp by class, and what ptxas says of the kernel."""
    launch = launch_of(cache, ROWS[phase])
    made = compile_launch(launch)
    names = loop_of(triton_compile(launch, GPUTarget("cuda", 90, 32)).asm["sass"])
    keys = int(str(launch.constants["BLOCK_KEYS"]))
    share = 64 / keys * launch.num_warps / 4
    rows = int(str(launch.constants["ROWS"])) * int(str(launch.constants["GROUP"]))
    unit, cycles = busiest(names)
    classes = Counter(class_of(name) for name in names)
    return {
        "cache": cache, "phase": phase, "rows": rows, "keys": keys, "warps": launch.num_warps,
        "registers": made.registers, "spilled_bytes": made.spilled_bytes, "shared_bytes": made.shared_bytes,
        "matrix": sorted(made.instructions), "instructions": len(names), "a_scheduler": round(len(names) * share),
        "busiest": unit, "cycles": round(cycles * share), "classes": dict(sorted(classes.items())),
        "names": dict(Counter(name.split(".")[0] for name in names).most_common()),
    }  # fmt: skip


def table(found: Sequence[dict[str, object]]) -> str:
    """A line for each kernel in Markdown."""
    kinds = [kind for kind, _ in CLASSES] + ["others"]
    lines = [
        "| cache | phase | rows | warps | a scheduler | cycles | "
        + " | ".join(kinds)
        + " | registers | spilled | KiB |",
        "|---" * (9 + len(kinds)) + "|",
    ]
    for one in found:
        counts = [str(one["classes"].get(kind, 0)) for kind in kinds]  # type: ignore[attr-defined]
        lines.append(
            f"| {one['cache']} | {one['phase']} | {one['rows']} | {one['warps']} | {one['a_scheduler']} | "
            f"{one['cycles']} ({one['busiest']}) | {' | '.join(counts)} | {one['registers']} | "
            f"{one['spilled_bytes']} | {int(str(one['shared_bytes'])) / 1024:.0f} |"
        )
    return "\n".join(lines)


def comparison(kept: dict[str, list[dict[str, object]]]) -> str:
    """A line for each cache and phase in Markdown: the kernel before and now, for 64 keys and 64 rows of prefill."""
    lines = [
        "| phase | cache | rows of a tile | instructions | registers | shared KiB |",
        "|---|---|---|---|---|---|",
    ]
    for old, new in zip(kept["before"], kept["now"], strict=True):
        assert (old["cache"], old["phase"]) == (new["cache"], new["phase"])
        found = []
        for one in (old, new):
            share = 1.0 if one["phase"] == "decode" else 64 / int(str(one["rows"]))
            count = int(str(one["a_scheduler"]))
            shared = round(int(str(one["shared_bytes"])) / 1024)
            found.append((one["rows"], round(count * share), one["registers"], shared))
        columns = (f"{before} → {now}" for before, now in zip(*found, strict=True))
        lines.append(f"| {new['phase']} | {new['cache']} | {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_sass", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write attention_sass.json there, which has the kernel before"
    )
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    found = [measured(cache, phase) for phase in ROWS for cache in arguments.caches]
    print(table(found))
    if arguments.out is not None:
        path = arguments.out / "attention_sass.json"
        kept = json.loads(path.read_text(encoding="utf-8")) | {"now": found}
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What was reached on a GPU, beside the targets: decode steps, products, kernels that the memory
bounds, and where a step's time goes; in Markdown, for docs/gpu.md.

From the stages' results, and from `beside_stages.json`: figures that were taken by hand in the same
sessions, by the calls that it names. Left out: bits, ceilings and targets (`targets.py`).
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import measured
from benchmarks.gpu.targets import of_known_work

Rows = list[dict[str, Any]]
BESIDE = "beside_stages.json"
_TOKENS = (1, 16, 64, 128, 256, 512, 8192)
_FAST = "nvjet"
"""How cuBLAS's kernels for Hopper begin."""
_FEWEST_MS = 0.2
"""Kernels with less in every column are in the last row."""


def decode_table(folder: Path) -> str:
    """Milliseconds of a step by preset; tokens a second, and the share of the floor, under
    `fp8`."""
    steps = of_known_work(measured(folder, "decode"))
    found = _cases(row for row in steps if "tokens_per_s" in row)
    lines = [
        "| decoding | bf16, ms | fp8-rollout, ms | fp8, ms | bf16 / fp8 | fp8, tokens/s "
        "| fp8, share of the floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in found.items():
        times = [
            f"{1e3 * rows[p]['seconds']:.1f}" if p in rows else ""
            for p in ("bf16", "fp8-rollout", "fp8")
        ]
        low = rows.get("fp8")
        ratio = f"{rows['bf16']['seconds'] / low['seconds']:.2f}" if low and "bf16" in rows else ""
        rate = "" if low is None else f"{low['tokens_per_s']:,.0f}"
        share = "" if low is None else f"{low['share']:.0%}"
        lines.append(f"| {case} | {' | '.join(times)} | {ratio} | {rate} | {share} |")
    return "\n".join(lines)


def products_table(folder: Path) -> str:
    """The best BF16 product's time over that of FP8, by Triton with the quantization of the
    activations, and by cuBLAS without."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for case, rows in _cases(measured(folder, "kernels")).items():
        match = re.fullmatch(r"(.+), (\d+) tokens", case)
        if match is None or "bf16 cuBLAS" not in rows:
            continue
        best = min(rows[name]["seconds"] for name in ("bf16 cuBLAS", "bf16"))
        low, library = (
            best / rows[name]["seconds"] for name in ("fp8 with its quantization", "fp8 cuBLAS")
        )
        found.setdefault(match[1], {})[int(match[2])] = (low, library)
    counts = [count for count in _TOKENS if any(count in sizes for sizes in found.values())]
    head = " | ".join(f"{count:,}" for count in counts)
    lines = [f"| product, by tokens | {head} |", "|---" * (len(counts) + 1) + "|"]
    for layer, sizes in found.items():
        cells = ("{:.2f}, {:.2f}".format(*sizes[c]) if c in sizes else "" for c in counts)
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bandwidth_table(folder: Path) -> str:
    """Kernels that the memory bounds: terabytes a second, and the share of a copy's."""
    lines = ["| kernel | TB/s | share of a copy's |", "|---|---|---|"]
    for row in measured(folder, "kernels"):
        if "share" in row and row["case"].startswith(("attention", row["contestant"])):
            rate = row["bytes_per_s"] / 1e12
            lines.append(f"| {row['case']} | {rate:.2f} | {row['share']:.0%} |")
    return "\n".join(lines)


def profile_table(folder: Path) -> str:
    """Milliseconds of each kernel in a step of four layers of Qwen3-8B and its head."""
    cases: dict[str, dict[str, float]] = {}
    for row in measured(folder, "profile"):
        name = row["contestant"]
        if name not in ("all kernels", "the others"):
            kernels = cases.setdefault(row["case"].partition("layers, ")[2], {})
            kernels[_named(name)] = kernels.get(_named(name), 0.0) + 1e3 * row["seconds"]
    wanted = [case for case in cases if "context 8192" not in case and "batch 64" not in case]
    names = sorted(
        {name for case in wanted for name in cases[case]},
        key=lambda name: -max(cases[case].get(name, 0.0) for case in wanted),
    )
    shown = [name for name in names if any(cases[c].get(name, 0) >= _FEWEST_MS for c in wanted)]
    lines = [f"| kernel | {' | '.join(wanted)} |", "|---" * (len(wanted) + 1) + "|"]
    for name in shown:
        cells = (f"{cases[c][name]:.2f}" if name in cases[c] else "" for c in wanted)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rest = (sum(v for name, v in cases[c].items() if name not in shown) for c in wanted)
    lines.append(f"| the others | {' | '.join(f'{value:.2f}' for value in rest)} |")
    totals = (f"**{sum(cases[c].values()):.2f}**" for c in wanted)
    return "\n".join([*lines, f"| all | {' | '.join(totals)} |"])


def _named(kernel: str) -> str:
    """What a reader calls a kernel."""
    if kernel.startswith(_FAST):
        return "cuBLAS, FP8" if "_qq" in kernel else "cuBLAS, BF16"
    if "::" in kernel or kernel.startswith("Mem"):
        return "PyTorch's: additions, copies, fills"
    return f"`{kernel.strip('_')}`"


def learning_table(folder: Path) -> str:
    """Forward and backward of a micro-batch, BF16's time over FP8's."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for row in _beside(folder, "forward_and_backward"):
        size = (row["model"], row["layers"], row["sequences"], row["tokens"])
        found.setdefault(size, {})[row["precision"]] = row["ms"]
    lines = [
        "| forward and backward | bf16, ms | fp8, ms | bf16 / fp8 |",
        "|---|---|---|---|",
    ]
    for (model, layers, sequences, tokens), ms in found.items():
        what = f"{model}, {layers} layers, {sequences} x {tokens:,} tokens"
        lines.append(f"| {what} | {ms['bf16']:.0f} | {ms['fp8']:.0f} | {_over(ms)} |")
    return "\n".join(lines)


def graphs_table(folder: Path) -> str:
    """A captured step by Triton's products alone, and by cuBLAS's where they were chosen."""
    lines = [
        "| decoding, Qwen3-8B | bf16, ms: Triton, with cuBLAS | fp8, ms: Triton, with cuBLAS "
        "| bf16 / fp8, before and after |",
        "|---|---|---|---|",
    ]
    found: dict[tuple[int, int, int], dict[str, dict[str, float]]] = {}
    for row in _beside(folder, "decoding"):
        size = (row["layers"], row["batch"], row["context"])
        for name in ("triton_ms", "library_ms"):
            found.setdefault(size, {}).setdefault(name, {})[row["precision"]] = row[name]
    for (layers, batch, context), ms in found.items():
        own, library = ms["triton_ms"], ms["library_ms"]
        lines.append(
            f"| {layers} layers, batch {batch}, context {context:,} "
            f"| {own['bf16']:.2f}, {library['bf16']:.2f} | {own['fp8']:.2f}, {library['fp8']:.2f} "
            f"| {_over(own)}, {_over(library)} |"
        )
    return "\n".join(lines)


def _over(ms: dict[str, float]) -> str:
    return f"{ms['bf16'] / ms['fp8']:.2f}"


def _beside(folder: Path, what: str) -> Rows:
    found: Rows = json.loads((folder / BESIDE).read_text(encoding="utf-8"))[what]
    return found


def _cases(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["contestant"]] = row
    return found

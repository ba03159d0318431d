"""The native operators' times on this machine, beside the reference backend and PyTorch's own products.

    python benchmarks/kernels_cpu.py [--out FILE.json] [--rounds 15]

Shapes are those of decoding and learning at hidden 512, 8 layers, intermediate 1536, vocabulary 4096. The contestants
of a row run in turns, round by round, so that what else the machine does hits all of them; medians are reported.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from isobit.kernels import KVStore, Layout, get_ops
from isobit.precision import BF16, E4M3, QuantSpec

ACTIVATION, WEIGHT, KEYS = QuantSpec(E4M3, "1x128"), QuantSpec(E4M3, "128x128"), QuantSpec(E4M3, "row")
PRODUCTS = ((1, 512, 512), (32, 512, 512), (32, 1536, 512), (32, 3072, 512), (32, 512, 1536), (32, 4096, 512),
            (512, 1536, 512), (2048, 1536, 512))  # fmt: skip
SEQUENCES, HEADS, DIM, CONTEXT, PAGE = 32, 8, 64, 160, 16

Contestants = Mapping[str, Callable[[], object]]
NATIVE, FAST, REFERENCE = get_ops("native"), get_ops("native", "fast"), get_ops("reference")


@dataclass(frozen=True)
class Row:
    """One line of the table: an operation, who ran it, the median and the least time, and the rate for products."""

    operation: str
    contestant: str
    median_us: float
    least_us: float
    gflops: float | None = None


def race(operation: str, contestants: Contestants, rounds: int, flop: int | None) -> list[Row]:
    """Run the contestants in turns; two warm-up rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e6)
    rows = []
    for name, samples in times.items():
        median = statistics.median(samples)
        rows.append(Row(operation, name, median, min(samples), None if flop is None else flop / median / 1e3))
    return rows


def products(rounds: int) -> list[Row]:
    rows = []
    for m, n, k in PRODUCTS:
        x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        codes_x, codes_w = NATIVE.quantize(x, ACTIVATION), NATIVE.quantize(w, WEIGHT)
        wide_x, wide_w = x.double(), w.double().t().contiguous()
        contestants = {
            "fp8 native": partial(NATIVE.product, codes_x, codes_w),
            "bf16 native": partial(NATIVE.product, x, w),
            "fp8 reference": partial(REFERENCE.product, codes_x, codes_w),
            "bf16 reference": partial(REFERENCE.product, x, w),
            "float64 MKL alone": partial(torch.mm, wide_x, wide_w),
            "bf16 oneDNN (fast)": partial(FAST.product, x, w),
        }
        rows += race(f"product {m}x{n}x{k}", contestants, rounds, 2 * m * n * k)
    return rows


def rows_of_32(rounds: int) -> list[Row]:
    x, weight = torch.randn(SEQUENCES, 512).bfloat16(), torch.randn(512).bfloat16()
    gate_up = torch.randn(SEQUENCES, 3072).bfloat16()
    logits = torch.randn(SEQUENCES, 4096) * 3
    keys, tokens = torch.randint(0, 1 << 30, (SEQUENCES, 4)), torch.randint(0, 4096, (SEQUENCES,))
    cases: dict[str, Callable[..., object]] = {
        "quantize 32x512": lambda ops: ops.quantize(x, ACTIVATION),
        "rms_norm 32x512 + residual": lambda ops: ops.rms_norm(x, weight, 1e-5, x),
        "silu_mul 32x1536": lambda ops: ops.silu_mul(gate_up),
        "sample 32x4096": lambda ops: ops.sample(logits, keys, 1.0),
        "token_logprobs 32x4096": lambda ops: ops.token_logprobs(logits, tokens, 1.0),
    }
    rows = []
    for name, case in cases.items():
        contestants = {"native": partial(case, NATIVE), "reference": partial(case, REFERENCE)}
        rows += race(name, contestants, rounds, None)
    return rows


def attention(rounds: int) -> list[Row]:
    rows = []
    for name, kv in (("bf16", None), ("e4m3", KEYS)):
        pages = CONTEXT // PAGE
        table = torch.randperm(SEQUENCES * pages).view(SEQUENCES, pages).int()
        store = KVStore.allocate(SEQUENCES * CONTEXT, HEADS, DIM, kv, BF16)
        q, k, v = (torch.randn(SEQUENCES * CONTEXT, HEADS, DIM).bfloat16() for _ in range(3))
        prompt = Layout.build([CONTEXT] * SEQUENCES, [0] * SEQUENCES, table, PAGE)
        step = Layout.build([1] * SEQUENCES, [CONTEXT - 1] * SEQUENCES, table, PAGE)
        NATIVE.kv_write(store, k, v, prompt)
        one, dout = q[:SEQUENCES].contiguous(), torch.randn(q.shape).bfloat16()
        out, lse = NATIVE.attention(q, store, prompt, 0.125)
        backward = (dout, q, out, lse, store, prompt, 0.125)
        cases: dict[str, Contestants] = {
            f"attention decode, {name} cache": {
                "native": partial(NATIVE.attention, one, store, step, 0.125),
                "native fast": partial(FAST.attention, one, store, step, 0.125),
                "reference": partial(REFERENCE.attention, one, store, step, 0.125),
            },
            f"attention prefill, {name} cache": {
                "native": partial(NATIVE.attention, q, store, prompt, 0.125),
                "reference": partial(REFERENCE.attention, q, store, prompt, 0.125),
            },
            f"attention backward, {name} cache": {
                "native": partial(NATIVE.attention_backward, *backward),
                "reference": partial(REFERENCE.attention_backward, *backward),
            },
        }
        for case, contestants in cases.items():
            rows += race(case, contestants, max(3, rounds // 3), None)
    return rows


def machine() -> dict[str, object]:
    """Where and of what the numbers are."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    model = next((line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the rows and the machine as JSON")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [*products(arguments.rounds), *rows_of_32(arguments.rounds), *attention(arguments.rounds)]
    print(f"{'operation':34} {'contestant':20} {'median us':>10} {'least us':>10} {'GFLOP/s':>8}")
    for row in rows:
        rate = "" if row.gflops is None else f"{row.gflops:8.0f}"
        print(f"{row.operation:34} {row.contestant:20} {row.median_us:10.0f} {row.least_us:10.0f} {rate}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()

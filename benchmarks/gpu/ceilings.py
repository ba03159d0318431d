"""What this machine can do at most, which all floors are formed from: a copy in device memory, and
the largest products of its own library, of random numbers: zeros would run faster."""

from functools import partial

import torch

from benchmarks.gpu.common import Bench, Case
from benchmarks.gpu.timing import num_sets, rotation


def run(bench: Bench) -> None:
    """Copy bandwidth, counting bytes read and written; BF16 and FP8 products, multiplications and
    additions."""
    for nbytes in (1 << 10,) if bench.rehearsal else (1 << 28, 1 << 30, 1 << 32):
        name = f"copy of {nbytes:,} bytes"
        if bench.wants(name, 2 * num_sets(nbytes) * nbytes):
            with bench.case(name) as case:
                _copy(case, nbytes, bench.device)
    for rows, size in (
        ((64, 64),) if bench.rehearsal else ((8192, 8192), (16384, 8192), (8192, 16384))
    ):
        name = f"product of {rows} x {size} x {size}"
        if bench.wants(name):
            with bench.case(name) as case:
                _products(case, rows, size, bench)


def _copy(case: Case, nbytes: int, device: torch.device) -> None:
    sets = []
    for _ in range(num_sets(2 * nbytes)):
        source = torch.randint(0, 1 << 60, (nbytes // 8,), dtype=torch.int64, device=device)
        sets.append((source, torch.empty_like(source)))
    for name, timing in case.time(
        {"torch": rotation(lambda s: s[1].copy_(s[0]), sets, 2 * nbytes)}
    ).items():
        case.row(name, timing, what="copy", rate=2 * nbytes / timing.seconds)


def _products(case: Case, rows: int, size: int, bench: Bench) -> None:
    """a [rows, size] · b [size, size]ᵀ. FP8 with one scale for each operand, which is the fastest
    that cuBLAS has; with its fast accumulation, which isobit does not use, and without."""
    pairs = [
        (
            torch.randn(rows, size, device=bench.device).bfloat16(),
            torch.randn(size, size, device=bench.device).bfloat16(),
        )
        for _ in range(2)
    ]
    moved, operations = 2 * (rows + size) * size, 2 * rows * size * size
    contestants = {"bf16": rotation(lambda p: p[0] @ p[1].t(), pairs, moved)}
    low = [(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)) for a, b in pairs]
    one = torch.ones((), device=bench.device)

    def scaled(fast: bool, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = torch.bfloat16
        return torch._scaled_mm(pair[0], pair[1].t(), one, one, out_dtype=out, use_fast_accum=fast)

    if not bench.rehearsal:
        for fast in (False, True):
            name = "fp8, fast accumulation" if fast else "fp8"
            contestants[name] = rotation(partial(scaled, fast), low, moved // 2)
    for name, timing in case.time(contestants).items():
        case.row(name, timing, what=name.split(",")[0], rate=operations / timing.seconds)
    if bench.rehearsal:  # no such product on a CPU: the stages that follow need a rate
        case.row("fp8", 1.0, what="fp8", rate=1e12)

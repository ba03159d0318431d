"""What the machine can do at most: a copy in device memory, and the largest products of its own library."""

import torch

from benchmarks.gpu.common import Bench, release


def run(bench: Bench) -> None:
    """Copy bandwidth; BF16 and FP8 products of 8192 cubed, of random numbers: zeros would run faster."""
    size = 64 if bench.rehearsal else 8192
    _copy(bench, 1 << 10 if bench.rehearsal else 1 << 32)
    release()
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    for name, seconds in bench.time("product", {"bf16": lambda: a @ b.t()}, rounds=10).items():
        bench.row(f"product of {size} cubed", name, seconds, operations_per_s=2 * size**3 / seconds)
    if bench.rehearsal:
        return
    low = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    one = torch.ones((), device=bench.device)

    def scaled() -> torch.Tensor:
        return torch._scaled_mm(low[0], low[1].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False)

    for name, seconds in bench.time("product", {"fp8, scale by tensor": scaled}, rounds=10).items():
        bench.row(f"product of {size} cubed", name, seconds, operations_per_s=2 * size**3 / seconds)


def _copy(bench: Bench, count: int) -> None:
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.time("copy", {"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    bench.row(f"copy of {count:,} bytes", "torch", seconds, bytes_per_s=2 * count / seconds)

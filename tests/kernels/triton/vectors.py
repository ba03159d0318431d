"""Operands of one product by Hopper's matrix instruction, and what its model makes of them
(`hopper.py`): `python -m tests.kernels.triton.vectors` writes them to where
`benchmarks/gpu/instruction.py` reads them.

For E4M3, BF16 and FP16: a [64, K], b [16, K], sums to start from c [64, 16], and d [64, 16]. Four
instructions long. Bits are drawn by a formula, so that no library's random numbers are asked.
Left out: NaN and infinity, which have no order.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.instruction import VECTORS
from tests.kernels.triton.hopper import BF16, E4M3, FP16, Instruction, multiply

FORMATS = {
    "e4m3": (torch.float8_e4m3fn, E4M3),
    "bf16": (torch.bfloat16, BF16),
    "fp16": (torch.float16, FP16),
}
PROVENANCE = {
    "model": "wgmma of Hopper in MMA-Sim, arXiv 2511.10909, github.com/microsoft/MMA-Sim c7851383",
    "made by": "tests/kernels/triton/vectors.py",
}
_ROWS, _COLUMNS = 64, 16


def vectors() -> dict[str, Tensor]:
    """All of them, by "format.operand"."""
    found: dict[str, Tensor] = {}
    for seed, (name, (dtype, by)) in enumerate(FORMATS.items()):
        a, b = _operands(seed, dtype, by)
        c = _accumulators(seed, (a.double() @ b.double().t()).float())
        d = multiply(a.double().numpy(), b.double().t().numpy(), c.numpy(), by)
        parts = {"a": a, "b": b, "c": c, "d": torch.from_numpy(d)}
        found |= {f"{name}.{part}": x for part, x in parts.items()}
    return found


def _operands(seed: int, dtype: torch.dtype, by: Instruction) -> tuple[Tensor, Tensor]:
    """Rows in turn: of like magnitudes; of all of them; with zeros; of subnormal numbers; of terms
    that cancel."""
    inner = 4 * by.inner
    a, b = (
        _drawn(10 * seed + i, n, inner).clamp(-400, 400) for i, n in enumerate((_ROWS, _COLUMNS))
    )
    magnitude = torch.exp2(_drawn(10 * seed + 2, _ROWS, inner).mul(4).round().clamp(-8, 6))
    kind = torch.arange(_ROWS) % 5
    a[kind == 1] *= magnitude[kind == 1]
    a[kind == 2, ::3] = 0
    a[kind == 3] *= torch.finfo(dtype).smallest_normal / 2
    a[kind == 4, 1::2], b[1::2, 1::2] = -a[kind == 4, ::2], b[1::2, ::2]
    return a.clamp(-400, 400).to(dtype), b.to(dtype)


def _accumulators(seed: int, sums: Tensor) -> Tensor:
    """To start from: zero, as in all FP8 products and at the start of every chain; about as large
    as the sum; and much larger or smaller."""
    column = torch.arange(_COLUMNS) % 4
    factor = torch.tensor([0.0, -1.0, 2.0**9, 2.0**-9])[column]
    return (sums * (1 + _drawn(10 * seed + 3, *sums.shape) / 8) * factor).float()


def _drawn(seed: int, *shape: int) -> Tensor:
    """About normal: sums of four uniform numbers, of a counter's bits mixed (splitmix64, Steele et
    al. 2014)."""
    with np.errstate(over="ignore"):
        x = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed << 32)
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    parts = x.view(np.uint16).reshape(-1, 4).astype(np.float64) / 65536 - 0.5
    return torch.from_numpy((1.7 * parts.sum(1)).reshape(shape).astype(np.float32))


def write(path: Path = VECTORS) -> None:
    """The file, with where it comes from."""
    save_file(vectors(), path, metadata=PROVENANCE)


if __name__ == "__main__":
    write()

"""Bytes transposed by tiles: codes of weights, contiguous along N as a DGrad's product wants FP8.

The matrix unit takes FP8 operands contiguous along K alone. A product that reads the weight as it
is stored would turn every tile in registers, once for each tile of rows (64 of 8,192): for 128 x
128 x 128 that is 64 stores to shared memory and 48 permutations a thread more, and loads that no
longer go to shared memory by themselves. So the weight is turned once, which reads and writes a
byte an element at the memory's speed; PyTorch's copy of a transposed view does not coalesce single
bytes. Left out: operands of 16 bits and more, whose products read either order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.triton.launch import launch

_BLOCK = 128  # bytes each way that one program transposes


@triton.jit
def _transpose(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y [E, C, R] = x [E, R, C], both uint8 and contiguous."""
    tiles_r: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    first = tl.program_id(1).to(tl.int64) * ROWS * COLUMNS
    r = tl.program_id(0) % tiles_r * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(0) // tiles_r * BLOCK + tl.arange(0, BLOCK)
    inside = (r < ROWS)[:, None] & (c < COLUMNS)[None, :]
    x = tl.load(
        x_ptr + first + r[:, None].to(tl.int64) * COLUMNS + c[None, :], mask=inside, other=0
    )
    at = y_ptr + first + c[:, None].to(tl.int64) * ROWS + r[None, :]
    tl.store(at, tl.trans(x), mask=tl.trans(inside))


def contiguous_bytes(x: Tensor) -> Tensor:
    """Return uint8 [E, R, C] in contiguous storage: itself, or a copy; of transposed matrices by
    tiles."""
    back = x.transpose(1, 2)
    if x.is_contiguous() or not back.is_contiguous() or x.numel() == 0:
        return x.contiguous()
    experts, rows, columns = back.shape
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    tiles = -(-rows // _BLOCK) * -(-columns // _BLOCK)
    launch(
        _transpose,
        (tiles, experts),
        back,
        out,
        num_warps=4,
        ROWS=rows,
        COLUMNS=columns,
        BLOCK=_BLOCK,
    )
    return out

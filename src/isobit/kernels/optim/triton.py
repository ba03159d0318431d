"""Stochastic rounding from float32 to BF16 on a GPU: the bits of `kernels/optim/definition.py`.

Integers only, so every bit is the reference's. The bound is the memory's speed: an element takes 4
bytes read and 2 written. Left out: the update whose result is rounded, which is PyTorch's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.kernels.optim.definition import check_stochastic
from isobit.kernels.sampling.triton import philox
from isobit.kernels.triton.launch import launch

_COUNTERS = 256  # of a program: 2,048 elements


@triton.jit(do_not_specialize=["count", "first_counter", "step", "low", "high"])
def _round(x_ptr, out_ptr, count, first_counter, step, low, high, COUNTERS: tl.constexpr):
    """Compute 8 · COUNTERS elements of x [count]; `x_ptr` to the bits of float32, `out_ptr` to
    those of BF16."""
    place = tl.program_id(0).to(tl.int64) * COUNTERS
    c0 = (first_counter + place + tl.arange(0, COUNTERS)).to(tl.uint32)
    zero = tl.zeros((COUNTERS,), tl.uint32)
    w0, w1, w2, w3 = philox(
        c0, zero + step.to(tl.uint32), zero, zero, low.to(tl.uint32), high.to(tl.uint32)
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [COUNTERS, 2, 2]: in the order of the words
    noise = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (8 * COUNTERS,))
    at = place * 8 + tl.arange(0, 8 * COUNTERS)
    bits = tl.load(x_ptr + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.minimum((magnitude + noise) >> 16, 0x7F7F)
    rounded = tl.where(
        magnitude < 0x7F800000, rounded, tl.where(magnitude > 0x7F800000, 0x7FC0, 0x7F80)
    )
    tl.store(out_ptr + at, (rounded | (bits >> 16 & 0x8000)).to(tl.int16), mask=at < count)


def round_stochastically(x: Tensor, seed: int, step: int, first: int) -> Tensor:
    """Compute `Ops.round_stochastically`, with random numbers as in
    `isobit.kernels.optim.definition`."""
    check_stochastic(x, first)
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    grid = (triton.cdiv(len(x), 8 * _COUNTERS),)
    given = x.view(torch.int32), out.view(torch.int16), len(x), first // 8, step
    launch(
        _round,
        grid,
        *given,
        seed & 0xFFFFFFFF,
        seed >> 32 & 0xFFFFFFFF,
        num_warps=4,
        COUNTERS=_COUNTERS,
    )
    return out


def square_sums(x: Tensor) -> Tensor:
    """Compute `Ops.square_sums`, in an order of PyTorch's."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square_()

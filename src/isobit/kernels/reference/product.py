"""Matrix products C = A·Bᵀ, the definition: exact FP8 blocks, ordered sums, one rounding.

FP8 operands: for each block of 128 along K, the sum of code products in float64, which is exact for E4M3 (a product
is a multiple of 2^-18 below 2^18, so 128 of them need 43 of float64's 53 bits) and so the same for any shape, thread
count or BLAS; that sum times (scale_a · scale_b), exact in float64 as a product of two float32; the blocks added in
ascending order; the bias; one rounding. With E5M2 operands the block sum is no longer exact, only taken in float64.

Plain BF16 or FP32 operands: products are exact in float64, their sum is taken in float64 in the order of the BLAS, and
rounded once. `fast` is PyTorch's own product over BF16 operands instead.
"""

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.reference.rounding import round_once
from isobit.kernels.types import Operand
from isobit.precision import BLOCK, QTensor, expand_scale


def product(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """a [M, K] · b [N, K]ᵀ + bias [N], float64 inside, rounded once to `out`."""
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        total = _blocks(a, b)
    else:
        total = values(a).double() @ values(b).double().t()
    if bias is not None:
        total = total + bias.double()
    return round_once(total, out)


def fast_product(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """The same product in PyTorch's own arithmetic: BF16 operands unless both are FP32."""
    left, right = values(a), values(b)
    if left.dtype != right.dtype or isinstance(a, QTensor):
        left, right = left.bfloat16(), right.bfloat16()
    return functional.linear(left, right, None if bias is None else bias.to(left.dtype)).to(out)


def values(operand: Operand) -> Tensor:
    """The operand's values: a plain tensor itself, or the dequantized float32 matrix."""
    return operand.dequantize() if isinstance(operand, QTensor) else operand


def _blocks(a: QTensor, b: QTensor) -> Tensor:
    rows_a, rows_b = _row_scales(a), _row_scales(b)
    codes_a, codes_b = a.data.double(), b.data.double()
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for index, start in enumerate(range(0, a.shape[1], BLOCK)):
        stop = start + BLOCK
        dot = codes_a[:, start:stop] @ codes_b[:, start:stop].t()
        scale = rows_a[:, _column(rows_a, index)].unsqueeze(1) * rows_b[:, _column(rows_b, index)].unsqueeze(0)
        total = total + dot * scale
    return total


def _row_scales(operand: QTensor) -> Tensor:
    """Scales with a row each, float64 [rows, blocks along K]; K blocks are 128 long, or one for all of K."""
    block_rows, block_columns = operand.block
    columns = operand.shape[1]
    assert block_columns in (BLOCK, columns), f"scales along K in blocks of {block_columns}"
    scale = operand.scale
    return expand_scale(scale, (block_rows, 1), (operand.shape[0], scale.shape[1])).double()


def _column(scales: Tensor, index: int) -> int:
    return index if scales.shape[1] > 1 else 0

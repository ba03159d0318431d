"""Matrix products C = A·Bᵀ, the definition: exact FP8 blocks, ordered sums, one rounding.

FP8 operands: for each block of 128 along K, the sum of code products in float64, which is exact for
E4M3 (a product is a multiple of 2^-18 below 2^18, so 128 of them need 43 of float64's 53 bits) and
so the same for any shape, thread count or BLAS; that sum times (scale_a · scale_b), exact in
float64 as a product of two float32; the blocks added in ascending order; the bias; one rounding.
Scales of a whole row or tensor repeat for every block of K; the smaller blocks of MXFP8 (32) and
NVFP4 (16) are summed in their own steps. That the bits of a row do not depend on its batch is
*proven* here (`tests/kernels/test_product.py`).

A block with an E5M2 operand can need more than 53 bits (57, or 71 with two). Its codes are split at
magnitude 1, each part's sum is exact (43 bits at most), and the parts are added in a fixed order:
large before small. So this is proven too, and the block sum is rounded once for one E5M2 operand,
not at all for most data.

Plain BF16 or FP32 operands: products are exact in float64, and their sum is that of a fixed tree
over K (`sums.tree_sum`), within ⌈log2 K⌉ · 2^-53 · Σ|a·b| of the true one; a BLAS computes it
wherever that is shown to lead to the same rounding. So this is *proven* too, for finite operands
(`tests/kernels/test_sums.py`). Under `fast` the product is PyTorch's own over BF16 operands, whose
bits do depend on the batch.
"""

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.codes import decode
from isobit.kernels.matrices import Operand, Prepared, StoredWeight, plain, values
from isobit.kernels.ops import Ops
from isobit.kernels.reference.rounding import round_once
from isobit.kernels.reference.sums import product_sums
from isobit.precision import BLOCK, E5M2, PackedFP4, QTensor, expand_scale
from isobit.precision.packed_fp4 import panels


def product(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Return a [M, K] · b [N, K]ᵀ + bias [N], float64 inside, rounded once to `out`: [M, N].

    Both operands quantized: blocks, as above. Else a quantized operand is replaced by its
    dequantized float32 values, and the sum is plain.
    """
    assert a.shape[1] == b.shape[1], f"operands of {a.shape[1]} and {b.shape[1]} columns"
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        scale_a, scale_b = _row_scales(a), _row_scales(b)
        pairs = [(left, right) for left in _exact_parts(a) for right in _exact_parts(b)]
        total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=scale_a.device)
        step = min(BLOCK, a.block[1], b.block[1])
        for start in range(0, a.shape[1], step):
            block = slice(start, start + step)
            dot = pairs[0][0][:, block] @ pairs[0][1][:, block].t()
            for left, right in pairs[1:]:
                dot += left[:, block] @ right[:, block].t()
            left_scale, right_scale = (
                scale_a[:, start // a.block[1]],
                scale_b[:, start // b.block[1]],
            )
            scale = left_scale.unsqueeze(1) * right_scale.unsqueeze(0)
            total += dot.mul_(scale)
        return round_once(total if bias is None else total + bias.double(), out)
    return round_once(product_sums(values(a), values(b), bias, out), out)


def gradient_product(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    """Return `product` in which a row's bits may depend on its batch: plain sums are in the order
    of the BLAS."""
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        return product(a, b, None, out)
    return round_once(values(a).double() @ values(b).double().t(), out)


def fast_product(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Return the same product in PyTorch's own arithmetic: BF16 operands and result, unless both
    operands are plain FP32."""
    left, right = values(a), values(b)
    if left.dtype != right.dtype or isinstance(a, QTensor) or isinstance(b, QTensor):
        left, right = left.bfloat16(), right.bfloat16()
    return functional.linear(left, right, None if bias is None else bias.to(left.dtype)).to(out)


def _exact_parts(operand: QTensor) -> list[Tensor]:
    """Return Float64 matrices that add up to the codes; sums of products of any two such matrices
    over a block are exact."""
    codes = decode(operand.data, operand.spec.format.dtype, torch.float64)
    if operand.spec.format is not E5M2:
        return [codes]
    large = torch.where(codes.abs() >= 1.0, codes, 0.0)
    return [large, codes - large]


def _row_scales(operand: QTensor) -> Tensor:
    """Return one row of scales per row of the operand: float64 [rows, blocks along K]."""
    block_rows, block_columns = operand.block
    columns = operand.shape[1]
    assert block_columns in (16, 32, BLOCK, columns), f"scales along K in blocks of {block_columns}"
    scale = operand.scale
    return expand_scale(scale, (block_rows, 1), (operand.shape[0], scale.shape[1])).double()


def prepare(weight: Operand, into: Prepared | None = None) -> Prepared:
    """Compute `Ops.prepare` of a backend that packs nothing."""
    return weight


def added_product(
    ops: Ops, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """Compute `Ops.gradient_product` by the backend's `product`."""
    gradient = ops.product(a, b, None, out)
    return gradient if into is None else into.add_(gradient)


def input_gradient(ops: Ops, dy: Tensor, weight: StoredWeight, out: torch.dtype) -> Tensor:
    """Return dx [T, K] = dy [T, N] · W [N, K], in `out`, over W's values in dy's type; of two codes
    to a byte some columns at a time."""
    if not isinstance(weight, PackedFP4):
        return ops.gradient_product(dy, plain(weight, dy.dtype).t(), out)
    columns = panels(weight.shape[1], weight.shape[0])
    slices = (plain(weight.part(columns=some), dy.dtype) for some in columns)
    return torch.cat([ops.gradient_product(dy, columns_of.t(), out) for columns_of in slices], 1)

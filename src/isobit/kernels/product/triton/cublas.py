"""Products by cuBLAS: for backwards, which only have to repeat, and for `consistency: fast`.

BF16 and FP32 go to PyTorch's own products; FP8 to `torch.nn.functional.scaled_mm` with the DeepSeek
recipes, which cuBLAS has for Hopper alone. It wants scales of rows M-major and M a multiple of 4,
scales of 128 x 128 blocks K-major and padded to a multiple of 4 along K, K and N multiples of 16
(PyTorch's ScaledBlas.cpp; cuBLAS manual, "Element-1D and 128x128 2D block scaling").
`block_operands` brings operands into that form, with zero codes as padding along K and M.

The bits of a row may depend on the batch: cuBLAS chooses its kernel by shape. Left out: products
that it does not take (`takes`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.matrices import Operand
from isobit.kernels.product.triton.operands import codes_along_inner, padded
from isobit.precision import BLOCK, E4M3, QTensor


@dataclass(frozen=True, eq=False)
class BlockOperands:
    """Operands of a block-scaled product as cuBLAS wants them.

    left [M4, K16] and right [N, K16] E4M3, contiguous; left_scale [M4, L], strides (1, M4), for
    blocks of 1 x 128; right_scale alike, [N, L], or, for blocks of 128 x 128 (`right_blocks`), [L4,
    ceil(N / 128)], strides (1, L4).
    """

    left: Tensor
    right: Tensor
    left_scale: Tensor
    right_scale: Tensor
    right_blocks: bool


def takes(a: Operand, b: Operand, out: torch.dtype) -> bool:
    """Return whether `cublas_product` computes this: plain operands of one type, or blocks that
    fit, on a Hopper GPU."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and (a.dtype, out) != (torch.float32, torch.bfloat16)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return blocks_fit(a, b) and torch.cuda.get_device_capability(a.data.device)[0] == 9


def blocks_fit(a: QTensor, b: QTensor) -> bool:
    """Return whether cuBLAS has a recipe for the blocks of a [M, K] and b [N, K], and b as many
    rows as it wants."""
    inner = a.shape[1]
    e4m3 = a.spec.format is E4M3 and b.spec.format is E4M3
    along = all(
        operand.block[1] == BLOCK or operand.block[1] == inner <= BLOCK for operand in (a, b)
    )
    weights = b.block[0] in (1, BLOCK) or b.block[0] == b.shape[0] < BLOCK
    return (
        e4m3
        and along
        and a.block[0] == 1
        and weights
        and b.shape[0] % 16 == 0
        and inner > 0
        and a.shape[0] > 0
    )


def cublas_product(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Return a [M, K] · b [N, K]ᵀ + bias [N]: [M, N] in `out`, for operands that `takes`
    accepts."""
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        return _blocks(block_operands(a, b), a.shape[0], bias, out)
    assert isinstance(a, Tensor), "a product of one quantized operand"
    assert isinstance(b, Tensor), "a product of one quantized operand"
    if a.dtype == out:
        return functional.linear(a, b, None if bias is None else bias.to(out))
    wide = torch.mm(a, b.t(), out_dtype=out)
    return wide if bias is None else wide + bias


def block_operands(a: QTensor, b: QTensor) -> BlockOperands:
    """Codes padded with zeros to multiples of 4 rows (a) and 16 columns, scales laid out for
    cuBLAS."""
    rows, inner = a.shape
    rows_padded, inner_padded = _up(rows, 4), _up(inner, 16)
    left = padded(codes_along_inner(a), rows_padded, inner_padded)
    right = padded(codes_along_inner(b), b.shape[0], inner_padded)
    by_blocks = b.block[0] != 1
    right_scale = _block_scales(b.scale) if by_blocks else _row_scales(b.scale, b.shape[0])
    return BlockOperands(
        left.view(E4M3.dtype),
        right.view(E4M3.dtype),
        _row_scales(a.scale, rows_padded),
        right_scale,
        by_blocks,
    )


def _blocks(operands: BlockOperands, rows: int, bias: Tensor | None, out: torch.dtype) -> Tensor:
    recipes = functional.ScalingType
    apart = bias if out == torch.float32 else None  # cuBLAS adds no bias to a float32 result
    y = functional.scaled_mm(
        operands.left,
        operands.right.t(),
        operands.left_scale,
        recipes.BlockWise1x128,
        operands.right_scale,
        recipes.BlockWise128x128 if operands.right_blocks else recipes.BlockWise1x128,
        bias=None if bias is None or apart is not None else bias.to(out),
        output_dtype=out,
    )[:rows]
    return y if apart is None else y + apart


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """Scales [R, L] as [rows, L] with strides (1, rows); ones for rows beyond R."""
    if scale.shape[0] == rows and scale.stride() == (1, rows):
        return scale
    laid_out = scale.new_ones((scale.shape[1], rows)).t()
    laid_out[: scale.shape[0]] = scale
    return laid_out


def _block_scales(scale: Tensor) -> Tensor:
    """Scales [ceil(N / 128), L] as [L4, ceil(N / 128)] with strides (1, L4); ones beyond L."""
    if scale.shape[1] % 4 == 0 and scale.is_contiguous():
        return scale.t()
    laid_out = scale.new_ones((scale.shape[0], _up(scale.shape[1], 4)))
    laid_out[:, : scale.shape[1]] = scale
    return laid_out.t()

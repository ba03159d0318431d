"""Quantized operands as products on a GPU take them: known blocks, codes contiguous along K,
strides of scales."""

import torch
from torch import Tensor
from torch.nn import functional

from isobit.errors import IsobitError
from isobit.kernels.triton.transpose import contiguous_bytes
from isobit.precision import BLOCK, E4M3, QTensor


def check_blocks(a: QTensor, b: QTensor) -> None:
    """Raise IsobitError unless a has a scale for each row, b for each row or 128 rows, and both for
    128 columns.

    One scale for all rows or all columns is accepted too.
    """
    for operand, heights in ((a, (1,)), (b, (1, BLOCK))):
        high, wide = operand.block
        known = high in heights or operand.scale.shape[0] == 1
        if operand.spec.format is not E4M3 or not known or wide not in (BLOCK, operand.shape[1]):
            raise IsobitError(
                "backend: triton multiplies e4m3 in blocks of 1x128, and weights also in 128x128, "
                f"not {operand.spec}: choose backend: native or reference"
            )


def codes_along_inner(operand: QTensor) -> Tensor:
    """Codes [R, K] as uint8, contiguous along K, as the matrix unit wants FP8; of a transposed
    view, a copy."""
    codes = operand.data.view(torch.uint8)
    return codes if codes.stride(1) == 1 else contiguous_bytes(codes.unsqueeze(0))[0]


def padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Codes padded with zeros to `rows` and `columns`, contiguous; the same memory if they stand in
    it so.

    Rows of a whole storage that are a few bytes longer than K, to a multiple of 16, are those of
    `quantize_along_tokens`, which writes zeros there.
    """
    high, wide = codes.shape
    whole = codes.untyped_storage().nbytes() == high * columns and codes.storage_offset() == 0
    if (high, codes.stride()) == (rows, (columns, 1)) and columns == -(-wide // 16) * 16 and whole:
        return codes.as_strided((rows, columns), (columns, 1))
    if codes.shape != (rows, columns):
        return functional.pad(codes, (0, columns - wide, 0, rows - high))
    return codes.contiguous()


def row_stride(x: Tensor) -> int:
    """Distance of neighbouring rows of x [R, C]; of a single row C, since its stride may be
    anything: kernels are compiled for the divisibility of strides, and one row shall not need
    another kernel than two."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def scale_strides(scale: Tensor, rows: int) -> tuple[int, int]:
    """Return the distances of the scales of neighbouring rows or blocks of rows, and of
    neighbouring blocks along K; 0 where shared."""
    shared = scale.shape[0] == 1 and rows > 1
    return 0 if shared else row_stride(scale), scale.stride(1) if scale.shape[1] > 1 else 0

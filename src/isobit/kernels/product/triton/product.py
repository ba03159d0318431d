"""Matrix products on a GPU: FP8 blocks, BF16, FP32; the bits of a row do not depend on its batch.

FP8 (`block_product`): a block of 128 along K is summed by the matrix unit from zero, times (scale_a
· scale_b), and added in ascending order in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3).
Hopper's FP8 unit aligns the products of an instruction and keeps 13 to 14 bits of them (same
section), so a block sum is not exact on a GPU. Plain operands (`plain_product`): float32 sums over
ascending K. Long K over few columns is summed in chunks, as `plan.py` says. With one operand
quantized and one plain, the product is that of the float32 values, as in the reference, and of
NVFP4 weights next to BF16 that of values in BF16; nibbles are decoded as they are loaded
(`nibble_product`), with the bits of `plain_product` over the values.

Tests: tests/kernels/triton/test_product.py. Left out: cuBLAS (`cublas.py`), experts (grouped
products).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.matrices import Operand, Prepared, is_rounded, values, weight_of
from isobit.kernels.product.triton import cublas
from isobit.kernels.product.triton.kernels import (
    block_product,
    nibble_product,
    ordered_sum,
    plain_product,
)
from isobit.kernels.product.triton.operands import (
    check_blocks,
    codes_along_inner,
    padded,
    row_stride,
    scale_strides,
)
from isobit.kernels.product.triton.plan import FEW_ROWS, ProductPlan, plan
from isobit.kernels.triton.launch import launch
from isobit.precision import PackedFP4, QTensor

_OUTPUTS = (torch.bfloat16, torch.float32)
_SUM_BLOCK = 1024


def product(
    a: Operand,
    b: Prepared,
    bias: Tensor | None = None,
    out: torch.dtype = torch.bfloat16,
    into: Tensor | None = None,
) -> Tensor:
    """Return a [M, K] · b [N, K]ᵀ + bias [N], float32 sums, rounded once to `out` (bfloat16 or
    float32): [M, N]; or added to `into` [M, N] float32, contiguous, which is the result then.

    Both quantized: E4M3, a with a scale per row (1x128), b the same or 128x128. Raises IsobitError
    for other blocks.
    """
    assert into is None or (into.dtype == out == torch.float32 and into.is_contiguous())
    assert a.shape[1] == b.shape[1], f"operands of {a.shape[1]} and {b.shape[1]} columns"
    assert out in _OUTPUTS, f"a product has no result in {out}"
    if isinstance(b, PackedFP4):
        return _nibbles(a, b, bias, out, into)
    whole, b = b.shape[0], weight_of(b)
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        return _blocks(a, b, whole, bias, out, into)
    left, right = values(a), values(b)
    if isinstance(b, QTensor) and is_rounded(a, b.spec):
        right = right.bfloat16()
    if left.dtype != right.dtype:
        left, right = left.float(), right.float()
    return _plain(left, right, whole, bias, out, into)


def gradient_product(
    a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """Compute `product` for a backward, which must repeat but may depend on the batch: by cuBLAS
    where it can.

    cuBLAS's result is added to `into` afterwards: its block-scaled products add to nothing, and
    another product may divide K otherwise when it is told to add, so a gradient would depend on how
    many ranks share its micro-batches.
    """
    device = a.device if isinstance(a, Tensor) else a.data.device
    if device.type == "cuda" and cublas.takes(a, b, out):
        gradient = cublas.cublas_product(a, b, None, out)
        return gradient if into is None else into.add_(gradient)
    return product(a, b, None, out, into)


def _blocks(
    a: QTensor,
    b: QTensor,
    whole: int,
    bias: Tensor | None,
    out: torch.dtype,
    into: Tensor | None,
) -> Tensor:
    check_blocks(a, b)
    left, right = codes_along_inner(a), codes_along_inner(b)
    inner = -(-a.shape[1] // 16) * 16
    if (
        inner != a.shape[1]
    ):  # zero codes, so that rows start at multiples of 16 bytes and are loaded so
        left, right = padded(left, a.shape[0], inner), padded(right, b.shape[0], inner)
    sizes = (a.shape[0], b.shape[0], inner)
    # many rows: scales of neighbouring rows side by side, so that a tile's are loaded from one
    # address; quantizers write them so (`quantize.empty`), and nothing is copied
    scale = a.scale if sizes[0] <= FEW_ROWS else a.scale.t().contiguous().t()
    strides = (
        row_stride(left),
        *scale_strides(scale, sizes[0]),
        row_stride(right),
        *scale_strides(b.scale, sizes[1]),
    )
    row_scales = b.block[0] == 1
    chosen = plan(*sizes, torch.uint8, row_scales, whole)
    constants = {"EVEN_K": sizes[2] % chosen.step == 0, "B_ROW_SCALES": row_scales,
        "TOKENS_FIRST": chosen.tokens_first}  # fmt: skip
    return _run(
        block_product,
        chosen,
        (left, scale, right, b.scale),
        bias,
        out,
        into,
        sizes,
        strides,
        constants,
    )


def _plain(
    a: Tensor,
    b: Tensor,
    whole: int,
    bias: Tensor | None,
    out: torch.dtype,
    into: Tensor | None,
) -> Tensor:
    assert a.dtype in _OUTPUTS, f"a product of {a.dtype}"
    sizes = (a.shape[0], b.shape[0], a.shape[1])
    chosen = plan(*sizes, a.dtype, False, whole)
    constants = {"EVEN_K": sizes[2] % chosen.step == 0, "BLOCK_K": chosen.step}
    strides = (row_stride(a), a.stride(1), row_stride(b), b.stride(1))
    return _run(plain_product, chosen, (a, b), bias, out, into, sizes, strides, constants)


def _nibbles(
    a: Operand, b: PackedFP4, bias: Tensor | None, out: torch.dtype, into: Tensor | None
) -> Tensor:
    if isinstance(a, QTensor):
        raise IsobitError(
            "backend: triton multiplies nvfp4 weights with plain activations: choose backend: "
            "native"
        )
    assert a.dtype in _OUTPUTS, f"a product of {a.dtype}"
    sizes = (a.shape[0], b.shape[0], a.shape[1])
    chosen = plan(*sizes, a.dtype)
    constants = {"EVEN_K": sizes[2] % chosen.step == 0, "BLOCK_K": chosen.step}
    strides = (row_stride(a), a.stride(1))
    return _run(nibble_product, chosen, (a, *b.tensors), bias, out, into, sizes, strides, constants)


def _run(
    kernel: Any,
    chosen: ProductPlan,
    operands: tuple[Tensor, ...],
    bias: Tensor | None,
    out: torch.dtype,
    into: Tensor | None,
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    constants: Mapping[str, object],
) -> Tensor:
    """Launch a product, and the sum of its chunks where they are apart."""
    rows, columns, inner = sizes
    device = operands[0].device
    bias = None if bias is None else bias.contiguous()
    y = torch.empty((rows, columns), dtype=out, device=device) if into is None else into
    partials = (
        torch.empty((chosen.splits, rows, columns), dtype=torch.float32, device=device)
        if chosen.apart
        else y
    )
    tiles = -(-rows // chosen.tile_m) * -(-columns // chosen.tile_n)
    launch(
        kernel, (tiles, chosen.splits if chosen.apart else 1), *operands, bias, partials, rows,
        columns, inner, *strides,
        -(-inner // chosen.step), chosen.chunk, num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        BLOCK_N=chosen.tile_n, BLOCK_M=chosen.tile_m,
        IN_CHUNKS=chosen.splits > 1 and not chosen.apart,
        HAS_BIAS=bias is not None, PARTIAL=chosen.apart, ADD=into is not None, **constants,
    )  # fmt: skip
    if chosen.apart:
        launch(
            ordered_sum, (-(-columns // _SUM_BLOCK), rows), partials, bias, y, rows, columns,
            num_warps=4,
            SPLITS=chosen.splits, HAS_BIAS=bias is not None, ADD=into is not None, BLOCK=_SUM_BLOCK,
        )  # fmt: skip
    return y

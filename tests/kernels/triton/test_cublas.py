"""What cuBLAS is given: shapes, strides, values, here; its products against the float64 oracle, on
a GPU."""

import pytest
import torch
from torch import Tensor

from isobit.kernels.product.definition import product as reference_product
from isobit.kernels.product.triton.cublas import block_operands, blocks_fit, cublas_product, takes
from isobit.kernels.product.triton.product import product
from isobit.precision import E4M3, E5M2, QTensor, QuantSpec, quantize

from ..helpers import draw, same
from .helpers import DEVICE, HAS_GPU, there
from .test_product import ROWS, ROWS32, WEIGHT, WEIGHT32, block_error, check_close, needs_gpu, whole

SIZES = [(1, 256, 384), (6, 48, 1664), (130, 144, 200), (4, 16, 40), (64, 1024, 512)]


@pytest.mark.parametrize("spec", [WEIGHT32, ROWS32])
@pytest.mark.parametrize(("rows", "columns", "inner"), SIZES)
def test_operands_have_the_layouts_of_cublas(
    rows: int, columns: int, inner: int, spec: QuantSpec
) -> None:
    a, b = quantize(draw(0, rows, inner), ROWS32), quantize(draw(1, columns, inner), spec)
    found = block_operands(a, b)
    high, wide = -(-rows // 4) * 4, -(-inner // 16) * 16
    blocks = -(-inner // 128)
    assert found.left.shape == (high, wide)
    assert found.right.shape == (columns, wide)
    assert found.left.is_contiguous()
    assert found.right.is_contiguous()
    assert found.left_scale.shape == (high, blocks)
    assert found.left_scale.stride() == (1, high)
    if spec is WEIGHT32:
        padded = -(-blocks // 4) * 4
        assert found.right_blocks
        assert found.right_scale.shape == (padded, -(-columns // 128))
        assert found.right_scale.stride() == (1, padded)
        assert same(found.right_scale.t()[:, :blocks].contiguous(), b.scale)
    else:
        assert found.right_scale.shape == (columns, blocks)
        assert found.right_scale.stride() == (1, columns)
        assert same(found.right_scale.contiguous(), b.scale)
    assert same(found.left_scale[:rows].contiguous(), a.scale)
    assert bool((found.left_scale[rows:] == 1).all())
    for laid_out, codes in ((found.left, a.data), (found.right, b.data)):
        assert same(laid_out[: codes.shape[0], :inner].contiguous(), codes)
        beyond = laid_out.view(torch.uint8).long().sum() - codes.view(torch.uint8).long().sum()
        assert int(beyond) == 0, "padding is zero codes"


def test_transposed_views_are_laid_out_as_their_copies() -> None:
    weight, a, other_weight = (
        there(quantize(draw(seed, *shape), spec))
        for seed, shape, spec in (
            (1, (256, 136), WEIGHT),
            (0, (5, 256), ROWS),
            (2, (136, 256), WEIGHT),
        )
    )
    view = weight.transpose()
    copied = QTensor(view.data.contiguous(), view.scale.contiguous(), view.spec)
    for one, other in zip(
        vars(block_operands(a, view)).values(), vars(block_operands(a, copied)).values()
    ):
        assert same(one, other) if isinstance(one, Tensor) else one == other
    assert not same(block_operands(a, view).right, block_operands(a, other_weight).right)


def test_scales_that_lie_right_are_not_copied() -> None:
    a, b = whole(0, 8, 256, ROWS), whole(1, 32, 256, ROWS)
    across = QTensor(a.data, a.scale.t().contiguous().t(), a.spec)
    found = block_operands(across, b)
    assert found.left_scale.data_ptr() == across.scale.data_ptr()
    assert found.left.data_ptr() == across.data.data_ptr()
    assert block_operands(a, b).left_scale.data_ptr() != a.scale.data_ptr()


def test_what_is_taken() -> None:
    a, b = quantize(draw(0, 4, 256), ROWS), quantize(draw(1, 16, 256), WEIGHT)
    assert blocks_fit(a, b)
    assert blocks_fit(a, quantize(draw(1, 32, 256), ROWS))
    assert not blocks_fit(a, quantize(draw(1, 20, 256), WEIGHT))
    assert not blocks_fit(quantize(draw(0, 130, 256), WEIGHT), quantize(draw(1, 144, 256), WEIGHT))
    for spec in (QuantSpec(E5M2, "1x128"), QuantSpec(E4M3, "1x32"), QuantSpec(E4M3, "row")):
        assert not blocks_fit(quantize(draw(0, 4, 256), spec), b)
    x = draw(0, 4, 64)
    assert takes(x, x, torch.float32)
    assert not takes(x, b, torch.bfloat16)
    assert not takes(x, x.float(), torch.float32)


def test_plain_products_with_a_bias() -> None:
    a, b, bias = whole(0, 4, 64), whole(1, 24, 64), whole(2, 1, 24)[0]
    found = cublas_product(a.to(DEVICE), b.to(DEVICE), bias.to(DEVICE), torch.bfloat16).cpu()
    assert same(found, reference_product(a, b, bias, torch.bfloat16))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [WEIGHT32, ROWS32])
@pytest.mark.parametrize(("rows", "columns", "inner"), SIZES)
def test_blocks_are_within_the_bound(
    rows: int, columns: int, inner: int, spec: QuantSpec, out: torch.dtype
) -> None:
    a = quantize(draw(0, rows, inner), ROWS32)
    b = quantize(draw(1, columns, inner), spec)
    bias = draw(2, columns)
    assert takes(there(a), there(b), out)
    found = cublas_product(there(a), there(b), bias.to(DEVICE), out).cpu()
    # two roundings to BF16 at most, where the bias is added apart
    check_close(found, a, b, bias, block_error(a, b), inner // 128 + 8)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("spec", [WEIGHT32, ROWS32])
def test_bits_beside_those_of_the_triton_kernel(
    spec: QuantSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record, not a claim: how many elements of cuBLAS's product have other bits, and how far
    apart they are."""
    assert HAS_GPU
    for rows, columns, inner in ((4, 1024, 1024), (64, 4096, 1024), (4096, 4096, 4096)):
        a = quantize(draw(0, rows, inner).to(DEVICE), ROWS32)
        b = quantize(draw(1, columns, inner).to(DEVICE), spec)
        theirs, ours = (f(a, b, None, torch.float32) for f in (cublas_product, product))
        other = int((theirs != ours).sum())
        with capsys.disabled():
            print(f"\ncuBLAS {rows}x{columns}x{inner} {spec.granularity}: {other} of "
                f"{ours.numel()} bits differ, "
                  f"by {float((theirs - ours).abs().max() / ours.abs().max()):.1e}")  # fmt: skip
        assert bool(theirs.isfinite().all())

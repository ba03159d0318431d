"""C++ beside the definition: codes along the other dimension, and what quantization does to a
matrix."""

import pytest
import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels import Operand, get_ops
from isobit.kernels.native import available
from isobit.precision import E4M3, E5M2, QTensor, QuantSpec, error_sums, quantize

from .helpers import draw, same, threads

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

NATIVE, REFERENCE = get_ops("native"), get_ops("reference")
SHAPES = ((1, 1), (3, 16), (127, 40), (128, 128), (129, 257), (300, 384), (513, 17))
SCALES = ("fp32", "ue8m0")


def coded(
    seed: int, shape: tuple[int, int], spec: QuantSpec, dtype: torch.dtype = torch.bfloat16
) -> QTensor:
    return quantize(draw(seed, *shape, dtype=dtype, spread=2.0), spec)


def equal(a: QTensor, b: QTensor) -> bool:
    return a.spec == b.spec and same(a.data, b.data) and same(a.scale, b.scale)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("granularity", ["1x128", "row"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_codes_along_the_tokens_are_those_of_the_values(
    granularity: str, scale: str, num_threads: int
) -> None:
    spec = QuantSpec(E4M3, granularity, scale)
    for seed, shape in enumerate(SHAPES):
        x = coded(seed, shape, spec)
        with threads(num_threads):
            found = NATIVE.quantize_along_tokens(x, spec, "x")
        assert equal(found, REFERENCE.quantize_along_tokens(x, spec, "x")), shape
    # the control: a scale that is a unit in the last place larger is noticed
    other = QTensor(x.data, x.scale.nextafter(x.scale + 1), spec)
    assert not equal(NATIVE.quantize_along_tokens(other, spec, "x"), found)


def test_other_codes_go_to_the_definition() -> None:
    spec = QuantSpec(E5M2, "1x128", "ue8m0")
    x = coded(3, (200, 100), spec)
    assert equal(
        NATIVE.quantize_along_tokens(x, spec, "x"), REFERENCE.quantize_along_tokens(x, spec, "x")
    )
    tiles = QuantSpec(E4M3, "128x128", "ue8m0")
    x = coded(4, (200, 100), tiles)
    assert equal(
        NATIVE.quantize_along_tokens(x, tiles, "x"), REFERENCE.quantize_along_tokens(x, tiles, "x")
    )


def test_no_tokens_and_infinite_values() -> None:
    spec = QuantSpec(E4M3, "1x128", "fp32")
    none = coded(0, (0, 40), spec)
    assert equal(
        NATIVE.quantize_along_tokens(none, spec, "x"),
        REFERENCE.quantize_along_tokens(none, spec, "x"),
    )
    x = coded(1, (130, 40), spec)
    huge = QTensor(x.data, torch.full_like(x.scale, 1e38), spec)
    with pytest.raises(NonFiniteError, match="tokens"):
        NATIVE.quantize_along_tokens(huge, spec, "tokens")


def given(kind: str, shape: tuple[int, int]) -> tuple[Operand, Tensor]:
    """A matrix as an operator has it, and its values."""
    if kind == "codes":
        found = coded(5, shape, QuantSpec(E4M3, "1x128", "fp32"))
        return found, found.dequantize()
    x = draw(6, *shape, dtype=torch.float32 if kind == "fp32" else torch.bfloat16, spread=3.0)
    x[0] = 0.0
    return x, x


@pytest.mark.parametrize("granularity", ["1x128", "128x128", "128x1", "row", "tensor"])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "codes"])
def test_error_sums_are_the_definitions(kind: str, granularity: str) -> None:
    for shape in SHAPES:
        x, wide = given(kind, shape)
        spec = QuantSpec(E4M3, granularity, "fp32")
        exact = quantize(wide, spec)
        small = QTensor(exact.data, exact.scale / 64, spec)  # saturates
        for quantized in (exact, small):
            wanted, found = error_sums(wide, quantized), NATIVE.error_sums(x, quantized)
            assert found.count == wanted.count
            assert found.counts.tolist() == wanted.counts.tolist()
            torch.testing.assert_close(found.squares, wanted.squares, rtol=1e-12, atol=0.0)
    assert wanted.counts[0] > 0
    assert wanted.counts[1] > 0 or kind == "codes"
    # the control: the wrong sign of one code shows in the sums
    data = small.data.clone()
    data.view(torch.uint8).view(-1)[wide.abs().argmax()] ^= 0x80
    other = NATIVE.error_sums(x, QTensor(data, small.scale, spec)).squares[1]
    assert not torch.allclose(other, found.squares[1], rtol=1e-9, atol=0.0)


def test_error_sums_do_not_depend_on_threads() -> None:
    x = draw(8, 1000, 200, spread=2.0)
    quantized = quantize(x, QuantSpec())
    one = NATIVE.error_sums(x, quantized)
    with threads(2):
        two = NATIVE.error_sums(x, quantized)
    assert same(one.counts, two.counts)
    assert same(one.squares, two.squares)

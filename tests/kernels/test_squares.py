"""The squares of a gradient: C++ beside PyTorch, in bits, and both beside exact sums."""

import math

import pytest
import torch
from torch import Tensor

from isobit.kernels import Ops
from isobit.kernels.native import available

from .helpers import same, threads

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

SHAPES = ((1, 1), (5, 1), (3, 2), (130, 3), (129, 16), (7, 33), (257, 1000), (2, 4099), (0, 8))


def gradient(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return (
        torch.randn(rows, columns, generator=generator)
        * torch.randn(rows, 1, generator=generator).mul(20).exp2()
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_both_backends_have_the_same_bits(
    shape: tuple[int, int], num_threads: int, native: Ops, reference: Ops
) -> None:
    x = gradient(*shape)
    with threads(num_threads):
        found = native.square_sums(x)
    assert same(found, reference.square_sums(x))
    exact = [math.fsum(v * v for v in row) for row in x.double().tolist()]
    torch.testing.assert_close(
        found, torch.tensor(exact, dtype=torch.float64), rtol=16 * 2.0**-53, atol=0
    )


def test_another_order_has_other_bits(native: Ops) -> None:
    """The control: columns in reverse, of the same sum."""
    x = gradient(257, 1000)
    assert not same(native.square_sums(x), native.square_sums(x.flip(1)))


def test_parts_of_a_matrix_and_what_is_not_finite(native: Ops, reference: Ops) -> None:
    x = gradient(8, 64)
    assert same(native.square_sums(x[:, 3:40]), reference.square_sums(x[:, 3:40].contiguous()))
    assert same(native.square_sums(x[2:5]), native.square_sums(x)[2:5])
    x[1, 5], x[2, 0], x[3, 63] = math.nan, math.inf, 3e38
    found = native.square_sums(x)
    assert found[1].isnan()
    assert found[2] == math.inf
    assert found[3].isfinite()

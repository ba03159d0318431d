"""Triton's products of NVFP4 weights with two codes to a byte: the bits of the same kernels over
the weights' values.

The control is the weight with the halves of its bytes exchanged. No part of this has run on a GPU
yet.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Stacked, grouped_input_gradient, input_gradient
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.product.triton.plan import plan
from isobit.kernels.product.triton.product import product
from isobit.precision import E2M1, PackedFP4, QTensor, QuantSpec, packed_fp4, quantize

from ..helpers import draw, same
from ..test_packed_fp4 import matrices
from .helpers import DEVICE, there

SHAPES = ((1, 5, 32), (9, 40, 304), (70, 20, 144), (17, 16, 512), (66, 16, 512))
"""M, N, K: few rows and many, ragged tiles, K that fills no step, and chunks of K, apart and in one
program."""


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps("bitwise", "in a test", DEVICE)


def moved(weight: PackedFP4) -> PackedFP4:
    return PackedFP4(*(there(part) for part in weight.tensors))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns", "inner"), SHAPES)
def test_products_have_the_bits_of_the_values(rows: int, columns: int, inner: int) -> None:
    wide, found, wrong = matrices(1, columns, inner)
    for a in (there(draw(2, rows, inner)), there(draw(2, rows, inner).float() * 1.1)):
        for bias, out in ((None, torch.float32), (draw(4, columns).to(DEVICE), torch.float32)):
            wanted = product(a, there(wide), bias, out)
            assert same(product(a, moved(found), bias, out), wanted)
        assert not torch.equal(product(a, moved(wrong)), product(a, there(wide)))


def test_chunks_of_k_are_among_the_shapes() -> None:
    found = [plan(*shape, torch.float32) for shape in SHAPES]
    assert [(each.splits > 1, each.apart) for each in found] == [
        *[(False, False)] * 3,
        (True, True),
        (True, False),
    ]


def test_gradients_and_experts_have_the_bits_of_the_values(
    ops: TritonOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_fp4, "_PANEL", 1 << 11)
    three = [matrices(seed, 40, 96) for seed in range(3)]
    wide, found, wrong = three[0]
    dy = there(draw(7, 11, 40))
    wanted = input_gradient(ops, dy, there(wide), torch.float32)
    torch.testing.assert_close(
        input_gradient(ops, dy, moved(found), torch.float32), wanted, rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(
        input_gradient(ops, dy, moved(wrong), torch.float32), wanted, rtol=0.1
    )
    biases = there(draw(5, 3, 40))
    stacks = (
        Stacked.of(each, 3) for each in zip(*((there(w), moved(f), moved(x)) for w, f, x in three))
    )
    wide_stack, stack, wrong_stack = (replace(each, bias=biases) for each in stacks)
    offsets, x = torch.tensor([0, 4, 4, 11], device=DEVICE), there(draw(6, 11, 96))

    def forward(weights: Stacked) -> Tensor:
        return ops.grouped_product(x, weights, offsets, torch.float32)

    assert same(forward(stack), forward(wide_stack))
    assert not torch.equal(forward(wrong_stack), forward(wide_stack))
    backward = grouped_input_gradient(ops, dy, replace(wide_stack, bias=None), offsets)
    assert same(grouped_input_gradient(ops, dy, replace(stack, bias=None), offsets), backward)
    assert not torch.equal(
        grouped_input_gradient(ops, dy, replace(wrong_stack, bias=None), offsets), backward
    )


def test_what_is_quantized_here_is_the_references(ops: TritonOps) -> None:
    x = draw(1, 40, 96)
    found, wanted = ops.quantize(there(x), packed_fp4.NVFP4), quantize(x, packed_fp4.NVFP4)
    assert same(found.data.view(torch.uint8).cpu(), wanted.data.view(torch.uint8))
    assert same(found.scale.cpu(), wanted.scale)


def test_activations_of_four_bits_are_refused(ops: TritonOps) -> None:
    a = quantize(draw(1, 3, 96), QuantSpec(E2M1, "1x16", "nvfp4-row"))
    _, found, _ = matrices(1, 40, 96)
    given = QTensor(there(a.data.view(torch.uint8)).view(a.data.dtype), there(a.scale), a.spec)
    for call in (
        lambda: ops.product(given, moved(found)),
        lambda: ops.grouped_product(
            given, Stacked.of([moved(found)], 1), torch.tensor([0, 3], device=DEVICE), torch.float32
        ),
    ):
        with pytest.raises(
            IsobitError, match="nvfp4 weights with plain activations: choose backend: native"
        ):
            call()

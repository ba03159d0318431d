"""Products of weights with two codes to a byte: the bits of the same weights a byte a code, on both
CPU backends, and never the whole weight unpacked. The control everywhere is the weight with the
halves of its bytes exchanged."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isobit.kernels import (
    Ops,
    Stacked,
    get_ops,
    grouped_input_gradient,
    inference_engine_ops,
    input_gradient,
)
from isobit.kernels.backends.native import NativeOps
from isobit.kernels.matrices import Operand
from isobit.kernels.native import available
from isobit.kernels.product.ordered import rounded
from isobit.precision import E2M1, E4M3, PackedFP4, QTensor, QuantSpec, packed_fp4, quantize
from isobit.precision.packed_fp4 import NVFP4, packed
from tests.kernels.test_ordered import HERE

from .helpers import draw, same, threads
from .libraries import library_of

BACKENDS = ("reference", *(["native"] if available()[0] else []))
needs_native = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")
ROW = QuantSpec(E2M1, "1x16", "nvfp4-row")
OTHER = QuantSpec(E4M3, "1x32", "ue8m0")
SHAPES = ((1, 5, 32), (9, 40, 304), (37, 130, 144), (257, 48, 160))
"""M, N, K: single rows, ragged panels of 16, K that fills no block of 128."""
OUTPUTS = (torch.bfloat16, torch.float32)


def matrices(seed: int, rows: int, columns: int) -> tuple[QTensor, PackedFP4, PackedFP4]:
    """A weight a byte a code, two codes to a byte, and with exchanged halves."""
    x = draw(seed, rows, columns, dtype=torch.float32, spread=2.0)
    x[rows // 2, :16] = 0
    quantized = quantize(x, NVFP4)
    found = packed(quantized, x)
    return quantized, found, replace(found, codes=found.codes << 4 | found.codes >> 4)


def activations(rows: int, inner: int) -> dict[str, Operand]:
    x = draw(2, rows, inner, spread=1.0)
    return {
        "bf16": x,
        "fp32": x.float() * 1.1,
        "nvfp4": quantize(x, ROW),
        "mxfp8": quantize(x, OTHER),
    }


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Elements that were unpacked at a time; parts are small, so that small weights have
    several."""
    seen: list[int] = []
    unpacked = packed_fp4.unpacked

    def noted(codes: Tensor) -> Tensor:
        seen.append(2 * codes.numel())
        return unpacked(codes)

    monkeypatch.setattr(packed_fp4, "unpacked", noted)
    monkeypatch.setattr("isobit.kernels.matrices.unpacked", noted)
    monkeypatch.setattr(packed_fp4, "_PANEL", 1 << 11)
    return seen


@pytest.mark.parametrize("consistency", ["bitwise", "exact", "fast"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_products_have_the_bits_of_a_byte_a_code(
    backend: str, consistency: str, parts: list[int]
) -> None:
    """Under `fast`, which promises no bits, to a float32's rounding."""
    ops = get_ops(backend, consistency)
    for rows, columns, inner in SHAPES:
        wide, found, wrong = matrices(1, columns, inner)
        bias = draw(4, columns)
        for name, a in activations(rows, inner).items():
            for out in OUTPUTS:
                for added in (None, bias):
                    wanted = ops.product(a, wide, added, out)
                    ours = ops.product(a, found, added, out)
                    if consistency == "fast":
                        torch.testing.assert_close(ours, wanted)
                    else:
                        assert same(ours, wanted), (name, rows, columns, inner)
            assert not torch.equal(ops.product(a, wrong), ops.product(a, wide))
    assert max(parts, default=0) <= max(1 << 11, 16 * 304)


@needs_native
def test_c_reads_nibbles_as_they_are_stored(parts: list[int]) -> None:
    """Against plain activations and codes in blocks of 16 nothing is unpacked before; the control
    has other blocks."""
    ops = get_ops("native")
    _, found, _ = matrices(1, 40, 304)
    given = activations(9, 304)
    for name in ("bf16", "fp32", "nvfp4"):
        ops.product(given[name], found)
    assert parts == []
    ops.product(given["mxfp8"], found)
    assert len(parts) > 1


@needs_native
def test_rows_are_independent_and_threads_change_nothing() -> None:
    ops = get_ops("native")
    _, found, _ = matrices(1, 300, 144)
    for a in (draw(2, 200, 144), draw(2, 200, 144).float()):
        with threads(1):
            one = ops.product(a, found, None, torch.float32)
        with threads(2):
            assert same(ops.product(a, found, None, torch.float32), one)
        for i in (0, 63, 199):
            alone = ops.product(a[i : i + 1], found, None, torch.float32)
            assert same(alone, one[i : i + 1])


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64", "-DISOBIT_PORTABLE"])
def test_every_instruction_set_has_these_bits(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, other = NativeOps("exact"), NativeOps("exact")
    other.lib = library_of(("product/product.cpp",), tmp_path, f"-O0 {flags}", monkeypatch)
    for rows, columns, inner in SHAPES:
        _, found, wrong = matrices(1, columns, inner)
        for name, a in activations(rows, inner).items():
            if name != "mxfp8":
                wanted = ops.product(a, found, None, torch.float32)
                assert same(other.product(a, found, None, torch.float32), wanted), name
                assert not torch.equal(other.product(a, wrong, None, torch.float32), wanted)


@needs_native
@pytest.mark.parametrize(("order", "isa"), HERE)
@pytest.mark.parametrize("scale", [1.0, 2.0**-123])
def test_beside_bf16_they_are_rounded_and_added_in_order(
    scale: float, order: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As BF16 weights that are those numbers, on every instruction set and in PyTorch; some of them
    are subnormal. The control's are not rounded."""
    monkeypatch.setenv("ISOBIT_ISA", isa)
    ops, slow = NativeOps(f"bitwise-{order}"), get_ops("reference", f"bitwise-{order}")
    for rows, columns, inner in (*SHAPES, (1, 40, 4112), (4, 33, 528)):
        x = draw(1, columns, inner, dtype=torch.float32, spread=2.0) * scale
        x[columns // 2, :16] = 0
        wide = quantize(x, NVFP4)
        found, a, bias = packed(wide, x), draw(2, rows, inner), draw(4, columns)
        for out in OUTPUTS:
            ours = ops.product(a, found, bias, out)
            assert same(ours, ops.product(a, rounded(found), bias, out))
            assert same(ours, ops.product(a, wide, bias, out))
            if rows * columns * inner < 1 << 17:
                assert same(ours, slow.product(a, found, bias, out))
        exact = get_ops("native", "exact").product(a, found, None, torch.float32)
        assert scale < 1 or not same(ops.product(a, found, None, torch.float32), exact)
    assert scale == 1 or ((wide.dequantize() != 0) & (rounded(found) == 0)).any()


LARGEST, SMALLEST = 2.0**115, 2.0**-116


@needs_native
@pytest.mark.parametrize(("order", "isa"), HERE)
@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("common", [0.011, SMALLEST, SMALLEST / 4, LARGEST, 2 * LARGEST])
def test_any_codes_and_scales_are_the_products_of_both(
    common: float, signs: bool, order: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every byte, also at both ends of what integers can add to a scale's exponent; scales with
    signs are no quantizer's, but a file may have them. In the control two neighbours are
    exchanged."""
    monkeypatch.setenv("ISOBIT_ISA", isa)
    ops = NativeOps(f"bitwise-{order}")
    random = torch.Generator().manual_seed(3)
    for rows, columns, inner in ((1, 96, 384), (7, 33, 272), (20, 16, 144)):
        codes = torch.randint(256, (columns, inner // 2), dtype=torch.uint8, generator=random)
        scales = torch.randint(127, (columns, inner // 16), dtype=torch.uint8, generator=random)
        if signs:
            scales[::5] |= 128
        found = PackedFP4(codes, scales, torch.tensor([common]))
        a = draw(2, rows, inner) * (2.0**-20 if common > 1 else 2.0**20)
        right = ops.product(a, rounded(found), None, torch.float32)
        assert right.isfinite().all()
        assert same(ops.product(a, found, None, torch.float32), right)
        other = replace(found, codes=codes.roll(1, 1))
        assert not same(ops.product(a, other, None, torch.float32), right)


@pytest.mark.parametrize("consistency", ["bitwise", "exact"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_inputs_have_the_bits_of_a_byte_a_code(
    backend: str, consistency: str, parts: list[int]
) -> None:
    """dy · W over W's values in dy's type, of some columns of W at a time."""
    ops = get_ops(backend, consistency)
    wide, found, wrong = matrices(1, 130, 304)
    for dy in (draw(3, 9, 130), draw(3, 9, 130).float()):
        for out in OUTPUTS:
            wanted = input_gradient(ops, dy, wide, out)
            assert same(input_gradient(ops, dy, found, out), wanted)
            assert not torch.equal(input_gradient(ops, dy, wrong, out), wanted)
    assert max(parts) <= max(1 << 11, 16 * 130)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_have_the_bits_of_a_byte_a_code(
    backend: str, biased: bool, parts: list[int]
) -> None:
    ops: Ops = get_ops(backend)
    three = [matrices(seed, 40, 96) for seed in range(3)]
    wide, found, wrong = (Stacked.of(each, 3) for each in zip(*three))
    if biased:
        wide, found, wrong = (replace(each, bias=draw(5, 3, 40)) for each in (wide, found, wrong))
    assert found.shape == wide.shape == (3, 40, 96)
    assert all(isinstance(one, PackedFP4) for one in found.experts)
    offsets = torch.tensor([0, 4, 4, 11])
    x, dy = draw(6, 11, 96), draw(7, 11, 40)
    for a in (x, quantize(x, ROW)):
        wanted = ops.grouped_product(a, wide, offsets, torch.bfloat16)
        assert same(ops.grouped_product(a, found, offsets, torch.bfloat16), wanted)
        assert not torch.equal(ops.grouped_product(a, wrong, offsets, torch.bfloat16), wanted)
    wanted = grouped_input_gradient(ops, dy, wide, offsets)
    assert same(grouped_input_gradient(ops, dy, found, offsets), wanted)
    assert not torch.equal(grouped_input_gradient(ops, dy, wrong, offsets), wanted)
    assert max(parts) <= max(1 << 11, 16 * 3 * 40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_separate_engine_multiplies_them(backend: str) -> None:
    """Its sums are a BLAS's, which promise no bits: to some float32 roundings."""
    ops = inference_engine_ops(get_ops(backend))
    wide, found, wrong = matrices(1, 130, 304)
    for a in activations(9, 304).values():
        wanted = ops.product(a, wide, None, torch.float32)
        torch.testing.assert_close(
            ops.product(a, found, None, torch.float32), wanted, rtol=1e-5, atol=1e-5
        )
        assert not torch.allclose(ops.product(a, wrong, None, torch.float32), wanted, rtol=0.1)

"""The product: against rational arithmetic, the same bits in every batch, and gradients; with
negative controls."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from isobit.kernels import Operand, get_ops
from isobit.precision import E4M3, E5M2, Format, QTensor, QuantSpec, quantize

from .helpers import ROW, WEIGHT, draw, rounded, same, threads

REFERENCE = get_ops("reference", "exact")
FAST = get_ops("reference", "fast")
DTYPES = (torch.bfloat16, torch.float32)
LARGE_SCALE = QuantSpec(E4M3, "1x128", "fp32")


def scale_of(operand: QTensor, row: int, block: int) -> Fraction:
    block_rows, block_columns = operand.block
    return Fraction(operand.scale[row // block_rows, block * 128 // block_columns].item())


def definition(a: QTensor, b: QTensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Element by element: exact block sums in rational arithmetic, float64 products and additions,
    one rounding."""
    codes_a, codes_b = a.data.double().tolist(), b.data.double().tolist()
    result = torch.empty(a.shape[0], b.shape[0], dtype=out)
    for i, left in enumerate(codes_a):
        for j, right in enumerate(codes_b):
            total = 0.0
            for block, start in enumerate(range(0, a.shape[1], 128)):
                pairs = zip(left[start : start + 128], right[start : start + 128])
                dot = float(sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0)))
                total += dot * float(scale_of(a, i, block) * scale_of(b, j, block))
            if bias is not None:
                total += bias[j].item()
            result[i, j] = rounded(Fraction(total), out)
    return result


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
@pytest.mark.parametrize("granularity", ["1x128", "128x128", "row", "tensor"])
@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_fp8_product_is_its_definition(form: Format, granularity: str, scale: str) -> None:
    for rows, columns, inner in ((2, 3, 300), (3, 2, 1), (1, 4, 128)):
        a = quantize(draw(1, rows, inner, spread=4.0), QuantSpec(form, "1x128", scale))
        b = quantize(draw(2, columns, inner, spread=2.0), QuantSpec(E4M3, granularity, scale))
        bias = draw(3, columns)
        for out in DTYPES:
            for added in (None, bias):
                assert same(REFERENCE.product(a, b, added, out), definition(a, b, added, out))
                assert same(REFERENCE.product(b, a, None, out), definition(b, a, None, out))


def test_known_answers() -> None:
    """Ones times ones count the columns; a code of 448 keeps the scales at 1, so that sums are
    those of the codes."""
    ones = torch.ones(2, 300)
    assert (
        REFERENCE.product(quantize(ones, ROW), quantize(ones, WEIGHT)).tolist()
        == [[300.0, 300.0]] * 2
    )
    a = torch.zeros(1, 130)
    a[0, [0, 1, 128]] = torch.tensor([448.0, 2.0, 448.0])
    b = torch.zeros(1, 130)
    b[0, [0, 1, 129]] = torch.tensor([448.0, -3.0, 448.0])
    product = REFERENCE.product(
        quantize(a, ROW), quantize(b, ROW), torch.tensor([0.5]), torch.float32
    )
    assert product.item() == 448 * 448 - 6 + 0.5


def test_block_sums_are_exact_where_they_need_every_bit() -> None:
    """Codes of all magnitudes with scale 1, against sums in 64-bit integers of units of 2^-18."""
    random = torch.Generator().manual_seed(4)
    choice = torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-9), 240.0, 0.0, 13.0])
    a, b = (choice[torch.randint(0, 7, (n, 128), generator=random)] for n in (65, 48))
    a[:, 0], b[:, 0] = 448.0, 448.0
    units = (a * 512).long() @ (b * 512).long().t()
    assert int(units.abs().max()).bit_length() >= 40
    product = REFERENCE.product(quantize(a, ROW), quantize(b, ROW), None, torch.float32)
    assert same(product, (units.double() * 2.0**-18).float())


def test_e5m2_blocks_are_rounded_once_at_their_most_difficult() -> None:
    """Products of 57,344 · 448 that cancel, among ones of 2^-25: on the way the exact sum needs 56
    bits."""
    random = torch.Generator().manual_seed(5)
    a = torch.cat(
        [
            torch.full((40, 60), 57344.0),
            torch.full((40, 60), -57344.0),
            torch.full((40, 8), 2.0**-16),
        ],
        1,
    )
    b = torch.cat([torch.full((30, 120), 448.0), torch.full((30, 8), 2.0**-9)], 1)
    a[:, 120:] *= torch.randint(1, 4, (40, 8), generator=random)
    b[:, 120:] *= torch.randint(1, 8, (30, 8), generator=random)
    order = torch.randperm(128, generator=random)
    a, b = a[:, order], b[:, order]
    product = REFERENCE.product(
        quantize(a, QuantSpec(E5M2, "1x128")), quantize(b, ROW), None, torch.float32
    )
    sums = [
        [math.fsum(x * y for x, y in zip(left, right)) for right in b.tolist()]
        for left in a.tolist()
    ]
    assert same(product, torch.tensor(sums, dtype=torch.float64).float())
    assert not same(
        product, (a.double() @ b.double().t()).float()
    )  # the control: in one piece it is not exact


@pytest.mark.parametrize("out", DTYPES)
def test_plain_products_are_rounded_once(out: torch.dtype) -> None:
    for dtype_a, dtype_b in (
        (torch.bfloat16,) * 2,
        (torch.float32,) * 2,
        (torch.bfloat16, torch.float32),
    ):
        a = draw(6, 4, 100, dtype=dtype_a)
        b = draw(7, 5, 100, dtype=dtype_b)
        bias = draw(8, 5, dtype=dtype_a)
        rows = [[(x, y) for y in b.tolist()] for x in a.tolist()]
        sums = [[math.fsum(p * q for p, q in zip(x, y)) for x, y in row] for row in rows]
        for added in (None, bias):
            expected = [
                [
                    rounded(Fraction(s) + Fraction(0 if added is None else added[j].item()), out)
                    for j, s in enumerate(row)
                ]
                for row in sums
            ]
            assert REFERENCE.product(a, b, added, out).tolist() == expected


def test_a_plain_operand_meets_the_dequantized_values() -> None:
    x, weight = draw(9, 5, 200), quantize(draw(10, 7, 200), WEIGHT)
    expected = REFERENCE.product(x, weight.dequantize(), None, torch.float32)
    assert same(REFERENCE.product(x, weight, None, torch.float32), expected)
    assert same(REFERENCE.product(weight, x, None, torch.float32), expected.t().contiguous())


def operands(kind: str, rows: int, columns: int, inner: int) -> tuple[Tensor, Operand]:
    x, w = draw(11, rows, inner, spread=3.0), draw(12, columns, inner, spread=1.0)
    if kind == "fp32":
        return x.float(), w.float()
    return x, w if kind == "bf16" else quantize(w, WEIGHT)


def activation(kind: str, x: Tensor) -> Operand:
    specs = {
        "fp8": ROW,
        "fp8 fp32 scale": LARGE_SCALE,
        "e5m2": QuantSpec(E5M2, "1x128"),
        "tensor": QuantSpec(E4M3, "tensor", "fp32"),
    }
    return quantize(x, specs[kind]) if kind in specs else x


KINDS = ["fp8", "fp8 fp32 scale", "e5m2", "bf16", "fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_in_every_batch(kind: str) -> None:
    """Every batch size from 1 to 257, every row alone, rows shuffled, on one thread and on two."""
    x, w = operands(kind, 257, 72, 333)
    with threads(1):
        whole = REFERENCE.product(activation(kind, x), w, None, torch.float32)
    for count in (1, 2):
        with threads(count):
            for rows in range(1, 258):
                assert same(
                    REFERENCE.product(activation(kind, x[:rows]), w, None, torch.float32),
                    whole[:rows],
                )
                alone = REFERENCE.product(
                    activation(kind, x[rows - 1 : rows]), w, None, torch.float32
                )
                assert same(alone, whole[rows - 1 : rows])
            order = torch.randperm(257, generator=torch.Generator().manual_seed(count))
            assert same(
                REFERENCE.product(activation(kind, x[order]), w, None, torch.float32), whole[order]
            )


def test_one_scale_for_the_batch_is_noticed() -> None:
    """The first negative control of the test above."""
    x, w = operands("tensor", 33, 72, 333)
    whole = REFERENCE.product(activation("tensor", x), w)
    alone = torch.cat([REFERENCE.product(activation("tensor", x[i : i + 1]), w) for i in range(33)])
    assert not same(whole, alone)


def test_float32_sums_are_noticed() -> None:
    """The second one: the same codes summed in float32 depend on the batch, and differ from the
    definition."""
    x, w = draw(13, 257, 1024, spread=1.0), quantize(draw(14, 512, 1024), WEIGHT)
    a, b = quantize(x, ROW).dequantize(), w.dequantize()
    whole = a @ b.t()
    alone = torch.cat([a[i : i + 1] @ b.t() for i in range(257)])
    assert not same(whole, alone)
    assert not same(whole, REFERENCE.product(quantize(x, ROW), w, None, torch.float32))


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 400),
    st.integers(0, 1000),
    st.sampled_from(["ue8m0", "fp32"]),
)
@settings(max_examples=40, deadline=None)
def test_any_slice_of_any_product(
    rows: int, columns: int, inner: int, seed: int, scale: str
) -> None:
    """Rows and columns of ragged products do not depend on their neighbours."""
    a = draw(seed, rows, inner, spread=3.0)
    b = quantize(draw(seed + 1, columns, inner, spread=3.0), QuantSpec(E4M3, "1x128", scale))
    spec = QuantSpec(E4M3, "1x128", scale)
    whole = REFERENCE.product(quantize(a, spec), b, None, torch.float32)
    row, column = seed % rows, seed % columns
    one = QTensor(b.data[column : column + 1], b.scale[column : column + 1], b.spec)
    part = REFERENCE.product(quantize(a[row:], spec), one, None, torch.float32)
    assert same(part, whole[row:, column : column + 1])


def test_fast_is_the_product_of_pytorch() -> None:
    x, w, bias = draw(15, 9, 200), draw(16, 30, 200), draw(17, 30)
    assert same(FAST.product(x, w, bias), functional.linear(x, w, bias))
    a, b = quantize(x, ROW), quantize(w, WEIGHT)
    expected = functional.linear(a.dequantize().bfloat16(), b.dequantize().bfloat16(), bias)
    assert same(FAST.product(a, b, bias), expected)
    mixed = functional.linear(x, b.dequantize().bfloat16()).float()
    assert same(FAST.product(x.float(), b, None, torch.float32), mixed)
    assert same(
        FAST.product(x.float(), w.float(), None, torch.float32),
        functional.linear(x.float(), w.float()),
    )


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_gradients_are_those_of_the_dequantized_operands(form: Format) -> None:
    """DGrad and WGrad as transposed products, against float64 autograd."""
    tokens, columns, inner = 150, 96, 200
    weight = quantize(draw(18, columns, inner), WEIGHT)
    saved, dy = draw(19, tokens, inner), draw(20, tokens, columns, spread=2.0)
    along_columns, along_tokens = QuantSpec(form, "1x128"), QuantSpec(form, "128x1")

    w = weight.dequantize().double().requires_grad_()
    x = quantize(saved, QuantSpec(E4M3, "128x1")).dequantize().double().requires_grad_()
    y = x @ w.t()
    (dx,) = torch.autograd.grad(
        y, x, quantize(dy, along_columns).dequantize().double(), retain_graph=True
    )
    (dw,) = torch.autograd.grad(y, w, quantize(dy, along_tokens).dequantize().double())

    dgrad = REFERENCE.product(quantize(dy, along_columns), weight.transpose(), None, torch.float32)
    torch.testing.assert_close(dgrad.double(), dx, rtol=2**-23, atol=1e-10)
    activation = quantize(saved, QuantSpec(E4M3, "128x1")).transpose()
    wgrad = REFERENCE.product(
        quantize(dy, along_tokens).transpose(), activation, None, torch.float32
    )
    torch.testing.assert_close(wgrad.double(), dw, rtol=2**-23, atol=1e-10)


def test_no_rows_and_too_few_columns() -> None:
    assert REFERENCE.product(
        quantize(torch.zeros(0, 200), ROW), quantize(draw(21, 7, 200), WEIGHT)
    ).shape == (0, 7)
    with pytest.raises(AssertionError, match="200 and 100 columns"):
        REFERENCE.product(quantize(draw(22, 2, 200), ROW), quantize(draw(23, 2, 100), ROW))

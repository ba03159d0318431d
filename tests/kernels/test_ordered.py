"""The orders `tdp32-v1` and `vdp32-v1`: their definition against rational arithmetic, C++ against
the definition on every instruction set that is here, and the error of a sum; with negative
controls, which other orders are."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Operand, Ops, Stacked, get_ops
from isobit.kernels.matrices import rows_of
from isobit.kernels.native import build
from isobit.kernels.product import ordered as definition
from isobit.kernels.product import ordered_native as ordered
from isobit.options import consistency
from isobit.options.consistency import TDP32, VDP32, default_order, processor_features
from isobit.precision import E4M3, E5M2, QTensor, QuantSpec, quantize
from tests.models import slow_where

from .helpers import bits, draw, same, threads
from .libraries import PRODUCTS, changed_copies, library_of

EXACT = get_ops("native", "exact")
REFERENCE = {order: get_ops("reference", f"bitwise-{order}") for order in ordered.ORDERS}
SETS = {
    order: [
        name
        for i, name in enumerate(ordered.ISAS)
        if build.library().isobit_ordered_isa(i, number) == i
    ]
    for number, order in enumerate(ordered.ORDERS)
}
"""Of instructions: "portable", and what this processor has for an order."""
HERE = [(order, isa) for order, sets in SETS.items() for isa in sets]
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = (
    (1, 1, 1),
    (1, 96, 512),
    (2, 42, 126),
    (3, 40, 100),
    (4, 72, 256),
    (5, 16, 31),
    (21, 33, 300),
    (16, 64, 416),
)


def native(monkeypatch: pytest.MonkeyPatch, order: str, isa: str) -> Ops:
    monkeypatch.setenv("ISOBIT_ISA", isa)
    return get_ops("native", f"bitwise-{order}")


# ---- data that is hard to add ----


def wide(random: torch.Generator, rows: int, columns: int) -> Tensor:
    """Exponents of 2^±30: in most sums one term hides the others."""
    x = draw(random, rows, columns, dtype=torch.float32)
    return torch.ldexp(x, torch.randint(-30, 31, x.shape, generator=random)).bfloat16()


def cancelling(random: torch.Generator, rows: int, columns: int) -> Tensor:
    """Few magnitudes of either sign, 2^8 apart: ties, and sums that vanish."""
    pick = torch.randint(0, 4, (rows, columns), generator=random) * 2.0**-7 + 1
    sign = torch.randint(0, 2, (rows, columns), generator=random) * 2 - 1
    return torch.ldexp(
        pick * sign, 8 * torch.randint(0, 3, (rows, columns), generator=random)
    ).bfloat16()


def tiny(random: torch.Generator, rows: int, columns: int) -> Tensor:
    """Products about the smallest normal float32, so that sums are subnormal."""
    x = draw(random, rows, columns, dtype=torch.float32)
    return torch.ldexp(x, torch.randint(-66, -60, x.shape, generator=random)).bfloat16()


def raw(random: torch.Generator, rows: int, columns: int) -> Tensor:
    """Any finite BF16 number, subnormal ones too, below 2^63."""
    words = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=random).to(torch.int16)
    x = words.view(torch.bfloat16)
    return torch.where(x.abs() < 2.0**60, x, x.sign()).nan_to_num(1.0)


def plain(random: torch.Generator, rows: int, columns: int) -> Tensor:
    return draw(random, rows, columns)


DATA: list[Callable[[torch.Generator, int, int], Tensor]] = [plain, wide, cancelling, tiny, raw]


# ---- the definition ----


def nearest(x: Fraction) -> Fraction:
    """Rounded to 24 bits, ties to even, with any exponent; then zero below 2^-126."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    found = round(x / unit) * unit
    return found if abs(found) >= Fraction(2) ** -126 else Fraction(0)


def by_definition(a: list[float], b: list[float], order: str) -> float:
    values = [[Fraction(x) if abs(x) >= 2.0**-126 else Fraction(0) for x in row] for row in (a, b)]
    total = Fraction(0)
    if order == VDP32:
        for start in range(0, len(a), 128):
            one = Fraction(0)
            for i in (i ^ 1 for i in range(start, start + 128) if i ^ 1 < len(a)):
                one = nearest(values[0][i] * values[1][i] + one)
            total = nearest(total + one)
        return float(total)
    for start in range(0, len(a), 32):
        chain = [Fraction(0), Fraction(0)]
        for i in range(start, min(start + 32, len(a))):
            chain[i % 2] = nearest(values[0][i] * values[1][i] + chain[i % 2])
        total = nearest(total + nearest(chain[0] + chain[1]))
    return float(total)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("order", ordered.ORDERS)
def test_the_definition_is_scalar_arithmetic(
    order: str, data: Callable[[torch.Generator, int, int], Tensor]
) -> None:
    random = torch.Generator().manual_seed(1)
    for rows, columns, inner in ((6, 5, 150), (4, 6, 32), (3, 3, 7)):
        a, b = data(random, rows, inner), data(random, columns, inner)
        found = REFERENCE[order].product(a, b, None, torch.float32)
        assert found.tolist() == [
            [by_definition(x, y, order) for y in b.tolist()] for x in a.tolist()
        ]


def test_halfway_in_float64_is_rounded_once() -> None:
    """1 + 2^-24 + 2^-70: float64 loses the last term, and ties to even would then lose the one
    before it. The control: the sum without the correction."""
    a = torch.tensor([[1.0, 0.0, 2.0**-24, 0.0]]).bfloat16()
    chains = torch.tensor([1.0 + 0.0], dtype=torch.float64)
    product = torch.tensor([2.0**-24 + 2.0**-70], dtype=torch.float64)
    assert definition.fused(product + 0.0, chains).item() == 1.0 + 2.0**-23
    assert (product + chains).float().item() == 1.0
    for reference in REFERENCE.values():
        assert reference.product(a, torch.ones_like(a), None, torch.float32).item() == 1.0


# ---- other orders are noticed ----


def left_to_right(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for k in range(a.shape[1]):
        total = definition.fused(a[:, k : k + 1].double() * b[:, k].double(), total)
    return total.float()


def of_pairs(a: Tensor, b: Tensor) -> Tensor:
    """One chain over all of K, of every pair the odd product first."""
    return left_to_right(*(torch.stack((x[:, 1::2], x[:, ::2]), 2).flatten(1) for x in (a, b)))


def the_other(order: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The definition of the order that it is not."""
    other = REFERENCE[VDP32 if order == TDP32 else TDP32]
    return lambda a, b: other.product(a, b, None, torch.float32)


def without_flushing(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], 32):
        chains = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(start, start + 32):
            chains[k % 2] = (
                a[:, k : k + 1].double() * b[:, k].double() + chains[k % 2].double()
            ).float()
        total = total + (chains[0] + chains[1])
    return total


@pytest.mark.parametrize(("order", "isa"), HERE)
def test_negative_control_another_order(
    order: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = draw(2, 16, 256), draw(3, 64, 256)
    found = native(monkeypatch, order, isa).product(a, b, None, torch.float32)
    assert same(found, REFERENCE[order].product(a, b, None, torch.float32))
    for other in (left_to_right, of_pairs, the_other(order)):
        assert int((bits(found) != bits(other(a, b))).sum()) > found.numel() // 20


def test_negative_control_subnormal_numbers() -> None:
    random = torch.Generator().manual_seed(4)
    reference = REFERENCE[TDP32]
    a, b = tiny(random, 16, 256), tiny(random, 64, 256)
    assert not same(reference.product(a, b, None, torch.float32), without_flushing(a, b))
    a, b = plain(random, 8, 64), plain(random, 8, 64)
    assert same(reference.product(a, b, None, torch.float32), without_flushing(a, b))


# ---- C++ ----


def quantized(x: Tensor, y: Tensor) -> list[tuple[Operand, Operand]]:
    """Pairs of operands in all granularities that C++ reads, along rows and transposed."""
    pairs: list[tuple[Operand, Operand]] = []
    for scale in ("ue8m0", "fp32"):
        for left, right in (
            ("1x128", "128x128"),
            ("1x128", "1x128"),
            ("row", "tensor"),
            ("row", "row"),
        ):
            for form in (E4M3, E5M2):
                pairs.append(
                    (
                        quantize(x, QuantSpec(form, left, scale)),
                        quantize(y, QuantSpec(form, right, scale)),
                    )
                )
        along = QuantSpec(E4M3, "128x1", scale)
        pairs.append(tuple(quantize(z.t().contiguous(), along).transpose() for z in (x, y)))
    pairs.append(tuple(quantize(z, QuantSpec(E4M3, "1x32")) for z in (x, y)))
    pairs.append((x, quantize(y, QuantSpec(E4M3, "128x128"))))
    pairs.append((quantize(x, QuantSpec(E4M3, "1x128")), y))
    return pairs


def add_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition adds up the same values once, for both outputs and for every layout of them:
    its sums take most of a test's time."""
    known: dict[tuple[object, ...], Tensor] = {}
    sums = definition.ordered_sums

    def found(left: Tensor, right: Tensor, order: str) -> Tensor:
        key = (order, *((tuple(x.shape), x.numpy().tobytes()) for x in (left, right)))
        if key not in known:
            known[key] = sums(left, right, order)
        return known[key].clone()

    monkeypatch.setattr(definition, "ordered_sums", found)


@pytest.mark.parametrize("data", slow_where(DATA, lambda data: data not in (plain, raw)))
@pytest.mark.parametrize("order", ordered.ORDERS)
def test_cpp_is_the_definition_bit_for_bit(
    order: str, data: Callable[[torch.Generator, int, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every instruction set: shapes that fill no panel and no block, alone and prepared, with
    and without a bias."""
    sets = [native(monkeypatch, order, isa) for isa in SETS[order]]
    random = torch.Generator().manual_seed(5)
    add_once(monkeypatch)
    for rows, columns, inner in SHAPES:
        x, y, bias = data(random, rows, inner), data(random, columns, inner), draw(random, columns)
        pairs = [(x, y), (x.t().contiguous().t(), y.t().contiguous().t())]
        if (
            data is not raw
        ):  # the quantizer refuses nothing there, but codes then span no more than the others
            pairs += quantized(x, y)
        for a, b in pairs:
            assert definition.computes(a, b)
            for out, added in ((torch.float32, None), (torch.bfloat16, bias)):
                wanted = REFERENCE[order].product(a, b, added, out)
                for ops in sets:
                    assert same(ops.product(a, b, added, out), wanted), ops.why
                    assert same(ops.product(a, ops.prepare(b), added, out), wanted), ops.why


@pytest.mark.parametrize("order", ordered.ORDERS)
@pytest.mark.parametrize("powers", [(-9, 9), (-100, 100), (-102, -98), (98, 102), (-126, 112)])
@pytest.mark.parametrize("grid", ["1x32", "1x128", "128x1", "1x16"])
def test_codes_under_any_power_of_two_are_their_products(
    grid: str, powers: tuple[int, int], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every byte that is a number, also where products of codes and scales are subnormal. In the
    control the largest scale is twice as large."""
    sets = [native(monkeypatch, order, isa) for isa in SETS[order]]
    random = torch.Generator().manual_seed(7)
    spec = QuantSpec(E4M3, grid, "ue8m0")
    for rows, columns, inner in ((1, 100, 256), (2, 64, 384), (7, 33, 160), (21, 48, 288)):
        codes = torch.randint(256, (columns, inner), dtype=torch.uint8, generator=random)
        codes[codes & 0x7F == 0x7F] = 0
        blocks = [-(-size // block) for size, block in zip(codes.shape, spec.block(codes.shape))]
        exponents = torch.randint(powers[0], powers[1] + 1, blocks, generator=random)
        b = QTensor(codes.view(E4M3.dtype), torch.ldexp(torch.ones(blocks), exponents), spec)
        a = draw(random, rows, inner).bfloat16()
        for ops in sets:
            wanted = ops.product(a, b.dequantize().bfloat16(), None, torch.float32)
            assert wanted.isfinite().all()
            assert same(ops.product(a, b, None, torch.float32), wanted), ops.why
            assert same(ops.product(a, ops.prepare(b), None, torch.float32), wanted), ops.why
            twice = b.scale.clone()
            twice.view(-1)[int(twice.argmax())] *= 2
            other = QTensor(b.data, twice, spec)
            assert not same(ops.product(a, other, None, torch.float32), wanted)


@pytest.mark.parametrize("order", ordered.ORDERS)
def test_zeros_have_their_sign(order: str) -> None:
    """Where sums are subnormal: among the zeros are some of either sign, and at the end of K, too,
    none changes it."""
    random, native_ops = torch.Generator().manual_seed(6), get_ops("native", f"bitwise-{order}")
    for inner in (160, 288, 320, 416, 512):
        a, b = (
            torch.ldexp(draw(random, rows, inner), torch.tensor(-64)).bfloat16()
            for rows in (64, 64)
        )
        wanted = REFERENCE[order].product(a, b, None, torch.float32)
        assert same(native_ops.product(a, b, None, torch.float32), wanted)
        zeros = wanted[wanted == 0].signbit()
        assert zeros.any()
        assert not zeros.all()


@pytest.mark.parametrize("seed", slow_where(range(40), lambda seed: seed >= 20))
def test_random_shapes_agree_on_every_instruction_set(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any shape and data, one thread and two: the same bits as the portable code, which the test
    above holds."""
    random = torch.Generator().manual_seed(100 + seed)
    rows, columns, inner = (
        int(torch.randint(1, top, (1,), generator=random)) for top in (300, 400, 700)
    )
    rows = rows if seed % 2 else rows % 8 + 1
    x, y = (DATA[seed % 5](random, n, inner) for n in (rows, columns))
    pairs = [(x, y), *(quantized(x, y) if seed % 5 < 4 else [])]
    a, b = pairs[seed % len(pairs)]
    for order, sets in SETS.items():
        wanted = native(monkeypatch, order, "portable").product(a, b, None, torch.float32)
        for isa in sets:
            for count in (1, 2):
                with threads(count):
                    assert same(
                        native(monkeypatch, order, isa).product(a, b, None, torch.float32), wanted
                    )


@pytest.mark.parametrize(("order", "isa"), HERE)
def test_what_is_read_transposed_has_the_bits_of_rows(
    order: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both operands, either, and neither, for whole tiles of rows and not, an odd number of panels,
    rows for two chunks and K of several slabs. The control: two places of K exchanged."""
    random = torch.Generator().manual_seed(12)
    for rows, columns, inner in ((48, 112, 800), (37, 80, 544), (580, 64, 96)):
        x, y = wide(random, rows, inner), wide(random, columns, inner)
        wanted = native(monkeypatch, order, "portable").product(x, y, None, torch.float32)
        ops = native(monkeypatch, order, isa)
        for a in (x, x.t().contiguous().t()):
            for b in (y, y.t().contiguous().t()):
                for count in (1, 2):
                    with threads(count):
                        assert same(ops.product(a, b, None, torch.float32), wanted)
        exchanged = x[:, [1, 0, *range(2, inner)]].t().contiguous().t()
        assert not same(ops.product(exchanged, y, None, torch.float32), wanted)


@pytest.mark.parametrize("kind", ["bf16", "folded", "blocks"])
@pytest.mark.parametrize(("order", "isa"), HERE)
def test_a_long_sum_in_parts_has_its_order(
    order: str, isa: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K of more than one part, of as many columns as are summed together and more, of operands as
    they are and transposed: the portable code's bits. The control: K without its last place."""
    random = torch.Generator().manual_seed(11)
    x, y = wide(random, 24, 4170), wide(random, 544, 4170)
    a, b = x, y
    if kind != "bf16":
        scale = "ue8m0" if kind == "folded" else "fp32"
        a = quantize(x, QuantSpec(E4M3, "1x128", scale))
        b = quantize(y, QuantSpec(E4M3, "128x128", scale))
    found = native(monkeypatch, order, isa).product(a, b, None, torch.float32)
    wanted = native(monkeypatch, order, "portable").product(a, b, None, torch.float32)
    assert same(found, wanted)
    turned = x.t().contiguous().t(), y.t().contiguous().t()
    ops = native(monkeypatch, order, isa)
    if kind == "bf16":
        assert same(ops.product(*turned, None, torch.float32), wanted)
        shorter = ops.product(x[:, :-1], y[:, :-1], None, torch.float32)
        assert not same(shorter, wanted)


@pytest.mark.parametrize(("order", "isa"), HERE)
def test_what_is_added_has_the_bits_of_an_addition_afterwards(
    order: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ordinary numbers, and of subnormal ones, which an addition keeps though products do not.
    The control: an addition that loses them."""
    ops = native(monkeypatch, order, isa)
    for data in (plain, tiny):
        random = torch.Generator().manual_seed(12)
        for rows, columns, inner in ((7, 33, 96), (70, 100, 600), (530, 48, 64)):
            a, b = data(random, rows, inner), data(random, columns, inner)
            before = torch.ldexp(
                draw(random, rows, columns, dtype=torch.float32),
                torch.tensor(-126 if data is tiny else 0),
            )
            wanted = before + ops.product(a, b, None, torch.float32)
            into = before.clone()
            assert ops.gradient_product(a, b, torch.float32, into) is into
            assert same(into, wanted)
            lost = definition.flushed(wanted)
            assert same(lost, wanted) == (data is plain)


@pytest.mark.parametrize("data", [plain, tiny])
@pytest.mark.parametrize(("order", "isa"), HERE)
def test_a_sum_of_products_has_the_bits_of_products_and_additions(
    order: str,
    isa: str,
    data: Callable[[torch.Generator, int, int], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of matrices that fill no cell, of several and of one; a transposed view too, as of a gradient.
    The controls: another order, and one product over all of K."""
    ops, random = native(monkeypatch, order, isa), torch.Generator().manual_seed(13)
    sums = ordered.OrderedProducts(order).summed
    for rows, columns, inners in ((5, 33, (96,)), (300, 1040, (64, 40, 64)), (530, 48, (33, 70))):
        pairs = [(data(random, inner, rows).t(), data(random, columns, inner)) for inner in inners]
        parts = [ops.product(a, b, None, torch.float32) for a, b in pairs]
        wanted = parts[0]
        for part in parts[1:]:
            wanted = wanted + part
        assert same(sums(pairs), wanted)
        assert same(sums(pairs, from_zero=True), wanted + 0.0)
        before = torch.where(wanted > 0, wanted.flip(0), -0.0)
        into = before.clone()
        assert sums(pairs, into) is into
        assert same(into, before + wanted)
        with threads(2):
            assert same(sums(pairs), wanted)
        if len(pairs) > 2:
            assert not same(sums(pairs[::-1]), wanted)
            joined = torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 1)
            assert not same(sums([joined]), wanted)


@pytest.mark.parametrize(("order", "isa"), HERE)
def test_a_sum_from_zero_has_no_negative_zero(
    order: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product whose sum is negative, and too small for a normal number, has: the control."""
    monkeypatch.setenv("ISOBIT_ISA", isa)
    sums = ordered.OrderedProducts(order).summed
    a, b = torch.zeros(20, 160), torch.full((20, 160), 2.0**-63).bfloat16()
    a[:, 0], a[:, 128] = 2.0**-63, -1.5 * 2.0**-63
    pair = a.bfloat16(), b
    alone, summed = sums([pair]), sums([pair], from_zero=True)
    assert bool((alone == 0).all())
    assert bool(alone.signbit().all())
    assert not bool(summed.signbit().any())


@pytest.mark.parametrize("kind", ["bf16", "folded", "blocks"])
@pytest.mark.parametrize(("order", "isa"), HERE)
def test_a_row_is_the_same_in_every_batch(
    order: str, isa: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and at every place of batches of 1 to 300 rows."""
    ops, x, y = native(monkeypatch, order, isa), draw(6, 300, 400), draw(7, 200, 400)
    scale = "ue8m0" if kind == "folded" else "fp32"
    weight = ops.prepare(y if kind == "bf16" else quantize(y, QuantSpec(E4M3, "128x128", scale)))

    def product(rows: Tensor) -> Tensor:
        a = rows if kind == "bf16" else quantize(rows, QuantSpec(E4M3, "1x128", scale))
        return ops.product(a, weight, None, torch.float32)

    whole = product(x)
    for count in (1, 2, 3, 4, 5, 8, 16, 31, 96, 97, 127, 128, 129):
        for start in (0, 100, 300 - count):
            assert same(product(x[start : start + count]), whole[start : start + count])
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(8))
    assert same(product(x[shuffled]), whole[shuffled])


@pytest.mark.parametrize("data", [plain, wide, cancelling])
@pytest.mark.parametrize("order", ordered.ORDERS)
def test_the_error_of_a_sum_is_bounded(
    order: str, data: Callable[[torch.Generator, int, int], Tensor]
) -> None:
    """γ(17 + ⌈K / 32⌉) · Σ|a·b|, or γ(128 + ⌈K / 128⌉), element by element, and BF16 rounds on top
    of it. The control: some errors are more than a hundredth of the bound, or of a longer chain's a
    two-thousandth, so that it is not idle."""
    random, ops = torch.Generator().manual_seed(9), get_ops("native", f"bitwise-{order}")
    for inner in (32, 100, 1024):
        a, b = data(random, 40, inner), data(random, 60, inner)
        wide_a, wide_b = a.double(), b.double()
        error = (ops.product(a, b, None, torch.float32).double() - wide_a @ wide_b.t()).abs()
        roundings = 17 + -(-inner // 32) if order == TDP32 else min(inner, 128) + -(-inner // 128)
        bound = (
            roundings * 2.0**-24 / (1 - roundings * 2.0**-24) * (wide_a.abs() @ wide_b.abs().t())
        )
        bound += (
            inner * 2.0**-53 * (wide_a.abs() @ wide_b.abs().t())
        )  # of the float64 product that it is compared with
        assert bool((error <= bound).all())
        assert data is cancelling or bool((error > bound / (100 if order == TDP32 else 2000)).any())
        rounded = ops.product(a, b).double()
        assert bool(
            (
                (rounded - wide_a @ wide_b.t()).abs() <= bound + (rounded.abs() + bound) * 2.0**-8
            ).all()
        )


def test_other_products_stay_exact() -> None:
    """FP32 operands, and FP8 codes with FP32 scales against BF16: the bits of `exact`. The control:
    BF16 operands."""
    ops, x, y = get_ops("native"), draw(10, 9, 200), draw(11, 33, 200)
    scaled = quantize(y, QuantSpec(E4M3, "128x128", "fp32"))
    for a, b in ((x.float(), y.float()), (x.float(), y), (x, scaled)):
        assert same(
            ops.product(a, b, None, torch.float32), EXACT.product(a, b, None, torch.float32)
        )
        assert same(
            ops.product(a, ops.prepare(b), None, torch.float32),
            EXACT.product(a, b, None, torch.float32),
        )
    assert not same(
        ops.product(x, y, None, torch.float32), EXACT.product(x, y, None, torch.float32)
    )


def test_the_mode_of_the_thread_is_restored() -> None:
    """Subnormal numbers are zeros during a product, and only then."""
    smallest = torch.tensor([2.0**-149]).double()
    get_ops("native").product(draw(12, 64, 512), draw(13, 512, 512))
    assert (smallest.float() * 1.0).item() == 2.0**-149


# ---- the choice and its test ----


@pytest.mark.parametrize(("order", "isa"), HERE)
def test_the_self_test_passes(order: str, isa: str) -> None:
    assert (
        build.library().isobit_ordered_self_test(
            ordered.ISAS.index(isa), ordered.ORDERS.index(order)
        )
        == 0
    )


def test_the_self_test_tells_the_orders_apart() -> None:
    """Its control: where there is an instruction for one order, asked for the other it has not the
    bits."""
    lib, bf16 = build.library(), ordered.ISAS.index("avx512_bf16")
    if "avx512_bf16" not in SETS[VDP32]:
        pytest.skip("this processor has no AVX512-BF16")
    assert lib.isobit_ordered_self_test(bf16, ordered.ORDERS.index(TDP32)) > 0


def test_the_default_is_the_order_of_the_processors_instruction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zen4 = {"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi"}
    for features, wanted in (
        (zen4, VDP32),
        (zen4 | {"amx_bf16"}, TDP32),
        (zen4 - {"avx512_bf16"}, TDP32),
        (set(), TDP32),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                consistency, "processor_features", lambda features=features: frozenset(features)
            )
            default_order.cache_clear()
            assert default_order() == wanted
    default_order.cache_clear()
    assert get_ops("native").consistency == f"bitwise-{default_order()}"
    assert ("avx512_bf16" in SETS[VDP32]) <= ("avx512_bf16" in processor_features())


_TDP32 = (
    "add(sum[r][p], add(even[r][p], odd[r][p]))",
    "add(add(sum[r][p], even[r][p]), odd[r][p])",
)
WRONG = {
    TDP32: {
        "product/ordered_kernel.h": _TDP32,
        "product/ordered_registers.h": _TDP32,
        "product/ordered_amx.cpp": (
            "_tile_dpbf16ps(0, 4, 6);",
            "_tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(0, 4, 6);",
        ),
    },
    VDP32: {
        "product/ordered_kernel.h": ("k = i ^ 1;", "k = i;"),
        "product/ordered_registers.h": (
            "fma(vsplat(x[0]), left, fma(vsplat(x[1]), right, sum[r][p]))",
            "fma(vsplat(x[1]), right, fma(vsplat(x[0]), left, sum[r][p]))",
        ),
        "product/ordered_bf16.cpp": (
            "vstore(to, add(vload(to), sum[r][p]))",
            "vstore(to, add(sum[r][p], sum[r][p]))",
        ),
    },
}
"""Each chain added to the sum by itself, or, where the processor does that, each tile twice; the
products of a pair exchanged, and what is before a block forgotten."""


@pytest.mark.slow
@pytest.mark.parametrize("order", ordered.ORDERS)
def test_the_self_test_notices_another_order(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its negative control: a library with WRONG sums. The other order of the same library is
    right."""
    changed_copies(tmp_path, WRONG[order])
    library = library_of(PRODUCTS, tmp_path, "-O0", monkeypatch, tmp_path)
    for number, other in enumerate(ordered.ORDERS):
        found = {
            isa: library.isobit_ordered_self_test(ordered.ISAS.index(isa), number)
            for isa in SETS[other]
        }
        assert all((count > 0) == (other == order) for count in found.values()), found


def test_a_failed_self_test_and_an_unknown_set_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Wrong:
        _name = str(tmp_path / "library.so")

        def isobit_ordered_isa(self, wanted: int, order: int) -> int:
            return 0 if wanted <= 0 else -1

        def isobit_ordered_self_test(self, isa: int, order: int) -> int:
            return 7

    monkeypatch.setattr(ordered, "library", Wrong)
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path))
    ordered._chosen.cache_clear()
    try:
        for name, message in (
            (
                "portable",
                "7 sums by portable differ from scalar ones; set ISOBIT_ISA=portable, or "
                "consistency: exact",
            ),
            ("amx", "ISOBIT_ISA=amx: this processor"),
            (
                "avx512_bf16",
                "it adds in the order vdp32 and not in tdp32; set consistency: bitwise-vdp32",
            ),
            ("sse", "ISOBIT_ISA=sse: choose from portable, neon, avx2, avx512, amx, avx512_bf16"),
        ):
            monkeypatch.setenv("ISOBIT_ISA", name)
            with pytest.raises(IsobitError, match=message):
                ordered.instruction_set(TDP32)
        assert not list(tmp_path.rglob("*.passed"))  # nothing is marked as passed
    finally:
        ordered._chosen.cache_clear()


# ---- products of experts ----


@pytest.mark.parametrize(("order", "isa"), HERE)
@pytest.mark.parametrize("form", ["bf16", "e4m3 fp32", "e4m3 ue8m0"])
def test_experts_together_have_the_bits_of_each_alone(
    form: str, order: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few rows and many, none at all, and several threads. The control: another expert's
    matrix."""
    random = torch.Generator().manual_seed(5)
    ops, counts, outputs, inputs = native(monkeypatch, order, isa), (3, 0, 1, 40, 0, 17), 136, 384
    x = wide(random, sum(counts), inputs)
    weights: list[Operand] = [wide(random, outputs, inputs) for _ in counts]
    a: Operand = x
    if form != "bf16":
        scale = form.split()[1]
        a = quantize(x, QuantSpec(E4M3, "1x128", scale))
        weights = [
            quantize(w, QuantSpec(E4M3, "128x128", scale)) for w in weights if isinstance(w, Tensor)
        ]
    stacked = Stacked.of(weights, len(weights))
    prepared = replace(stacked, prepared=tuple(ops.prepare(weight) for weight in stacked.experts))
    bounds = [0, *accumulate(counts)]
    offsets = torch.tensor(bounds)
    alone = [
        ops.product(rows_of(a, lo, hi), w, None, torch.float32)
        for w, (lo, hi) in zip(weights, pairwise(bounds))
    ]
    for given in (stacked, prepared):
        for count in (1, 2, 5):
            with threads(count):
                found = ops.grouped_product(a, given, offsets, torch.float32)
            assert same(found, torch.cat(alone))
    other = ops.product(rows_of(a, 0, 3), weights[2], None, torch.float32)
    assert not same(found[:3], other)
    bias = wide(random, len(counts), outputs)
    found = ops.grouped_product(a, replace(prepared, bias=bias), offsets, torch.float32)
    biased = [
        ops.product(rows_of(a, lo, hi), w, b, torch.float32)
        for w, b, (lo, hi) in zip(weights, bias, pairwise(bounds))
    ]
    assert same(found, torch.cat(biased))
    assert not same(found, torch.cat(alone))
    none = ops.grouped_product(
        rows_of(a, 0, 0), stacked, torch.zeros(7, dtype=torch.int64), torch.float32
    )
    assert none.shape == (0, outputs)

"""A product and what adapters of low rank add to it, all of them in one call: the bits of each
alone."""

import pytest
import torch
from torch import Tensor

from isobit.kernels import Factors, Operand, Ops, Prepared, get_ops, picked
from isobit.kernels.low_rank import definition
from isobit.kernels.low_rank.native import PackedFactors
from isobit.options.consistency import TDP32, VDP32
from isobit.precision import E4M3, QuantSpec, quantize
from isobit.precision.packed_fp4 import NVFP4, packed
from tests.kernels.helpers import same, threads
from tests.models import require

IN, OUT = 200, 1200
PARTS = ((0, 40), (40, 80), (96, 1160))  # columns 80 to 96 and the last have no adapter
RANKS = (1, 3, 8, 16, 24, 32, 33, 150)
COUNTS = (1, 2, 9, 70, 1, 3, 1, 20)


def _random(*shape: int, seed: int) -> Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found.flatten()[::7] *= 1e-22  # sums that are subnormal, and zeros of both signs
    found.flatten()[::11] = -0.0
    return found.bfloat16()


def _factors(ops: Ops, rank: int, seed: int) -> Factors:
    parts = [
        (_random(rank, IN, seed=seed + i), _random(hi - lo, rank, seed=seed + i + 9), lo, hi)
        for i, (lo, hi) in enumerate(PARTS)
    ]
    return ops.prepare_factors(parts, 2.0 / rank)


def _given(form: str) -> tuple[Operand, Operand, Tensor, Tensor, Tensor]:
    """x, a weight, a bias, each adapter's rows, and where they begin. A fifth of the columns are the
    bias alone, with zeros of both signs and subnormal numbers."""
    count = sum(COUNTS) + 5  # five rows have no adapter
    x: Operand = _random(count, IN, seed=1)
    weight: Operand = _random(OUT, IN, seed=5)
    weight[::5] = 0.0
    if form != "bf16":
        x = quantize(_random(count, IN, seed=1), QuantSpec(E4M3, "1x128", form))
        weight = quantize(weight, QuantSpec(E4M3, "128x128", form))
    bias = torch.randn(OUT, generator=torch.Generator().manual_seed(2)) * 1e-3
    bias[::5], bias[::15] = -0.0, 1e-39
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(3))[: sum(COUNTS)]
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    rows = torch.cat([part.sort().values for part in rows.split(COUNTS)])
    return x, weight, bias, rows, offsets


@pytest.mark.parametrize("form", ["bf16", "ue8m0", "fp32"])
@pytest.mark.parametrize("order", [TDP32, VDP32])
def test_together_they_have_the_bits_of_each_alone(order: str, form: str) -> None:
    """With few rows and many, ranks that fill no block, several threads, on every instruction set
    of this processor. The control: another adapter's factors, which are noticed in its rows and
    in its columns alone."""
    require("native")
    ops = get_ops("native", f"bitwise-{order}")
    x, weight, bias, rows, offsets = _given(form)
    adapters = [_factors(ops, rank, 100 * i) for i, rank in enumerate(RANKS)]
    assert all(isinstance(one, PackedFactors) for one in adapters)
    prepared = ops.prepare(weight)

    def found(x: Operand, given: list[Factors], rows: Tensor, offsets: Tensor) -> Tensor:
        return ops.adapted_product(x, prepared, bias, given, rows, offsets, torch.bfloat16)

    wanted = definition.adapted_product(
        ops, x, prepared, bias, adapters, rows, offsets, torch.bfloat16
    )
    assert not same(wanted, ops.product(x, prepared, bias))
    sums = ops.product(x, prepared, bias, torch.float32)
    in_turn = sums.clone()
    assert same(ops.add_low_rank(sums, x, adapters, rows, offsets, torch.bfloat16), wanted)
    definition.add_low_rank(ops, in_turn, x, adapters, rows, offsets, torch.bfloat16)
    assert same(sums, in_turn), "before they are rounded"
    for count in (1, 3):
        with threads(count):
            assert same(found(x, adapters, rows, offsets), wanted)
    for i, (one, part) in enumerate(zip(adapters, rows.split(COUNTS))):
        ends = torch.tensor([0, len(part)])
        alone = found(picked(x, part), [one], torch.arange(len(part)), ends)
        assert same(alone, wanted[part]), f"rank {RANKS[i]}"
    other = found(x, [*adapters[1:2], *adapters[1:]], rows, offsets)
    changed = other.view(torch.int16) != wanted.view(torch.int16)
    assert set(changed.any(1).nonzero().flatten().tolist()) == set(rows[: COUNTS[0]].tolist())
    assert not changed[:, 80:96].any()
    assert not changed[:, 1160:].any()


@pytest.mark.parametrize("inner", [24, 64, 200])
@pytest.mark.parametrize("rank", [1, 4, 8, 30])
@pytest.mark.parametrize("order", [TDP32, VDP32])
def test_adapters_of_the_same_shape_are_read_side_by_side(
    order: str, rank: int, inner: int
) -> None:
    """One row each, two of them twice, one without its last part, in any order of rows: the bits of
    each alone. The control: one more's factors in the place of one, noticed in its row alone."""
    require("native")
    ops, columns = get_ops("native", f"bitwise-{order}"), 70
    halves = (0, 33), (40, columns)

    def factors(seed: int, parts: int = 2) -> Factors:
        made = [
            (_random(rank, inner, seed=seed + i), _random(hi - lo, rank, seed=seed + i + 5), lo, hi)
            for i, (lo, hi) in enumerate(halves[:parts])
        ]
        return ops.prepare_factors(made, 0.25 * (seed + 1))

    adapters = [factors(seed, 1 + (seed != 4)) for seed in range(8)]
    rows = torch.tensor([7, 1, 9, 0, 4, 8, 2, 10, 5, 3])
    offsets = torch.tensor([0, 2, 3, 4, 5, 6, 7, 9, 10])
    x, weight = _random(11, inner, seed=20), ops.prepare(_random(columns, inner, seed=21))

    def found(given: list[Factors]) -> Tensor:
        arguments = x, weight, None, given, rows, offsets, torch.bfloat16
        return ops.adapted_product(*arguments)

    together = found(adapters)
    arguments = x, weight, None, adapters, rows, offsets, torch.bfloat16
    assert same(together, definition.adapted_product(ops, *arguments))
    for count in (1, 2):
        with threads(count):
            assert same(found(adapters), together)
    changed = found([*adapters[:2], factors(30), *adapters[3:]])
    different = (changed.view(torch.int16) != together.view(torch.int16)).any(1)
    assert different.nonzero().flatten().tolist() == [rows[3]]


def test_packs_are_of_the_factors_that_were_prepared() -> None:
    """Where these are trained on, the next result has them only when they are prepared again."""
    require("native")
    ops = get_ops("native", "bitwise")
    x, weight = _random(3, IN, seed=1), ops.prepare(_random(64, IN, seed=2))
    parts = [(_random(24, IN, seed=3), _random(64, 24, seed=4), 0, 64)]
    given = torch.arange(3), torch.tensor([0, 3]), torch.bfloat16
    before = ops.prepare_factors(parts, 0.5)
    wanted = ops.adapted_product(x, weight, None, [before], *given)
    for factor in parts[0][:2]:
        factor.mul_(2.0)
    assert same(ops.adapted_product(x, weight, None, [before], *given), wanted)
    after = ops.adapted_product(x, weight, None, [ops.prepare_factors(parts, 0.5)], *given)
    assert not same(after, wanted)


def test_factors_are_found_by_addresses_in_a_table() -> None:
    """Of every weight a column; 0 is no adapter, also where there are rows, and adapters may have
    none. The control: the addresses of others."""
    require("native")
    ops = get_ops("native", "bitwise")
    x, weight, bias, rows, offsets = _given("ue8m0")
    adapters = [_factors(ops, rank, 100 * i) for i, rank in enumerate(RANKS)]
    prepared = ops.prepare(weight)
    table = torch.zeros(len(COUNTS) + 3, 2, dtype=torch.int64)
    known = [i for i in range(len(COUNTS)) if i not in (1, 4)]
    table[known, 1] = torch.tensor([adapters[i].address for i in known])
    table[-1, 1] = adapters[0].address
    ends = torch.cat([offsets, offsets[-1:].expand(3)])

    def found(addresses: Tensor) -> Tensor:
        return ops.adapted_product(x, prepared, bias, addresses, rows, ends, torch.bfloat16)

    parts = rows.split(COUNTS)
    own = torch.cat([parts[i] for i in known])
    bounds = torch.tensor([0, *(COUNTS[i] for i in known)]).cumsum(0)
    given = [adapters[i] for i in known], own, bounds
    wanted = definition.adapted_product(ops, x, prepared, bias, *given, torch.bfloat16)
    assert same(found(table[:, 1]), wanted)
    assert same(found(table[:, 0]), ops.product(x, prepared, bias))
    assert not same(found(table[:, 1].roll(1)), wanted)


@pytest.mark.parametrize("form", ["two codes to a byte", "E4M3"])
def test_the_weights_product_may_have_another_order(form: str) -> None:
    """Of codes under scales that are no powers of two; or the order of all, where they are rounded
    as they are read. The control is the product alone."""
    require("native")
    ops, inner = get_ops("native", "bitwise"), 192
    x, values = _random(20, inner, seed=1), _random(OUT, inner, seed=2)
    if form == "E4M3":
        weight: Prepared = ops.prepare(quantize(values, QuantSpec(E4M3, "128x128", "fp32")))
    else:
        weight = packed(quantize(values, NVFP4), values)
    assert ops.rounds_last(x, weight) == (form != "E4M3")
    parts = [(_random(8, inner, seed=3), _random(OUT, 8, seed=4), 0, OUT)]
    given = [ops.prepare_factors(parts, 0.5)], torch.arange(1, 20), torch.tensor([0, 19])
    wanted = definition.adapted_product(ops, x, weight, None, *given, torch.bfloat16)
    found = ops.adapted_product(x, weight, None, *given, torch.bfloat16)
    assert same(found, wanted)
    changed = (found != ops.product(x, weight)).any(1)
    assert changed.tolist() == [False] + [True] * 19


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx", "avx512_bf16", "neon"])
def test_instruction_sets_have_the_same_bits(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an order: that which the machine has by default is compared with the others."""
    require("native")
    from isobit.errors import IsobitError

    order = VDP32 if isa == "avx512_bf16" else TDP32
    x, weight, bias, rows, offsets = _given("bf16")
    found = []
    for name in ("portable", isa):
        monkeypatch.setenv("ISOBIT_ISA", name)
        try:
            ops = get_ops("native", f"bitwise-{order}")
        except IsobitError:
            pytest.skip(f"this processor lacks {name}")
        adapters = [_factors(ops, rank, 100 * i) for i, rank in enumerate(RANKS)]
        given = x, ops.prepare(weight), bias, adapters, rows, offsets, torch.bfloat16
        found.append(ops.adapted_product(*given))
    assert same(*found)


@pytest.mark.parametrize(
    ("consistency", "dtype"), [("exact", torch.bfloat16), ("bitwise", torch.float32)]
)
def test_what_has_no_order_is_the_definitions(consistency: str, dtype: torch.dtype) -> None:
    require("native")
    ops = get_ops("native", consistency)
    a, b = torch.randn(4, IN), torch.randn(OUT, 4)
    factors = ops.prepare_factors([(a.to(dtype), b.to(dtype), 0, OUT)], 0.5)
    assert not isinstance(factors, PackedFactors)
    x, zeros = torch.randn(6, IN).to(dtype), torch.zeros(OUT, IN).to(dtype)
    rows, offsets = torch.tensor([4, 1]), torch.tensor([0, 2])
    total = ops.adapted_product(x, ops.prepare(zeros), None, [factors], rows, offsets, dtype)
    assert total.dtype == dtype
    total = total.float()
    near = 0.5 * (x.float() @ a.to(dtype).float().t()).to(dtype).float() @ b.to(dtype).float().t()
    assert torch.allclose(total[rows], near[rows], atol=0.2, rtol=0.02)
    assert (total[[0, 2, 3, 5]] == 0).all()


@pytest.mark.parametrize("form", ["bf16", "ue8m0", "fp32"])
@pytest.mark.parametrize("order", [TDP32, VDP32])
def test_ordered_products_are_rounded_last(order: str, form: str) -> None:
    """Of few rows and of many, with a bias and without, subnormal sums too: rows without an adapter
    may be multiplied with those that have one."""
    require("native")
    ops = get_ops("native", f"bitwise-{order}")
    x, values = _given(form)[0], _random(OUT, IN, seed=5)
    blocks = QuantSpec(E4M3, "128x128", "fp32" if form == "bf16" else form)
    weight: Operand = values if form == "bf16" else quantize(values, blocks)
    b = ops.prepare(weight)
    assert ops.rounds_last(x, b)
    for bias in (None, _random(OUT, seed=6)):
        for rows in (torch.arange(3), torch.arange(x.shape[0])):
            a = picked(x, rows)
            wide = ops.product(a, b, bias, torch.float32)
            assert same(ops.product(a, b, bias, torch.bfloat16), wide.bfloat16())


def test_exact_products_are_not_rounded_last() -> None:
    """The control: just above the middle of two BF16 numbers, which float32 cannot say."""
    require("native")
    ops = get_ops("native", "exact")
    a = torch.tensor([[1.0, 1.0, 2.0**-20]]).bfloat16()
    b = ops.prepare(torch.tensor([[1.0, 2.0**-8, 2.0**-20]]).bfloat16())
    assert not ops.rounds_last(a, b)
    wide = ops.product(a, b, None, torch.float32)
    assert not same(ops.product(a, b, None, torch.bfloat16), wide.bfloat16())

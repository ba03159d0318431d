"""Products grouped by expert, against the reference operators expert by expert: bit for bit where
sums are exact."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Operand, Stacked, get_ops, picked
from isobit.kernels.experts.triton import grouped
from isobit.kernels.experts.triton.grouped import Schedule
from isobit.kernels.triton.transpose import contiguous_bytes
from isobit.precision import E4M3, QTensor, QuantSpec, quantize

from ..helpers import ROW, WEIGHT, draw, same
from .helpers import DEVICE, HAS_GPU, there

ROWS, EXPERTS, INNER, COLUMNS = 20, 5, 160, 96
OFFSETS = torch.tensor([0, 3, 3, 4, 15, 20])  # the second expert has no row
reference = get_ops("reference", "exact")


def codes(seed: int, *shape: int, spec: QuantSpec) -> QTensor:
    """Small whole numbers under scales that are small powers of two: every sum is exact in
    float32."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, shape, generator=random).float()
    high, wide = spec.block((shape[0], shape[1]))
    grid = (-(-shape[0] // high), -(-shape[1] // wide))
    scale = 2.0 ** torch.randint(-2, 3, grid, generator=random).float()
    return QTensor(values.to(E4M3.dtype), scale, spec)


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stacked(matrices: list[Operand]) -> Stacked:
    return Stacked.of([there(matrix) for matrix in matrices], len(matrices))


def host(weights: Stacked) -> Stacked:
    scale, bias = (None if x is None else x.cpu() for x in (weights.scale, weights.bias))
    return Stacked(weights.data.cpu(), scale, weights.spec, bias=bias)


def flags() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(
        1, dtype=torch.int32, device=DEVICE
    )


def compared(a: Operand, weights: Stacked, out: torch.dtype) -> tuple[Tensor, Tensor]:
    found = grouped.grouped_product(there(a), weights, OFFSETS.to(DEVICE), out)
    return found.cpu(), reference.grouped_product(a, host(weights), OFFSETS, out)


@pytest.mark.parametrize(
    ("offsets", "height"),
    [([0, 3, 3, 4, 15, 20], 4), ([0, 0, 0, 9, 9, 9], 4), ([0, 1, 2, 3, 4, 5], 64), ([0, 70], 64)],
)
def test_every_row_has_one_tile_and_surplus_tiles_have_none(
    offsets: list[int], height: int
) -> None:
    planned = Schedule.of(torch.tensor(offsets, device=DEVICE), offsets[-1], height)
    tiles = [(expert, row) for expert, row in zip(*planned.tile.tolist()) if expert >= 0]
    wanted = [
        (e, row)
        for e, (first, stop) in enumerate(pairwise(offsets))
        for row in range(first, stop, height)
    ]
    assert tiles == wanted
    assert planned.tile[0, len(tiles) :].tolist() == [-1] * (planned.count - len(tiles))
    firsts = planned.start.tolist()
    assert firsts[-1] == len(wanted)
    assert all(
        tiles[firsts[e] : firsts[e + 1]] == [t for t in wanted if t[0] == e]
        for e in range(len(offsets) - 1)
    )


def test_the_bound_of_tiles_is_met_and_never_passed() -> None:
    """Of all ways to give 7 rows to 3 experts, the worst needs as many tiles of 2 as the bound
    says."""
    needed = [
        sum(-(-count // 2) for count in (first, second, 7 - first - second))
        for first in range(8)
        for second in range(8 - first)
    ]
    assert max(needed) == Schedule.of(torch.tensor([0, 1, 4, 7], device=DEVICE), 7, 2).count


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [WEIGHT, ROW], ids=str)
def test_fp8_blocks_are_the_reference_where_sums_are_exact(
    spec: QuantSpec, out: torch.dtype
) -> None:
    weights = stacked([codes(10 + e, COLUMNS, INNER, spec=spec) for e in range(EXPERTS)])
    found, wanted = compared(codes(1, ROWS, INNER, spec=ROW), weights, out)
    assert same(found, wanted)
    shifted = OFFSETS.clone()
    shifted[3] += 1  # the control: one row to another expert
    other = grouped.grouped_product(
        there(codes(1, ROWS, INNER, spec=ROW)), weights, shifted.to(DEVICE), out
    ).cpu()
    assert [row for row in range(ROWS) if not same(other[row], wanted[row])] == [4]


@pytest.mark.parametrize("form", ["bf16", "fp32", "fp8"])
def test_biases_are_added_before_the_rounding(form: str) -> None:
    """Each expert's own. The control: without."""
    if form == "fp8":
        a: Operand = codes(1, ROWS, INNER, spec=ROW)
        weights = stacked([codes(10 + e, COLUMNS, INNER, spec=WEIGHT) for e in range(EXPERTS)])
    else:
        dtype = torch.bfloat16 if form == "bf16" else torch.float32
        a = whole(1, ROWS, INNER, dtype=dtype)
        weights = stacked([whole(10 + e, COLUMNS, INNER, dtype=dtype) for e in range(EXPERTS)])
    biased = replace(weights, bias=there(whole(5, EXPERTS, COLUMNS)))
    for out in (torch.bfloat16, torch.float32):
        found, wanted = compared(a, biased, out)
        assert same(found, wanted)
        assert not same(found, compared(a, weights, out)[0])


def test_transposed_weights_are_dgrad() -> None:
    """One storage for FProp and DGrad: blocks of 128x128, columns and rows exchanged; 200 is two
    blocks."""
    weights = stacked([codes(20 + e, 200, INNER, spec=WEIGHT) for e in range(EXPERTS)])
    dy = codes(2, ROWS, 200, spec=ROW)
    found = grouped.grouped_product(
        there(dy), weights.transpose(), OFFSETS.to(DEVICE), torch.float32
    ).cpu()
    matrices = host(weights).experts
    for (start, stop), matrix in zip(pairwise(OFFSETS.tolist()), matrices):
        assert isinstance(matrix, QTensor)
        wanted = dy.dequantize()[start:stop].double() @ matrix.dequantize().double()
        assert torch.equal(found[start:stop].double(), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_plain_products_are_the_reference_where_sums_are_exact(
    dtype: torch.dtype, transposed: bool
) -> None:
    shape = (INNER, COLUMNS) if transposed else (COLUMNS, INNER)
    weights = stacked([whole(30 + e, *shape, dtype=dtype) for e in range(EXPERTS)])
    weights = weights.transpose() if transposed else weights
    assert same(*compared(whole(3, ROWS, INNER, dtype=dtype), weights, dtype))


def test_rounding_errors_stay_below_their_bound() -> None:
    """Random values: two blocks; each block's sum of 128 float32 additions, one fma, and the
    result's rounding. On a GPU the matrix unit keeps 13 bits of a product aligned to the largest
    (DeepSeek-V3, section 3.3.2)."""
    weights = stacked([quantize(draw(40 + e, COLUMNS, INNER), WEIGHT) for e in range(EXPERTS)])
    a = quantize(draw(4, ROWS, INNER), ROW)
    found, wanted = compared(a, weights, torch.float32)
    absolute = QTensor(a.data.float().abs().to(E4M3.dtype), a.scale, a.spec)
    limit = reference.grouped_product(absolute, _magnitudes(host(weights)), OFFSETS, torch.float32)
    unit = 2.0**-12 if HAS_GPU else 130 * 2.0**-24
    assert bool(((found - wanted).abs() <= unit * limit).all())
    assert not torch.equal(found, wanted.bfloat16().float())


def _magnitudes(weights: Stacked) -> Stacked:
    return Stacked(weights.data.float().abs().to(E4M3.dtype), weights.scale, weights.spec)


def test_a_surplus_tile_and_a_short_one_write_nothing_else() -> None:
    """Poison around the result, and more tiles than rows need: all of the result is written, and
    nothing beside it."""
    guarded = torch.full((ROWS + 160, COLUMNS), torch.nan, device=DEVICE)
    offsets, a = OFFSETS.to(DEVICE), there(codes(1, ROWS, INNER, spec=ROW))
    assert isinstance(a, QTensor)
    weights = stacked([codes(10 + e, COLUMNS, INNER, spec=WEIGHT) for e in range(EXPERTS)])
    assert Schedule.of(offsets, ROWS, grouped.FP8_TILE.t).tile[0].tolist() == [0, 2, 3, 4, -1]
    grouped._block_product(a, weights, offsets, guarded[80 : 80 + ROWS])
    written = ~guarded.isnan()
    assert bool(written[80 : 80 + ROWS].all())
    assert not bool(written[:80].any() or written[80 + ROWS :].any())


def test_no_rows_and_other_blocks() -> None:
    weights = stacked([codes(10 + e, COLUMNS, INNER, spec=WEIGHT) for e in range(EXPERTS)])
    none = torch.zeros(EXPERTS + 1, dtype=torch.int64, device=DEVICE)
    a = there(codes(1, ROWS, INNER, spec=ROW))
    assert isinstance(a, QTensor)
    empty = QTensor(a.data[:0], a.scale[:0], a.spec)
    assert grouped.grouped_product(empty, weights, none, torch.bfloat16).shape == (0, COLUMNS)
    dy = torch.empty(0, COLUMNS, device=DEVICE)
    assert grouped.grouped_weight_gradient(dy, empty, none, ROW, flags()) == [None] * EXPERTS
    fine = stacked([codes(1, COLUMNS, INNER, spec=QuantSpec(E4M3, "1x32", "ue8m0"))] * EXPERTS)
    with pytest.raises(IsobitError, match="not e4m3 1x32 ue8m0"):
        grouped.grouped_product(a, fine, OFFSETS.to(DEVICE), torch.bfloat16)


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
@pytest.mark.parametrize("quantized", [False, True])
def test_quantization_along_tokens_begins_anew_at_every_expert(quantized: bool, scale: str) -> None:
    offsets = torch.tensor([0, 130, 130, 131])
    spec = QuantSpec(E4M3, "1x128", scale)
    values = draw(5, 131, INNER, spread=2.0)
    x: Operand = quantize(values, spec) if quantized else values
    planned = Schedule.of(offsets.to(DEVICE), 131, 128)
    flag = flags()[0]
    found, scales = grouped.quantize_tokens(there(x), spec, planned, offsets.to(DEVICE), flag)
    for tile, (start, stop, matrix) in enumerate(
        [(0, 128, (0, 130)), (128, 130, (0, 130)), (130, 131, (130, 131))]
    ):
        rows = x.dequantize() if isinstance(x, QTensor) else x
        wanted = reference.quantize_along_tokens(rows[slice(*matrix)], spec, "x")
        own = slice(start - matrix[0], stop - matrix[0])
        part = found[:, tile * 128 : tile * 128 + 128].cpu()
        assert same(part[:, : stop - start], wanted.data.view(torch.uint8)[:, own])
        assert not bool(part[:, stop - start :].any())
        assert same(scales[tile].cpu(), wanted.scale[:, own.start // 128].contiguous())
    assert not bool(flag)


def test_nan_is_noted_and_spreads() -> None:
    x, offsets = draw(6, ROWS, INNER), OFFSETS.to(DEVICE)
    x[7, 11] = torch.inf
    flag = flags()
    found, scales = grouped.quantize_tokens(
        there(x), ROW, Schedule.of(offsets, ROWS, 128), offsets, flag[0]
    )
    assert [bool(f) for f in flag] == [True, False]
    assert scales[:4].isnan().nonzero().tolist() == [[2, 11]]  # the fifth tile is a surplus one
    assert bool((found[11, 256 : 256 + 11] & 0x7F == 0x7F).all())


@pytest.mark.parametrize("flow", ["fp8", "bf16", "fp32", "bf16 of codes"])
def test_weight_gradients_are_the_reference_where_sums_are_exact(flow: str) -> None:
    gradient = ROW if flow == "fp8" else None
    dtype = torch.float32 if flow == "fp32" else torch.bfloat16
    dy = whole(8, ROWS, COLUMNS, dtype=dtype)
    x: Operand = (
        codes(9, ROWS, INNER, spec=ROW)
        if "fp8" in flow or "codes" in flow
        else whole(9, ROWS, INNER, dtype=dtype)
    )
    found = grouped.grouped_weight_gradient(
        there(dy), there(x), OFFSETS.to(DEVICE), gradient, flags()
    )
    wanted = reference.grouped_weight_gradient(dy, x, OFFSETS, gradient, "w")
    assert [dw is None for dw in found] == [False, True, False, False, False]
    for dw, other in zip(found, wanted):
        assert (dw is None) == (other is None)
        assert (
            dw is None or other is None or torch.equal(dw.cpu(), other)
        )  # but for the sign of a zero


@pytest.mark.parametrize("flow", ["fp8", "bf16", "bf16 by codes"])
def test_rows_are_found_where_they_stand(flow: str) -> None:
    """Picked as they are loaded: the bits of rows that were picked before. The control picks
    others."""
    a: Operand = quantize(draw(1, 7, INNER), ROW) if flow == "fp8" else draw(1, 7, INNER)
    matrices: list[Operand] = [draw(50 + e, COLUMNS, INNER) for e in range(EXPERTS)]
    weights = stacked(matrices if flow == "bf16" else [quantize(m, WEIGHT) for m in matrices])
    rows = torch.randint(0, 7, (ROWS,), generator=torch.Generator().manual_seed(0))
    compute = partial(
        grouped.grouped_product, weights=weights, offsets=OFFSETS.to(DEVICE), out=torch.float32
    )
    wanted = compute(there(picked(a, rows)))
    assert same(compute(there(a), rows=rows.to(DEVICE)), wanted)
    assert not same(compute(there(a), rows=rows.roll(1).to(DEVICE)), wanted)


def test_one_schedule_serves_products_of_the_same_offsets() -> None:
    offsets = OFFSETS.to(DEVICE)
    assert Schedule.of(offsets, ROWS, 64) is Schedule.of(offsets, ROWS, 64)
    assert Schedule.of(offsets, ROWS, 64) is not Schedule.of(offsets, ROWS, 128)
    assert Schedule.of(offsets, ROWS, 64) is not Schedule.of(offsets.clone(), ROWS, 64)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_weight_gradients_are_added_to_those_that_there_are(fp8: bool, apart: bool) -> None:
    """To the views of one storage in the kernel, to tensors of their own afterwards; an expert that
    had none gets its own, as it had been alone: -0 is not added to 0."""
    dy, x = draw(8, ROWS, COLUMNS), draw(9, ROWS, INNER)
    dy[:3] = -0.0
    given = there(quantize(x, ROW) if fp8 else x)
    compute = partial(
        grouped.grouped_weight_gradient,
        there(dy),
        given,
        gradient=ROW if fp8 else None,
        flags=flags(),
    )
    first = compute(offsets=torch.tensor([0, 0, 6, 6, 20, 20]).to(DEVICE))
    alone = compute(offsets=OFFSETS.to(DEVICE))
    before = [None if dw is None else dw.clone() for dw in first]
    into = before if apart else first
    found = compute(offsets=OFFSETS.to(DEVICE), into=into)
    assert [dw is None for dw in found] == [dw is None for dw in alone]
    storages = {dw.untyped_storage().data_ptr() for dw in found if dw is not None}
    assert (len(storages) > 1) == apart
    for had, old, own, dw in zip(
        into, [None if b is None else b.clone() for b in _fresh(compute)], alone, found
    ):
        if own is None or dw is None:
            continue
        assert dw.data_ptr() == had.data_ptr() if had is not None else same(dw, own)
        assert same(dw, own if old is None else old + own)
    assert not same(found[3], alone[3]), "the control: something was added"


def _fresh(compute: Callable[..., list[Tensor | None]]) -> list[Tensor | None]:
    """What the gradients were before the addition."""
    return compute(offsets=torch.tensor([0, 0, 6, 6, 20, 20]).to(DEVICE))


@pytest.mark.parametrize("shape", [(1, 128, 256), (2, 37, 300), (3, 1, 130), (2, 0, 5)])
def test_bytes_are_transposed(shape: tuple[int, int, int]) -> None:
    x = torch.randint(
        0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    ).to(DEVICE)
    turned = contiguous_bytes(x.transpose(1, 2))
    assert turned.is_contiguous()
    assert torch.equal(turned, x.transpose(1, 2).contiguous())
    assert contiguous_bytes(x) is x
    part = x[:, :, : shape[2] // 2]
    assert torch.equal(contiguous_bytes(part), part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_rows_and_their_gradients_are_the_reference(dtype: torch.dtype) -> None:
    x = draw(12, 12, 40, dtype=dtype)
    dy = draw(13, 4, 40, dtype=dtype)
    gates = draw(14, 4, 3, dtype=torch.float32)
    place = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(4, 3)
    on = [t.to(DEVICE) for t in (x, place, gates, dy)]
    found = grouped.sum_of_rows(on[0], on[1], on[2]).cpu()
    assert same(found, reference.sum_of_rows(x, place, gates))
    assert same(
        grouped.sum_of_rows(on[0], on[1], None).cpu(), reference.sum_of_rows(x, place, None)
    )
    assert not same(found, reference.sum_of_rows(x, place.roll(1, 0), gates))  # the control
    dx, dgates = grouped.sum_of_rows_backward(on[3], on[0], on[1], on[2])
    wanted_dx, wanted_dgates = reference.sum_of_rows_backward(dy, x, place, gates)
    assert same(dx.cpu(), wanted_dx)
    magnitude = reference.sum_of_rows_backward(dy.abs(), x.abs(), place, gates)[1]
    assert bool(
        ((dgates.cpu() - wanted_dgates).abs() <= 40 * 2.0**-23 * magnitude).all()
    )  # 40 terms in any order
    first = x[place[2, 1]].double() @ dy[2].double()
    torch.testing.assert_close(dgates[2, 1].double().cpu(), first, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [True, False])
def test_a_row_does_not_see_the_others(fp8: bool) -> None:
    """Alone, beside others, at another place in its tile: the same bits. The control is another
    expert."""
    random = draw(11, 300, INNER)
    a: Operand = quantize(random, ROW) if fp8 else random
    matrices: list[Operand] = [draw(50 + e, COLUMNS, INNER) for e in range(3)]
    weights = stacked([quantize(m, WEIGHT) for m in matrices] if fp8 else matrices)
    together = grouped.grouped_product(
        there(a), weights, torch.tensor([0, 10, 210, 300]).to(DEVICE), torch.float32
    )
    for first, stop in ((10, 11), (77, 78), (100, 170)):
        rows = (
            QTensor(a.data[first:stop], a.scale[first:stop], ROW)
            if isinstance(a, QTensor)
            else a[first:stop]
        )
        count = stop - first
        alone = grouped.grouped_product(
            there(rows), weights, torch.tensor([0, 0, count, count]).to(DEVICE), torch.float32
        )
        assert same(alone, together[first:stop])
        moved = grouped.grouped_product(
            there(rows), weights, torch.tensor([0, count, count, count]).to(DEVICE), torch.float32
        )
        assert not same(moved, together[first:stop])

"""Several adapters of low rank in two launches: the bits of each alone, by single products, one
after the other."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels import Factors
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.low_rank import definition
from isobit.kernels.low_rank import triton as low_rank
from isobit.kernels.low_rank.triton import AddressedFactors
from isobit.kernels.product.triton import plan
from isobit.kernels.triton.launch import record_launches

from ..compiler import python
from ..helpers import bits, draw, same
from .helpers import DEVICE, HAS_GPU
from .hopper import Card, in_small_tiles, last_channels_first, rounded_once
from .machine_code import ascending, chains, places, uses_local_memory

OPS = TritonOps("bitwise", "tested", DEVICE)
PARTS = ((0, 40), (40, 112), (160, 230))  # columns 112 to 160 and the last have no adapter
OUT, INNER = 240, 296  # five steps of 64 along K, in three blocks of 128, of which none fits
RANKS, COUNTS = (1, 8, 16, 80), (2, 1, 9, 3)
Given = tuple[Tensor, Tensor, list[Factors], Tensor, Tensor]


@pytest.fixture(params=["whole", "in chunks", "chunks apart"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """K in one sum; in as many as it has blocks; and each of these by a program of its own."""
    if request.param != "whole":
        monkeypatch.setitem(plan.LEAST_CHUNK, torch.bfloat16, 1)
    if request.param == "in chunks":
        monkeypatch.setattr(low_rank, "PROCESSORS", 0)
    return str(request.param)


def _factors(rank: int, seed: int, parts: tuple[tuple[int, int], ...] = PARTS) -> Factors:
    made = [
        (draw(seed + i, rank, INNER), draw(seed + i + 9, hi - lo, rank), lo, hi)
        for i, (lo, hi) in enumerate(parts)
    ]
    placed = [(a.to(DEVICE), b.to(DEVICE), lo, hi) for a, b, lo, hi in made]
    return OPS.prepare_factors(placed, 2.0 / (rank + 2))


def _given(counts: tuple[int, ...] = COUNTS, ranks: tuple[int, ...] = RANKS) -> Given:
    """Totals, x, an adapter for each rank, its rows, and where they begin. Some rows have none, and
    one adapter has fewer parts than the others."""
    count = sum(counts) + 3
    adapters = [_factors(rank, 100 * i) for i, rank in enumerate(ranks)]
    adapters[1] = _factors(ranks[1], 100, PARTS[1:])
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(3))[: sum(counts)]
    offsets = torch.tensor([0, *counts]).cumsum(0)
    total, x = draw(1, count, OUT, dtype=torch.float32), draw(2, count, INNER, spread=1.0)
    return total.to(DEVICE), x.to(DEVICE), adapters, rows.to(DEVICE), offsets


def _added(ops: Any, given: Given) -> Tensor:
    """The totals in float32, before they are rounded."""
    total, *more = given
    total = total.clone()
    rounded = ops.add_low_rank(total, *more, torch.bfloat16)
    assert same(rounded, total.bfloat16())
    return total


class _OneByOne:
    """The definition, of single products."""

    add_low_rank = staticmethod(lambda *given: definition.add_low_rank(OPS, *given))


@pytest.mark.slow
@pytest.mark.parametrize("counts", [COUNTS, (40, 1, 1, 0)])
def test_together_they_have_the_bits_of_single_products(
    counts: tuple[int, ...], chunks: str
) -> None:
    """In tiles of 16 and 32 rows, of ranks that fill no tile and of one that has two."""
    given = _given(counts)
    assert all(isinstance(one, AddressedFactors) for one in given[2])
    found = _added(OPS, given)
    assert same(found, _added(_OneByOne, given))
    assert int((bits(found) != bits(given[0])).sum()) > 0.5 * sum(counts) * OUT


@pytest.mark.slow
def test_together_they_have_the_bits_of_each_alone() -> None:
    """The controls: another adapter's factors, and another row, are noticed where they are and
    nowhere else."""
    total, x, adapters, rows, offsets = given = _given()
    wanted = _added(OPS, given)
    for one, part in zip(adapters, rows.split(COUNTS)):
        places, ends = torch.arange(len(part), device=DEVICE), torch.tensor([0, len(part)])
        assert same(_added(OPS, (total[part], x[part], [one], places, ends)), wanted[part])
    other = _added(OPS, (total, x, [*adapters[2:3], *adapters[1:]], rows, offsets))
    changed = (bits(other) != bits(wanted)).cpu()
    assert set(changed.any(1).nonzero()[:, 0].tolist()) == set(rows[: COUNTS[0]].tolist())
    assert not changed[:, 112:160].any()
    assert not changed[:, 230:].any()
    swapped = rows.clone()
    swapped[[0, COUNTS[0]]] = rows[[COUNTS[0], 0]]
    changed = bits(_added(OPS, (total, x, adapters, swapped, offsets))) != bits(wanted)
    assert set(changed.any(1).nonzero()[:, 0].tolist()) == set(rows[[0, COUNTS[0]]].tolist())


@pytest.mark.slow
def test_a_record_of_other_addresses_is_noticed() -> None:
    """The control of where factors are read; also where records that were stacked before are those
    of the same first adapter."""
    given = total, x, adapters, rows, offsets = _given()
    wanted = _added(OPS, given)
    third = adapters[2]
    assert isinstance(third, AddressedFactors)
    other = third.record.clone()
    other[:, 0] = other[:, 0].roll(1)
    changed_one = [*adapters[:2], replace(third, record=other), *adapters[3:]]
    found = _added(OPS, (total, x, changed_one, rows, offsets))
    changed = (bits(found) != bits(wanted)).any(1)
    own = rows[offsets[2] : offsets[3]]
    assert set(changed.nonzero()[:, 0].tolist()) == set(own.tolist())
    assert same(_added(OPS, given), wanted)


def test_records_are_stacked_again_only_for_other_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: one more adapter, another order of them, and one that left and came again."""
    *_, adapters, _, _ = _given()
    found = [one for one in adapters if isinstance(one, AddressedFactors)]
    stacked, stack = [], torch.stack
    monkeypatch.setattr(torch, "stack", lambda given: stacked.append(len(given)) or stack(given))

    def records(given: list[AddressedFactors]) -> Tensor:
        return low_rank._records(given, max(len(one.parts) for one in given))

    assert records(found) is records(found)
    assert stacked == [4]
    again = [found[0], *(replace(one) for one in found[1:])]
    for count, given in enumerate((found[:3], [found[0], *found[:0:-1]], again), 2):
        one = records(given)
        assert one is records(given)
        assert len(stacked) == count
        for record, each in zip(one, given):
            assert torch.equal(record[: len(each.parts)], each.record)
            assert not record[len(each.parts) :].any()


def _launches(adapters: int) -> int:
    given = _given((2,) * adapters, (8,) * adapters)
    with record_launches() as found:
        OPS.add_low_rank(*given, torch.bfloat16)
    return len(found)


def test_any_number_of_adapters_takes_two_launches() -> None:
    """The control: one after the other they take as many for each of them."""
    assert _launches(2) == _launches(5) == 2
    with record_launches() as found:
        definition.add_low_rank(OPS, *_given(), torch.bfloat16)
    assert len(found) == 2 * (len(PARTS) * len(RANKS) - 1)


@pytest.mark.slow
def test_what_the_kernels_do_not_take_is_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32, a rank beyond the kernels', and parts with rows in common; also beside others."""
    a, b = draw(1, 8, INNER), draw(2, 60, 8)
    wide = draw(3, low_rank.MOST_RANK + 1, INNER), draw(4, 60, low_rank.MOST_RANK + 1)
    for parts in (
        [(a.float(), b.float(), 0, 60)],
        [(*wide, 0, 60)],
        [(a, b, 0, 60), (a, b, 59, 119)],
    ):
        placed = [(first.to(DEVICE), second.to(DEVICE), lo, hi) for first, second, lo, hi in parts]
        assert not isinstance(OPS.prepare_factors(placed, 0.5), AddressedFactors)
    total, x, adapters, rows, offsets = _given()
    adapters[0] = definition.prepare_factors(OPS, adapters[0].parts, 0.5)
    given = total, x, adapters, rows, offsets
    assert same(_added(OPS, given), _added(_OneByOne, given))


def test_no_rows_are_no_launch() -> None:
    total, x, adapters, rows, _ = _given()
    with record_launches() as found:
        none = torch.zeros(len(adapters) + 1, dtype=torch.int64)
        found_y = OPS.add_low_rank(total.clone(), x, adapters, rows[:0], none, torch.bfloat16)
    assert found == []
    assert same(found_y, total.bfloat16())


def _in_tiles_of_any_height() -> int:
    """Elements of one adapter's rows whose bits are others where another one has 20, so that tiles
    have 32 rows and not 16."""
    total, x, adapters, rows, offsets = _given((20, 2), (8, 80))
    few = rows[20:]
    ends, place = torch.tensor([0, 2]), torch.arange(2, device=DEVICE)
    alone = _added(OPS, (total[few], x[few], adapters[1:2], place, ends))
    among = _added(OPS, (total, x, adapters, rows, offsets))[few]
    return int((bits(alone) != bits(among)).sum())


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="a GPU has an instruction of its own")
def test_hoppers_instruction_gives_a_row_the_same_bits_in_every_tile() -> None:
    """The controls: a card with another order in small tiles, whose bits differ; and its product
    rounded once, in which no order shows."""
    with Card().computes() as card:
        assert _in_tiles_of_any_height() == 0
    assert {n for _, _, n, _ in card.asked} == {16, 32}
    order = in_small_tiles(last_channels_first, 16)
    with Card(order=order).computes():
        assert _in_tiles_of_any_height() > 0
    with Card(rounded_once, order).computes():
        assert _in_tiles_of_any_height() == 0


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="a GPU has an instruction of its own")
def test_hoppers_instruction_gives_the_bits_of_single_products(chunks: str) -> None:
    given = _given()
    with Card().computes() as card:
        assert same(_added(OPS, given), _added(_OneByOne, given))
    assert card.asked


_PROGRAM = """
import json, torch
from benchmarks.cross_compile import compile_launch, kernel_name, triton_compile
from benchmarks.kernel_table import signature
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.gpu import ARCHITECTURES
from isobit.kernels.triton.launch import compile_for, record_launches
from triton.backends.compiler import GPUTarget

meta = torch.device("meta")
ops = TritonOps("bitwise", "compiled", meta)
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=meta)

def launches():
    found = {}
    for inner, parts in ((4096, ((0, 4096), (4096, 5120), (5120, 6144))), (1024, ((0, 4096),))):
        for rank, count in ((16, 8), (16, 400), (100, 400)):
            one = ops.prepare_factors(
                [(empty(rank, inner), empty(hi - lo, rank), lo, hi) for lo, hi in parts], 0.5)
            rows, ends = empty(8 * count, dtype=torch.int64), torch.arange(9) * count
            total = empty(8 * count, 6144, dtype=torch.float32)
            with record_launches() as made:
                ops.add_low_rank(total, empty(8 * count, inner), [one] * 8, rows, ends, torch.bfloat16)
            found |= {signature(each): each for each in made}
    return found.values()

for (major, minor), architecture in ARCHITECTURES.items():
    compile_for(architecture)
    for launch in launches() if major == 9 else list(launches())[2:4]:
        made = compile_launch(launch, 10 * major + minor)
        hopper = major == 9
        asm = triton_compile(launch, GPUTarget("cuda", 90, 32)).asm if hopper else None
        print(json.dumps({
            "kernel": kernel_name(launch), "capability": 10 * major + minor,
            "class": made.instruction_class, "shared": made.shared_bytes / 1024,
            "limit": architecture.shared_kib, "spilled": made.spilled_bytes + made.stack_bytes,
            "constants": {name: str(value) for name, value in launch.constants.items()},
            "ptx": asm["ptx"] if hopper else "", "sass": asm["sass"] if hopper else ""}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both kernels at the sizes of Qwen3-8B's heads and Qwen3-0.6B's, on Hopper; of other
    architectures one of each, with the largest tiles and sums in chunks."""
    printed = python(_PROGRAM, tmp_path_factory.mktemp("low_rank"))
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.slow
def test_they_compile_for_every_architecture(compiled: list[dict[str, Any]]) -> None:
    """Nothing spills, and shared memory suffices."""
    assert {one["kernel"] for one in compiled} == {"low_rank.shrink", "low_rank.expand"}
    assert [one for one in compiled if one["spilled"]] == []
    assert all(one["shared"] <= one["limit"] for one in compiled)


@pytest.mark.slow
def test_on_hopper_they_are_chains_of_the_warpgroups_instruction(
    compiled: list[dict[str, Any]],
) -> None:
    """Four instructions a step, along ascending K, on the sum so far: `product`'s chain. Factors
    are loaded 16 bytes at once, and a sum is scaled and added in two operations."""
    own = [one for one in compiled if one["capability"] == 90]
    ways = {(one["constants"].get("IN_CHUNKS"), one["constants"]["APART"]) for one in own}
    assert ways >= {("False", "True"), ("True", "False"), ("False", "False")}
    for one in own:
        assert one["class"] == "HGMMA", one["constants"]
        found = chains(one["sass"])
        assert {(c.kind, c.inner, c.length, c.fresh) for c in found} == {("HGMMA", 16, 4, False)}
        assert {c.columns for c in found} == {int(one["constants"]["BLOCK_T"])}
        assert all(ascending(steps) for steps in places(one["ptx"]))
        assert not uses_local_memory(one["sass"])
        assert "fma.rn.f32" not in one["ptx"]
        if one["kernel"] == "low_rank.shrink":
            copies = re.findall(
                r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", one["ptx"]
            )
            assert set(copies) == {"0x10"}


def test_a_factor_that_stands_between_multiples_of_16_bytes_is_copied() -> None:
    storage = draw(1, 8 * INNER + 1).flatten()[1:].view(8, INNER)
    assert storage.data_ptr() % 16
    assert low_rank._aligned(storage).data_ptr() % 16 == 0
    assert same(low_rank._aligned(storage), storage)
    whole = draw(1, 8, INNER)
    assert low_rank._aligned(whole).data_ptr() == whole.data_ptr()

"""The check of a first start, on Hopper's matrix instruction and on cards that no one has built: one
that keeps the promise passes, others are refused, and where only exchanged operands change bits
attention goes on with its rows on one side."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import check
from benchmarks.gpu.common import Bench
from benchmarks.gpu.results import Results
from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.backends import self_check
from isobit.kernels.backends.self_check import EXCHANGED, ONE_SIDE
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.product.triton import plan

from .helpers import DEVICE, HAS_GPU
from .hopper import (
    Array,
    Card,
    alternating_channels,
    in_small_tiles,
    last_channels_first,
    unlike_sides,
)

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU has an instruction of its own")
_LENGTH = 40
_OUTPUTS, _INPUTS = self_check.SMALL.products[0]
Part = Callable[[TritonOps], Iterator[self_check.Found]]
PARTS: dict[str, Part] = {
    "fp8 product": lambda ops: self_check._product(ops, "FP8", _OUTPUTS, _INPUTS),
    "bf16 product": lambda ops: self_check._product(ops, "BF16", _OUTPUTS, _INPUTS),
    "output head": self_check._head,  # whose short side is 64 long, or 128
    "attention, int8": lambda ops: self_check._attention(ops, "INT8", _LENGTH),
    "attention, bf16": lambda ops: self_check._attention(ops, "BF16", _LENGTH),
}
OTHER_ORDERS = {
    "in reverse": last_channels_first,
    "even channels first": alternating_channels,
}


def _failing(part: str, card: Card) -> list[str]:
    with card.computes():
        ops = TritonOps("bitwise", "being checked", DEVICE)
        found = [what for what, holds in PARTS[part](ops) if not holds]
    assert card.asked
    return found


@pytest.mark.parametrize("part", PARTS)
def test_hopper_passes(part: str) -> None:
    assert _failing(part, Card()) == []


@pytest.mark.parametrize("order", OTHER_ORDERS)
@pytest.mark.parametrize("part", PARTS)
def test_another_order_in_small_tiles_is_refused(part: str, order: str) -> None:
    few = in_small_tiles(OTHER_ORDERS[order], 64 if part == "output head" else 32)
    found = _failing(part, Card(order=few))
    assert any("other bits" in what for what in found)


def test_products_whose_operands_are_exchanged_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 products of more than 64 rows have tokens on the long side. The control: weights there,
    for any number of rows."""
    found = _failing("fp8 product", Card(unlike_sides))
    assert any("other bits" in what for what in found)
    monkeypatch.setattr(plan, "_tokens_first", False)
    assert _failing("fp8 product", Card(unlike_sides)) == []


def test_rounded_results_show_less_of_an_order() -> None:
    """Why the check compares float32: of the same product, one row alone and among others."""
    x, w = self_check._random(OPS, 0, 80, _INPUTS), self_check._random(OPS, 1, _OUTPUTS, _INPUTS)
    with Card(order=in_small_tiles(last_channels_first)).computes():
        differing = [
            int((OPS.product(x[:1], w, None, out) != OPS.product(x, w, None, out)[:1]).sum())
            for out in (torch.float32, torch.bfloat16)
        ]
    assert differing[0] > 10
    assert differing[1] < differing[0] / 10


OPS = TritonOps("bitwise", "interpreted", DEVICE)


@pytest.fixture
def _both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of attention alone, by a check of its own, and as it was afterwards."""
    monkeypatch.setattr(attention, "_FEW_ROWS", attention._FEW_ROWS)
    monkeypatch.setattr(plan, "_tokens_first", plan._tokens_first)
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "cache"))

    def of_attention(ops: TritonOps, kind: str, sizes: self_check.Sizes) -> object:
        return self_check._attention(ops, kind, _LENGTH) if kind == "BF16" else iter(())

    monkeypatch.setattr(self_check, "_all", of_attention)


@pytest.mark.usefixtures("_both_sides")
@pytest.mark.parametrize(
    ("card", "side", "says"),
    [
        (Card(), EXCHANGED, "the check passed"),
        (Card(unlike_sides), ONE_SIDE, "exchanged operands change bits on this GPU"),
    ],
    ids=["hopper", "unlike sides"],
)
def test_the_script_goes_on_in_the_way_that_keeps_bits(
    card: Card, side: str, says: str, tmp_path: Path
) -> None:
    results = Results(tmp_path, "one", rehearsal=True)
    results.begin()
    with card.computes():
        check.run(Bench("check", results))
    assert check.verdict(results) == (side, [])
    assert says in check.said(results)
    assert attention.keys_first() == plan._tokens_first == (side == EXCHANGED)


@pytest.mark.usefixtures("_both_sides")
def test_a_card_that_neither_side_helps_is_named(tmp_path: Path) -> None:
    results = Results(tmp_path, "one", rehearsal=True)
    results.begin()
    bench = Bench("check", results)
    with Card(order=_in_low_tiles).computes():
        check.run(bench)
    assert bench.failed
    side, failed = check.verdict(results)
    assert side == ONE_SIDE
    assert failed
    assert "THE CHECK FAILED, and no figure counts: attention over keys in BF16" in check.said(
        results
    )


def _in_low_tiles(a: Array, b: Array) -> tuple[Array, Array]:
    """Another order on a long side of 64 than on one of 128, on which there are more rows."""
    return last_channels_first(a, b) if len(a) <= 64 else (a, b)

"""The check of a first start, on Hopper's matrix instruction and on cards that no one has built: one
that keeps the promise passes, others are refused. What the script makes of that is in
`tests/test_gpu_check.py`."""

from collections.abc import Callable, Iterator

import pytest
import torch

from isobit.kernels.backends import self_check
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.product.triton import plan

from .helpers import DEVICE, HAS_GPU
from .hopper import (
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


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_hopper_passes(part: str) -> None:
    assert _failing(part, Card()) == []


@pytest.mark.slow
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

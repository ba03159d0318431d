"""The router's kernel: float64 to a bound, choices and gates exactly those of its probabilities,
rows in any batch."""

import math

import pytest
import torch
from torch import Tensor

from isobit.kernels.experts import definition
from isobit.kernels.experts.definition import ordered_sum
from isobit.kernels.experts.triton import routing

from ..helpers import draw, same
from .helpers import DEVICE

UNIT = 2.0**-24
SHAPES = [(6, 3), (60, 8), (128, 8), (5, 5), (130, 9), (1, 1)]
"""Experts, and how many serve a token."""


def found(
    logits: Tensor, count: int, normalize: bool = True, given: Tensor | None = None
) -> tuple[Tensor, ...]:
    there = None if given is None else given.to(DEVICE)
    return tuple(x.cpu() for x in routing.route(logits.to(DEVICE), count, normalize, there))


def tied(rows: int, experts: int) -> Tensor:
    """Logits of which many are equal."""
    return draw(0, rows, experts, dtype=torch.float32).mul_(2).round_()


@pytest.mark.parametrize(("experts", "count"), SHAPES)
def test_probabilities_are_float64s_to_a_bound(experts: int, count: int) -> None:
    """The exponent's rounding and the exponential's, in numerator and denominator, log2 E
    additions, and a quotient."""
    logits = draw(1, 19, experts, dtype=torch.float32) * 3
    probabilities, _, _ = found(logits, count)
    exact = torch.softmax(logits.double(), -1)
    spread = logits.amax(1, keepdim=True) - logits
    bound = ((3 * spread + 3 * spread.amax() + 10 + math.log2(experts)) * UNIT) * exact
    assert bool(((probabilities.double() - exact).abs() <= bound).all())
    if experts > 1:
        assert not bool(((probabilities.double() - exact * 1.01).abs() <= bound).all()), (
            "the control: one percent off"
        )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "count"), SHAPES)
def test_choices_and_gates_are_those_of_the_probabilities(
    experts: int, count: int, normalize: bool
) -> None:
    for logits in (
        draw(2, 19, experts, dtype=torch.float32),
        tied(19, experts),
        torch.zeros(3, experts),
    ):
        probabilities, chosen, gates = found(logits, count, normalize)
        assert torch.equal(
            chosen, probabilities.sort(dim=1, descending=True, stable=True).indices[:, :count]
        )
        picked = probabilities.gather(1, chosen)
        assert same(gates, picked / ordered_sum(picked).unsqueeze(1) if normalize else picked)
        given = chosen.flip(1)
        again = found(logits, count, normalize, given)
        assert same(again[0], probabilities)
        assert torch.equal(again[1], chosen)
        picked = probabilities.gather(1, given)
        assert same(again[2], picked / ordered_sum(picked).unsqueeze(1) if normalize else picked)


@pytest.mark.parametrize(("experts", "count"), SHAPES)
def test_rows_alone_have_the_bits_of_the_batch(experts: int, count: int) -> None:
    for logits in (draw(3, 37, experts, dtype=torch.float32), tied(37, experts)):
        whole = found(logits, count)
        for rows in (slice(0, 1), slice(11, 12), slice(7, 18), slice(3, 37)):
            for ours, theirs in zip(found(logits[rows], count), whole):
                assert same(ours, theirs[rows])


def test_another_order_of_the_gates_has_other_bits() -> None:
    """The control: gates are divided by a sum whose order is in the bits."""
    logits = draw(4, 200, 128, dtype=torch.float32)
    probabilities, chosen, gates = found(logits, 8)
    picked = probabilities.gather(1, chosen)
    assert not same(gates, picked / ordered_sum(picked.flip(1)).unsqueeze(1))


def test_a_row_of_nan_has_experts_that_exist_and_gates_of_nan() -> None:
    logits = draw(5, 3, 60, dtype=torch.float32)
    clean = found(logits, 4)
    logits[1, 7] = math.nan
    _, chosen, gates = found(logits, 4)
    assert bool(((chosen >= 0) & (chosen < 60)).all())
    assert bool(gates[1].isnan().all())
    for row in (0, 2):
        assert same(gates[row], clean[2][row])


@pytest.mark.parametrize(
    ("rows", "slots", "count"), [(1, 1, 2), (5, 2, 4), (70, 8, 128), (33, 3, 200), (1025, 8, 9)]
)
def test_choices_are_sorted_by_counting_as_by_a_sort(rows: int, slots: int, count: int) -> None:
    """Up to as many as are counted, and beyond; some experts have no row."""
    random = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(count, generator=random)[:slots] for _ in range(rows)])
    chosen[chosen == count // 2] = 0
    found = routing.by_expert(chosen.to(DEVICE), count)
    wanted = definition.by_expert(chosen, count)
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert all(ours.dtype == torch.int64 for ours in found)
    other = definition.by_expert(chosen.flip(0), count)
    assert rows == 1 or not torch.equal(found[1].cpu(), other[1]), "the control: in another order"

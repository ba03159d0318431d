"""Routing: the softmax, ties, gates in their order, and rows that do not depend on their batch;
with controls."""

import pytest
import torch
from torch import Tensor

from isobit.kernels import Ops, get_ops, native
from isobit.kernels.experts.definition import ordered_sum
from isobit.kernels.reference.sums import tree_sum

from .helpers import draw, same, threads

BACKENDS = ["reference", *(["native"] if native.available()[0] else [])]
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 32]


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return get_ops(request.param)


def test_ties_go_to_the_lower_expert(ops: Ops) -> None:
    logits = torch.log(
        torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
    )
    _, chosen, _ = ops.route(logits, 3, True)
    assert chosen.tolist() == [[1, 2, 0], [0, 1, 2], [3, 2, 1]]


@pytest.mark.parametrize("experts", [1, 5, 60, 128])
def test_probabilities_are_the_softmax_rounded_once(ops: Ops, experts: int) -> None:
    logits = draw(0, 40, experts, dtype=torch.float32) * 5
    probabilities, _, _ = ops.route(logits, 1, False)
    wide = logits.double()
    weights = torch.exp(wide - wide.amax(1, keepdim=True))
    assert same(probabilities, (weights / tree_sum(weights).unsqueeze(1)).float())
    torch.testing.assert_close(probabilities, torch.softmax(wide, 1).float(), rtol=2**-23, atol=0)


@pytest.mark.parametrize("count", COUNTS)
def test_gates_are_added_in_the_order_of_their_experts(ops: Ops, count: int) -> None:
    logits = draw(1, 300, 60, dtype=torch.float32)
    probabilities, chosen, gates = ops.route(logits, count, True)
    for experts, found in (
        (chosen, gates),
        (chosen.flip(1), ops.route(logits, count, True, chosen.flip(1))[2]),
    ):
        picked = probabilities.gather(1, experts)
        total = torch.zeros(300)
        for slot in range(count):
            total = total + picked[:, slot]
        assert same(found, picked / total.unsqueeze(1))
        assert same(ops.route(logits, count, False, experts)[2], picked)


@pytest.mark.parametrize("count", COUNTS)
def test_a_row_is_the_same_in_every_batch(ops: Ops, count: int) -> None:
    """Also with ties, stored by rows or by columns, on one thread and on two."""
    for logits in (
        draw(2, 257, 60, dtype=torch.float32),
        draw(3, 257, 60, dtype=torch.float32).round_(),
    ):
        whole = ops.route(logits, count, True)
        for threads_used in (1, 2):
            with threads(threads_used):
                for start, size in (
                    (0, 1),
                    (5, 1),
                    (7, 2),
                    (1, 3),
                    (0, 8),
                    (100, 31),
                    (3, 64),
                    (1, 256),
                ):
                    rows = slice(start, start + size)
                    for part in (logits[rows].clone(), logits[rows].t().contiguous().t()):
                        for ours, theirs in zip(ops.route(part, count, True), whole):
                            assert same(ours, theirs[rows])


def former(gates: Tensor) -> Tensor:
    return gates / gates.sum(1, keepdim=True)


def test_a_sum_of_pytorch_depends_on_more_than_the_row() -> None:
    """The control: of the same gates and weights, stored by columns or followed by zeros, `sum`
    takes other trees."""
    gates = torch.rand(4000, 13, generator=torch.Generator().manual_seed(4))
    weights = torch.rand(4000, 60, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert not same(former(gates.t().contiguous().t()).contiguous(), former(gates))
    assert not same(weights.t().contiguous().t().sum(1), weights.sum(1))
    assert not same(torch.nn.functional.pad(gates, (0, 3)).sum(1), gates.sum(1))
    for transposed in (False, True):
        stored = gates.t().contiguous().t() if transposed else gates
        assert same(ordered_sum(stored).contiguous(), ordered_sum(gates))
    assert same(ordered_sum(torch.nn.functional.pad(gates, (0, 3))), ordered_sum(gates))

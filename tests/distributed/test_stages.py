"""Neighbours add up their gradients before they send them on: the same bits, and fewer bytes between machines."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from isobit.distributed import Shards
from isobit.distributed.exchange import GradientSum, OrderedSum
from tests.distributed.threads import ThreadRanks, run

MOE = {f"layers.1.experts.{e}.down": (256, 64) for e in range(5)} | {"layers.1.router": (5, 256)}
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (700, 64),
    "layers.0.input_norm": (64,),
    "layers.0.qkv": (384, 64),
    **MOE,
    "final_norm": (64,),
}
Gradients = list[dict[str, Tensor]]


def some_gradients(count: int) -> Gradients:
    """Of `count` micro-batches; each lacks some."""
    generator = torch.Generator().manual_seed(count)
    return [
        {
            name: torch.randn(shape, generator=generator)
            for name, shape in SHAPES.items()
            if torch.rand((), generator=generator) < 0.5
        }
        for _ in range(count)
    ]


def expected(gradients: Gradients, group: int) -> dict[str, Tensor | None]:
    sums = {name: OrderedSum(group) for name in SHAPES}
    for index, given in enumerate(gradients):
        for name, gradient in given.items():
            sums[name].add(index, gradient)
    return {name: each.result() for name, each in sums.items()}


def summed(ranks: ThreadRanks, gradients: Gradients, group: int) -> tuple[Shards, Mapping[str, Tensor | None]]:
    shards = Shards.of(SHAPES, ranks)
    leaves = {name: torch.zeros(()).expand(shape).requires_grad_() for name, shape in SHAPES.items()}
    own = [name for name in SHAPES if shards.owned(name)]
    parameters = {name: torch.nn.Parameter(torch.zeros(shards.own_shape(name))) for name in own}
    total = GradientSum(leaves, parameters, shards, group)
    total.begin()
    for first in range(0, len(gradients), ranks.size):
        with total.round(first, min(ranks.size, len(gradients) - first)):
            if first + ranks.rank < len(gradients):
                given = gradients[first + ranks.rank]
                for name in ("final_norm", *reversed([n for n in SHAPES if n.startswith("layers.")]), "embed"):
                    if name in given:
                        leaves[name].backward(given[name])
    total.finish()
    return shards, {name: parameter.grad for name, parameter in parameters.items()}


def same(found: tuple[Shards, Mapping[str, Tensor | None]], whole: Mapping[str, Tensor | None]) -> bool:
    shards, sums = found
    parts = {name: whole[name] for name in sums}
    return all(
        part is sums[name] is None
        or (part is not None and sums[name] is not None and torch.equal(part[slice(*shards.own(name))], sums[name]))
        for name, part in parts.items()
    )


CASES = [(4, 2), (8, 4), (6, 2), (4, 4), (6, 4)]


@pytest.mark.parametrize(("size", "group"), CASES)
@pytest.mark.parametrize("rest", [0, 1, 3])
def test_stages_add_in_the_order_of_one_process(size: int, group: int, rest: int) -> None:
    gradients = some_gradients(3 * size + rest)
    whole = expected(gradients, group)
    assert all(same(found, whole) for found in run(size, lambda ranks: summed(ranks, gradients, group)))
    reversed_groups = [gradients[i : i + group] for i in range(0, len(gradients), group)][::-1]
    order = [each for part in reversed_groups for each in part]  # the control: the last group first
    other = expected(order, group) if rest == 0 else expected(gradients, 1)
    assert not all(same(found, other) for found in run(size, lambda ranks: summed(ranks, gradients, group)))


@pytest.mark.parametrize(("size", "group"), [(4, 2), (8, 4), (6, 2)])
def test_of_the_bytes_between_machines_one_in_a_group_is_left(size: int, group: int) -> None:
    gradients = some_gradients(2 * size)

    def outside(ranks: ThreadRanks, sum_group: int) -> int:
        summed(ranks, gradients, sum_group)
        return sum(count for rank, count in ranks.sent_to.items() if rank // group != ranks.rank // group)

    staged, plain = (sum(run(size, lambda ranks, g=g: outside(ranks, g))) for g in (group, 1))
    assert staged * group == plain > 0

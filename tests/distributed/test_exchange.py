"""The sum of gradients, of simulated ranks up to 64: the bits of one process, and with groups fewer
bytes between machines."""

import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from isobit.distributed import Shards
from isobit.distributed.exchange import GradientSum
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
    """The definition: what is there of each group is added in turn, and then the groups."""
    sums: dict[str, Tensor | None] = {}
    for name in SHAPES:
        groups: list[Tensor] = []
        for first in range(0, len(gradients), group):
            there = [given[name] for given in gradients[first : first + group] if name in given]
            if there:
                groups.append(functools.reduce(torch.add, there))
        sums[name] = functools.reduce(torch.add, groups) if groups else None
    return sums


def summed(
    ranks: ThreadRanks, gradients: Gradients, group: int
) -> tuple[Shards, Mapping[str, Tensor | None]]:
    shards = Shards.of(SHAPES, ranks)
    leaves: dict[str, Tensor] = {
        name: torch.zeros(()).expand(shape).requires_grad_() for name, shape in SHAPES.items()
    }
    own = [name for name in SHAPES if shards.owned(name)]
    parameters = {name: torch.nn.Parameter(torch.zeros(shards.own_shape(name))) for name in own}
    if (
        ranks.size == group == 1
    ):  # as it is in one process: what is differentiated is what is updated
        leaves = dict(parameters)
    total = GradientSum(leaves, parameters, shards, group)
    total.begin()
    for first in range(0, len(gradients), ranks.size):
        with total.round(first, min(ranks.size, len(gradients) - first)):
            if first + ranks.rank < len(gradients):
                given = gradients[first + ranks.rank]
                for name in (
                    "final_norm",
                    *reversed([n for n in SHAPES if n.startswith("layers.")]),
                    "embed",
                ):
                    if name in given:
                        leaves[name].backward(given[name])
    total.finish()
    return shards, {name: parameter.grad for name, parameter in parameters.items()}


def same(
    found: tuple[Shards, Mapping[str, Tensor | None]], whole: Mapping[str, Tensor | None]
) -> bool:
    shards, sums = found
    parts = {name: whole[name] for name in sums}
    return all(
        part is sums[name] is None
        or (
            part is not None
            and sums[name] is not None
            and torch.equal(part[slice(*shards.own(name))], sums[name])
        )
        for name, part in parts.items()
    )


FEW = [(1, 1), (1, 8), (3, 1), (5, 8), (7, 3), (4, 2), (8, 4), (6, 2), (4, 4), (6, 4)]
"""Ranks and group: in one stage, and from (4, 2) on, where the group divides the ranks, in two."""
CASES = [
    (size, group, max(3 * size, 3 * group, 12) + rest) for size, group in FEW for rest in (0, 1, 3)
]
CASES += [(64, 1, 69), (24, 8, 24), (24, 8, 39), (64, 8, 69)]


@pytest.mark.parametrize(("size", "group", "count"), CASES)
def test_ranks_add_in_the_order_of_one_process(size: int, group: int, count: int) -> None:
    gradients = some_gradients(count)
    whole = expected(gradients, group)
    sums = run(size, lambda ranks: summed(ranks, gradients, group))
    assert all(same(found, whole) for found in sums)
    backwards = [gradients[i : i + group] for i in range(0, len(gradients), group)][::-1]
    other = expected(
        [each for part in backwards for each in part], group
    )  # the control: the last group first
    assert not all(same(found, other) for found in sums)


@pytest.mark.parametrize(("size", "group"), [(4, 2), (8, 4), (6, 2)])
def test_of_the_bytes_between_machines_one_in_a_group_is_left(size: int, group: int) -> None:
    gradients = some_gradients(2 * size)

    def outside(ranks: ThreadRanks, gradient_sum_group: int) -> int:
        summed(ranks, gradients, gradient_sum_group)
        return sum(
            count for rank, count in ranks.sent_to.items() if rank // group != ranks.rank // group
        )

    staged, plain = (sum(run(size, lambda ranks, g=g: outside(ranks, g))) for g in (group, 1))
    assert staged * group == plain > 0

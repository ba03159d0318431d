"""What ranks read, or draw, of a model's weights: each its rows, and never the whole model."""

import math

import pytest
import torch

from isobit import Model
from isobit.distributed import ALONE, Ranks
from isobit.distributed.shards import Shards
from isobit.model.divided.by_rows import layout_of, model_by_rows
from isobit.model.divided.kept import kept_bytes, largest_part
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.model import _drawn
from isobit.model.weights.layout import nbytes
from isobit.model.weights.masters import kept_rows
from isobit.training.plan.live_bytes import LiveBytes
from tests.distributed.test_by_rows import model_of
from tests.distributed.threads import run


def drawn(model: Model, ranks: Ranks) -> tuple[dict[str, torch.Tensor], int]:
    """The rows of random weights that a rank keeps, and the most bytes at a time."""
    with LiveBytes() as live:
        shards = Shards.of(parameter_shapes(model.config), ranks)
        rows = dict(kept_rows(_drawn(model.config, 5), shards))
    return rows, live.peak


def test_random_weights_are_drawn_a_tensor_at_a_time() -> None:
    """A rank holds its rows and one tensor more; one that is alone holds them all."""
    model = model_of("dense", "bf16")
    sizes = [4 * math.prod(shape) for shape in parameter_shapes(model.config).values()]
    whole, peak = drawn(model, ALONE)
    assert peak == sum(sizes)
    found = run(
        3, lambda ranks: (*drawn(model, ranks), Shards.of(parameter_shapes(model.config), ranks))
    )
    for rows, most, shards in found:
        own = sum(tensor.nbytes for tensor in rows.values())
        assert 0 < own < sum(sizes) / 2
        assert most <= own + max(sizes)
        for name, kept in rows.items():
            assert torch.equal(kept, whole[name][slice(*shards.own(name))])


@pytest.mark.parametrize(
    ("kind", "precision"), [("dense", "fp8"), ("tied", "bf16"), ("dense", "mxfp8")]
)
def test_bytes_of_a_rank_are_those_that_it_keeps(kind: str, precision: str) -> None:
    """Counted of the whole model as of the one that a rank has; most of it once among all ranks."""
    model = model_of(kind, precision)
    working, layout = model.transformer._working["rollout"], layout_of(model.config, 3)
    counted = [kept_bytes(working, layout, rank) for rank in range(3)]

    def kept(ranks: Ranks) -> int:
        own = model_by_rows(model, ranks).transformer._working["rollout"]
        return sum(nbytes(operand) for _, operand, _ in own.tensors())

    assert counted == run(3, kept)
    whole = sum(nbytes(operand) for _, operand, _ in working.tensors())
    assert kept_bytes(working, layout_of(model.config, 1), 0) == whole < sum(counted) < 1.05 * whole
    assert whole / 8 < largest_part(working) < whole / 2

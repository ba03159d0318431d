"""Rows of a weight whose other rows are elsewhere: the float32 sums of these rows of the whole
weight's product. Sizes are those of real models: their rows, and with them the processors that a
plan counts on, are divided by 16, their columns and the fewest blocks of a chunk by 8."""

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.comparing import columns_of, cuts, operands
from isobit.kernels import matrices
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.matrices import Divided, Operand, Stacked
from isobit.kernels.product.triton import plan as plans
from isobit.kernels.product.triton.library import LibraryProducts
from isobit.kernels.product.triton.plan import splits_of
from isobit.model.weights.layout import rows_of
from tests.models import slow_where

from ..helpers import same
from .helpers import DEVICE

OPS = TritonOps("bitwise", "a test", DEVICE)
DOWN = {"4B": (256, 1216), "8B": (256, 1536), "32B": (384, 3200), "70B": (512, 3584)}
"""Rows and columns of `down` of Qwen3-4B, 8B, 32B and Llama-70B, in this measure."""
CHUNKS = {("4B", 2): (1, 2), ("8B", 2): (1, 2), ("32B", 4): (1, 2), ("70B", 4): (1, 2)}
"""Chunks of K by FP8's plan of the whole, and of one of so many shards alone."""


@pytest.fixture(autouse=True)
def _small_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PROCESSORS", plans.PROCESSORS // 16)
    for dtype in (torch.uint8, torch.bfloat16):
        monkeypatch.setitem(plans.LEAST_CHUNK, dtype, plans.LEAST_CHUNK[dtype] // 8)


def differing(x: Operand, w: Operand, lo: int, hi: int, whole: Tensor, **known: int) -> int:
    """Return how many float32 sums are other ones."""
    rows = rows_of(w, (lo, hi))
    shard = Divided(rows, None, **known) if known else rows
    return int((OPS.product(x, shard, None, torch.float32) != whole[:, lo:hi]).sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("model", DOWN)
def test_shards_have_the_sums_of_the_whole(model: str, kind: str) -> None:
    """The control: a shard that does not know how many rows the whole has; where its plan is
    another, most of its sums are."""
    columns, inner = DOWN[model]
    torch.manual_seed(0)
    x, w = operands(kind, 2, columns, inner, OPS)
    whole, other = OPS.product(x, w, None, torch.float32), 0
    dtype = torch.uint8 if kind == "fp8" else torch.bfloat16
    for lo, hi in {cuts(columns, size)[end] for size in (2, 4) for end in (0, -1)}:
        assert differing(x, w, lo, hi, whole, whole_rows=columns) == 0
        if splits_of(hi - lo, inner, dtype) != splits_of(columns, inner, dtype):
            other += 1
            assert differing(x, w, lo, hi, whole) > 0.2 * 2 * (hi - lo)
    assert other > 0


def test_a_shard_is_summed_in_the_chunks_of_the_whole() -> None:
    torch.manual_seed(0)
    x, w = operands("fp32", 2, 144, 512, OPS)
    whole = OPS.product(x, w, None, torch.float32)
    chunks = [splits_of(rows, 512, torch.float32)[0] for rows in (144, 32)]
    assert chunks == [1, 2]
    assert differing(x, w, 0, 32, whole, whole_rows=144) == 0
    assert differing(x, w, 0, 32, whole) > 20


@pytest.mark.parametrize(("model", "size"), CHUNKS)
def test_the_plan_of_fewer_rows_is_another(model: str, size: int) -> None:
    """So the number of rows must travel with them; tiles are those of the rows that are there."""
    columns, inner = DOWN[model]
    lo, hi = cuts(columns, size)[0]
    alone = splits_of(hi - lo, inner, torch.uint8)[0]
    assert (splits_of(columns, inner, torch.uint8)[0], alone) == CHUNKS[model, size]
    known = plans.plan(64, hi - lo, inner, torch.uint8, False, columns)
    assert (known.splits, known.tile_n) == (1, plans.plan(64, hi - lo, 128, torch.uint8).tile_n)


@pytest.mark.parametrize("kind", slow_where(["bf16", "fp8", "fp32"], lambda kind: kind != "bf16"))
def test_shards_of_experts_have_the_sums_of_the_whole(kind: str) -> None:
    """Of rows of every expert, of which one serves no row, and of whole experts. The control: halves
    of the columns, whose sums are added."""
    torch.manual_seed(0)
    x, _ = operands(kind, 4, 1, 512, OPS)
    weights = [operands(kind, 1, 144, 512, OPS)[1] for _ in range(3)]
    offsets = torch.tensor([0, 3, 3, 4], device=DEVICE)

    def product(x: Operand, weights: list[Operand], offsets: Tensor) -> Tensor:
        stack = Stacked.of(weights, len(weights))
        return OPS.grouped_product(x, stack, offsets, torch.float32)

    whole = product(x, weights, offsets)
    for lo, hi in ((0, 128), (128, 144)):
        rows = [rows_of(w, (lo, hi)) for w in weights]
        assert same(product(x, rows, offsets), whole[:, lo:hi].contiguous())
    assert same(product(matrices.rows_of(x, 3, 4), weights[1:], offsets[1:] - 3), whole[3:])
    halves = [
        product(columns_of(x, *cut), [columns_of(w, *cut) for w in weights], offsets)
        for cut in ((0, 256), (256, 512))
    ]
    assert (halves[0] + halves[1] != whole).float().mean() > 0.1


def test_a_library_is_asked_for_shards_as_for_the_whole() -> None:
    """One that sums in the order of one chunk serves the shards of a weight whose plan is one
    chunk, though as few rows alone have two; the trial compares with the product that knows. The
    control: alone they are left to Triton."""

    def multiply(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor:
        return OPS.product(a, Divided(b, None, whole_rows=256), bias, out)

    torch.manual_seed(0)
    x, w = operands("bf16", 128, 256, 1024, OPS)
    rows = rows_of(w, (0, 128))
    shard = Divided(rows, None, whole_rows=256)
    products = LibraryProducts({"it": multiply}, lambda call: 1.0, step=128)
    assert products._may_be_tried(x, shard)
    assert not products._may_be_tried(x, rows)
    wanted = OPS.product(x, w, None, torch.float32)[:, :128].contiguous()
    assert same(products.product(x, shard, None, torch.float32), wanted)
    assert len(products.chosen) == 1

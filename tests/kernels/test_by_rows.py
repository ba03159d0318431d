"""Products of ranks that hold a weight together: output rows have the float32 sums of the whole,
under every preset that may be divided, by every backend; columns of K have not."""

import pytest
import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.distributed.layout import cut
from isobit.errors import IsobitError
from isobit.kernels import Divided, Operand, Ops, get_ops
from isobit.kernels.backends.rows import RowOps
from isobit.model.weights.layout import rows_of
from isobit.precision import QTensor, precision_from
from tests.distributed.threads import run
from tests.models import level, require

from .helpers import draw, same

PRESETS = ("fp8", "fp8-unified", "mxfp8", "bf16", "float32")
BACKENDS = ("reference", "native", pytest.param("triton", marks=pytest.mark.slow))
ROWS, OUTPUTS, INPUTS = 5, 520, 640
"""Five blocks of rows and of columns, the last of the rows not full: three ranks' are uneven."""
RANKS = 3


def operands(preset: str, ops: Ops) -> tuple[Operand, Operand]:
    precision = precision_from(preset)
    flow = precision.linear_flow(precision.rollout, "down")
    x, w = draw(0, ROWS, INPUTS, spread=1.0), draw(1, OUTPUTS, INPUTS, spread=1.0)
    given = (x, flow.activation), (w, flow.weight)
    a, b = (
        x.to(flow.compute.dtype) if spec is None else ops.quantize(x, spec) for x, spec in given
    )
    return a, b


def columns(x: Operand, lo: int, hi: int) -> Operand:
    if isinstance(x, Tensor):
        return x[:, lo:hi].contiguous()
    wide = x.block[1]
    scale = x.scale[:, lo // wide : -(-hi // wide)].contiguous()
    return QTensor(x.data[:, lo:hi].contiguous(), scale, x.spec)


def ops_of(backend: str, preset: str) -> Ops:
    require(backend)
    ops = get_ops(backend, level(backend))
    try:
        ops.check_precision(precision_from(preset))
    except IsobitError as error:
        pytest.skip(str(error))
    return ops


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_rows_have_the_sums_of_the_whole(backend: str, preset: str) -> None:
    """The control: three ranges of columns, whose float32 sums are added. Rounded to BF16 next to
    none of them shows."""
    ops = ops_of(backend, preset)
    a, b = operands(preset, ops)
    whole = ops.product(a, ops.prepare(b), None, torch.float32)
    for rank in range(RANKS):
        lo, hi = cut(OUTPUTS, rank, RANKS, 128)
        shard = Divided(rows_of(b, (lo, hi)), None, whole_rows=OUTPUTS)
        assert same(ops.product(a, shard, None, torch.float32), whole[:, lo:hi].contiguous())
    ranges = [cut(INPUTS, rank, RANKS, 128) for rank in range(RANKS)]
    parts = [ops.product(columns(a, *r), columns(b, *r), None, torch.float32) for r in ranges]
    added = parts[0] + parts[1] + parts[2]
    assert (added != whole).float().mean() > 0.1
    assert (added.bfloat16() != whole.bfloat16()).float().mean() < 0.01


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_what_ranks_gather_is_the_whole(backend: str, preset: str) -> None:
    """Columns of the operand that each rank has, with their scales, and of the result; with a
    bias. The control: an operand of which two ranks have each other's columns."""
    ops = ops_of(backend, preset)
    (a, b), bias = operands(preset, ops), draw(2, OUTPUTS)
    whole = ops.product(a, ops.prepare(b), bias, torch.float32)
    width, height = ([cut(n, r, RANKS, 128) for r in range(RANKS)] for n in (INPUTS, OUTPUTS))

    def multiply(ranks: Ranks, own: int) -> Tensor:
        rows = height[ranks.rank]
        sizes = (tuple(hi - lo for lo, hi in ranges) for ranges in (width, height))
        shard = Divided(
            rows_of(b, rows), None, None, whole_rows=OUTPUTS,
            **dict(zip(("operand", "result"), sizes)),
        )  # fmt: skip
        mine, wide = columns(a, *width[own]), RowOps(ops, ranks, (0,) * RANKS)
        return wide.product(mine, shard, bias[slice(*rows)], torch.float32)

    assert all(same(y, whole) for y in run(RANKS, lambda ranks: multiply(ranks, ranks.rank)))
    swapped = run(RANKS, lambda ranks: multiply(ranks, (0, 2, 1)[ranks.rank]))
    assert not any(same(y, whole) for y in swapped)

"""Several adapters of low rank in two launches (`isobit.kernels.low_rank.triton`) against each alone
by single products: every bit, at the sizes of a decode step and of a prompt's chunk."""

import torch
from torch import Tensor

from benchmarks.gpu.common import Bench, Case
from benchmarks.gpu.comparing import compared
from isobit.kernels import Factors, Ops, get_ops
from isobit.kernels.low_rank import definition

WIDTHS = (4096, 1024, 1024)
"""Rows of a weight that have factors of their own: the projections of Qwen3-8B's heads."""
INNER, RANKS = 4096, (8, 16, 64, 100)
_TOYS = ((24, 8, 8), 136, (2, 8))
ROWS = {"decoding": 3, "a chunk": 300}
"""Of each adapter."""


def check(case: Case, bench: Bench) -> None:
    """The controls: another adapter's factors, and what no adapter has added."""
    ops = get_ops("triton")
    widths, inner, ranks = _TOYS if bench.rehearsal else (WIDTHS, INNER, RANKS)
    factors = [_factors(ops, rank, inner, widths) for rank in ranks]
    for what, each in ROWS.items():
        each = min(each, 3) if bench.rehearsal else each
        total, x, rows, offsets = given(ops, each, len(ranks), inner, sum(widths))
        found, wanted = total.clone(), total.clone()
        ops.add_low_rank(found, x, factors, rows, offsets, torch.bfloat16)
        definition.add_low_rank(ops, wanted, x, factors, rows, offsets, torch.bfloat16)
        compared(case, f"{what}: {len(ranks)} adapters, {each} rows each", found, wanted)
        compared(case, f"{what}: before", total[rows], wanted[rows], "different")
        other = total.clone()
        turned = [*factors[1:], *factors[:1]]
        ops.add_low_rank(other, x, turned, rows, offsets, torch.bfloat16)
        compared(case, f"{what}: by other adapters", other[rows], wanted[rows], "different")


def _factors(ops: Ops, rank: int, inner: int, widths: tuple[int, ...]) -> Factors:
    parts, low = [], 0
    for width in widths:
        a, b = (_normal(ops, *shape) for shape in ((rank, inner), (width, rank)))
        parts.append((a.bfloat16(), b.bfloat16(), low, low + width))
        low += width
    return ops.prepare_factors(parts, 2.0 / rank)


def _normal(ops: Ops, *shape: int) -> Tensor:
    return torch.randn(*shape, device=ops.device)


def given(
    ops: Ops, each: int, adapters: int, inner: int, outputs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Totals, x, the rows of each adapter, and where they begin; the last row has none."""
    count = adapters * each + 1
    rows = torch.arange(count - 1, device=ops.device).view(each, adapters).t().flatten()
    x = _normal(ops, count, inner) * torch.exp(_normal(ops, count, inner))
    offsets = torch.arange(adapters + 1) * each
    return _normal(ops, count, outputs), x.bfloat16(), rows, offsets


def launched(ops: Ops) -> None:
    """What `check` launches on a GPU, to be recorded and compiled ahead."""
    factors = [_factors(ops, rank, INNER, WIDTHS) for rank in RANKS]
    for each in ROWS.values():
        total, x, rows, offsets = given(ops, each, len(RANKS), INNER, sum(WIDTHS))
        ops.add_low_rank(total, x, factors, rows, offsets, torch.bfloat16)
        definition.add_low_rank(ops, total, x, factors, rows, offsets, torch.bfloat16)

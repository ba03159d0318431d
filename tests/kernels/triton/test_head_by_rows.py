"""The fused output head, of whose vocabulary each of several ranks has some rows: tokens,
log-probabilities and entropies have the bits of the whole weight."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor

from isobit.distributed import Alone
from isobit.distributed.layout import cut
from isobit.kernels import Divided, Ops
from isobit.kernels.backends.rows import RowOps
from isobit.kernels.backends.triton import TritonOps

from ..helpers import same
from .helpers import DEVICE

T = TypeVar("T")
OPS = TritonOps("bitwise", "a test", DEVICE)
ROWS, VOCABULARY, HIDDEN = 6, 600, 96


class InTurn(Alone):
    """Ranks that compute one after the other in this process: the first round notes what each
    shares, the second gives it to all. What is shared depends on nothing that is received."""

    def __init__(self, rank: int, size: int, noted: list[list[Tensor]]) -> None:
        super().__init__()
        self.rank, self.size, self.noted, self.given = rank, size, noted, 0  # type: ignore[misc]

    def share(self, buffers: Sequence[Tensor], among: range | None = None) -> Callable[[], None]:
        if self.given == len(self.noted):
            self.noted.append([torch.full_like(buffer, 0xFF) for buffer in buffers])
        self.noted[self.given][self.rank] = buffers[self.rank].clone()
        for buffer, said in zip(buffers, self.noted[self.given]):
            buffer.copy_(said)
        self.given += 1
        return lambda: None


def on_ranks(size: int, work: Callable[[Ops, int], T]) -> list[T]:
    """What each rank computes, by operators of its rows of the vocabulary."""
    widths = [hi - lo for lo, hi in (cut(VOCABULARY, r, size, 128) for r in range(size))]
    noted: list[list[Tensor]] = []
    for _ in range(2):
        found = [
            work(cast(Ops, RowOps(OPS, InTurn(rank, size, noted), widths)), rank)
            for rank in range(size)
        ]
    return found


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(3, torch.bfloat16), pytest.param(2, torch.float32, marks=pytest.mark.slow)],
)
def test_the_head_by_rows_of_the_vocabulary(size: int, dtype: torch.dtype) -> None:
    """Drawn tokens, their log-probabilities, and those of given tokens, at a temperature. The
    control: rows of another range."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, HIDDEN, generator=generator).to(DEVICE, dtype) for n in (ROWS, VOCABULARY)
    )
    weight *= 0.3
    keys = torch.arange(4 * ROWS, device=DEVICE).view(ROWS, 4)
    tokens = torch.tensor([0, 127, 128, 300, 599, 511], device=DEVICE)

    def computed(ops: Ops, head: Tensor | Divided) -> list[Tensor]:
        drawn = ops.head_sample(hidden, head, keys, torch.linspace(0.5, 1.5, ROWS).to(DEVICE))
        return [*drawn, *ops.head_logprobs(hidden, head, tokens, 0.7)]

    def of_rank(ops: Ops, rank: int, shift: int = 0) -> list[Tensor]:
        lo, hi = cut(VOCABULARY, rank, size, 128)
        rows = weight.roll(shift, 0)[lo:hi].contiguous()
        return computed(ops, Divided(rows, None, whole_rows=VOCABULARY))

    wanted = computed(OPS, weight)
    for found in on_ranks(size, of_rank):
        assert all(map(same, found, wanted))
    shifted = on_ranks(size, lambda ops, rank: of_rank(ops, rank, 1))
    assert not any(same(found[2], wanted[2]) for found in shifted)

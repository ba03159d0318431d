"""The operators of a rank that holds a model together with others: each has some rows of every
weight (`Divided`), and multiplies by these.

No sum crosses ranks, so the bits are those of the whole weight on one rank. What travels are
copies: an operand's columns before a product that needs all of them, codes where it is quantized,
and the result's columns behind it; of the output head what each tile of the vocabulary leaves, or
logits. All ranks call the same operators in the same order. Left out: which rows are where
(`distributed/layout.py`).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.distributed.weights import as_bytes
from isobit.errors import IsobitError
from isobit.kernels.head import definition
from isobit.kernels.matrices import Divided, Operand, Prepared, Stacked
from isobit.kernels.ops import Ops, Temperature
from isobit.precision import BLOCK, QTensor


class RowOps:
    """The operators of `ops` for one of several `ranks`, of whose embedding and output head each
    has as many rows as `vocabulary` says."""

    def __init__(self, ops: Ops, ranks: Ranks, vocabulary: Sequence[int]) -> None:
        self._ops: Any = ops
        self.ranks, self.vocabulary = ranks, tuple(vocabulary)
        self.first = sum(self.vocabulary[: ranks.rank])
        self._ends = torch.tensor(list(accumulate(self.vocabulary)), device=ops.device)
        self.bytes_received = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def product(
        self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16
    ) -> Tensor:
        if not isinstance(b, Divided):
            return self._ops.product(a, b, bias, out)
        return self.result(self._ops.product(self.operand(a, b), b, bias, out), b)

    def grouped_product(
        self,
        a: Operand,
        weights: Stacked,
        offsets: Tensor,
        out: torch.dtype,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute `Ops.grouped_product` with the rank's rows of each of the `weights`: its columns
        of the result."""
        whole = self.operand(a, weights.each[0][0])
        return self._ops.grouped_product(whole, weights, offsets, out, rows)

    def operand(self, a: Operand, b: Prepared) -> Operand:
        """Return an operand as a product with b needs it, of what each rank has of it."""
        widths = b.operand if isinstance(b, Divided) else None
        return a if widths is None else self._columns(a, widths)

    def result(self, y: Tensor, b: Divided) -> Tensor:
        """Return the columns of a product with b that this rank needs, of those that each has."""
        return y if b.result is None else self.side_by_side(y, b.result)

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        local = table.index_select(0, (tokens - self.first).clamp(0, len(table) - 1))
        rows = torch.stack([x.view(local.shape) for x in self.gathered(local)])
        holders = torch.bucketize(tokens, self._ends, right=True)
        return rows[holders, torch.arange(len(tokens), device=tokens.device)]

    def head_logprobs(
        self, hidden: Tensor, weight: Prepared, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        inputs = hidden, weight, tokens, temperature
        if self._ops.fused_head:
            return self._ops.head_logprobs(*inputs, others=self)
        return definition.head_logprobs(self, *inputs)  # type: ignore[arg-type]

    def head_sample(
        self,
        hidden: Tensor,
        weight: Prepared,
        keys: Tensor,
        temperature: Temperature,
        source: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        inputs = hidden, weight, keys, temperature, source
        if self._ops.fused_head:
            return self._ops.head_sample(*inputs, others=self)
        return definition.head_sample(self, *inputs)  # type: ignore[arg-type]

    def exchange(self, summary: Tensor, size: int) -> None:
        """Fill a summary [rows, kinds, tiles] of tiles of `size` rows of the head's weight with the
        tiles of other ranks."""
        assert all(rows % size == 0 for rows in self.vocabulary[:-1]), "ranks share a tile"
        counts = [-(-rows // size) for rows in self.vocabulary]
        by_rank = summary[..., : sum(counts)].split(counts, -1)
        shapes = [tiles.shape for tiles in by_rank]
        received = self.gathered(by_rank[self.ranks.rank], [tiles.numel() for tiles in by_rank])
        for tiles, values, shape in zip(by_rank, received, shapes):
            tiles.copy_(values.view(shape))

    def _columns(self, x: Operand, widths: Sequence[int]) -> Operand:
        """Return an operand of which each rank has `widths` columns, whole, with its scales."""
        if isinstance(x, Tensor):
            return self.side_by_side(x, widths)
        if not x.spec.columns_independent:
            raise IsobitError(
                f"ranks that hold a model together cannot divide an operand in {x.spec}, which has "
                f"a scale beyond {BLOCK} columns: choose fp8, fp8-unified, mxfp8 or bf16"
            )
        wide = x.spec.block((len(x.data), sum(widths)))[1]
        scale = self.side_by_side(x.scale, [-(-width // wide) for width in widths])
        return QTensor(self.side_by_side(x.data, widths), scale, x.spec)

    def side_by_side(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns [T, width] of all ranks."""
        rows = len(x)
        received = self.gathered(x, [rows * width for width in widths])
        columns = [y.view(rows, width).view(torch.uint8) for y, width in zip(received, widths)]
        assert x.shape[1] == widths[self.ranks.rank]
        return torch.cat(columns, 1).view(x.dtype) if rows else x.new_empty(0, sum(widths))

    def gathered(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Return what each rank has, by rank: as many elements as x, or `counts`, flat."""
        counts = [x.numel()] * self.ranks.size if counts is None else counts
        if not sum(counts):
            return [x.new_empty(0) for _ in counts]
        size, rank = x.element_size(), self.ranks.rank
        buffers = [torch.empty(n * size, dtype=torch.uint8, device=x.device) for n in counts]
        buffers[rank] = as_bytes(x.contiguous())
        self.ranks.share(buffers)()
        self.bytes_received += sum(map(len, buffers)) - len(buffers[rank])
        return [buffer.view(x.dtype) for buffer in buffers]

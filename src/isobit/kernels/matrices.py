"""Matrices as products take them: plain or quantized (`Operand`), a weight with what a backend packed of it (`Packed`),
and the weights of several experts in one storage (`Stacked`).

Left out: the products (`Ops`), and the layout of packs, which each backend chooses.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from isobit.precision import QTensor, QuantSpec

Operand = Tensor | QTensor


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight [N, K], and its values in the order in which a backend's inner loop reads them (`Ops.prepare`).

    The backend alone reads `panels`; `values` [N, K], if it needs them, are the dequantized weight. Both hold the
    weight as it was when it was prepared: after writing into a weight, prepare it again.
    """

    weight: Operand
    panels: Tensor | None
    values: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies, without the weight."""
        return sum(t.numel() * t.element_size() for t in (self.panels, self.values) if t is not None)


Prepared = Operand | Packed
"""A weight as products take it."""


def weight_of(prepared: Prepared) -> Operand:
    """The weight without its packs."""
    return prepared.weight if isinstance(prepared, Packed) else prepared


def values(operand: Prepared) -> Tensor:
    """The values of an operand: a plain tensor itself, or the dequantized float32 matrix."""
    operand = weight_of(operand)
    return operand.dequantize() if isinstance(operand, QTensor) else operand


def plain(operand: Operand, dtype: torch.dtype) -> Tensor:
    """A plain tensor itself, or the dequantized matrix in `dtype`."""
    return operand.dequantize().to(dtype) if isinstance(operand, QTensor) else operand


@dataclass(frozen=True, eq=False)
class Stacked:
    """E matrices [N, K] of one shape and format, in one storage: the weights of a layer's experts.

    data [E, N, K]; quantized: E4M3 or another format of `spec`, with scale [E, block rows, block columns] float32. Else
    a plain type, without scale and spec. `prepared`: every matrix as `Ops.prepare` returned it, if it was prepared.
    `bias` [E, N]: what a forward's product adds, if anything; a stack that is made of this one has none.
    """

    data: Tensor
    scale: Tensor | None = None
    spec: QuantSpec | None = None
    prepared: tuple[Prepared, ...] | None = None
    bias: Tensor | None = None

    @staticmethod
    def of(matrices: Iterable[Operand], count: int) -> "Stacked":
        """Copies of `count` matrices, taken one after the other."""
        stacked: Stacked | None = None
        for index, matrix in enumerate(matrices):
            if stacked is None:
                stacked = Stacked._like(matrix, count)
            parts = (matrix.data, matrix.scale) if isinstance(matrix, QTensor) else (matrix,)
            for target, part in zip((stacked.data, stacked.scale), parts):
                assert target is not None
                target[index].copy_(part)
        assert stacked is not None
        return stacked

    @staticmethod
    def _like(matrix: Operand, count: int) -> "Stacked":
        if isinstance(matrix, Tensor):
            return Stacked(matrix.new_empty((count, *matrix.shape)))
        data, scale = (part.new_empty((count, *part.shape)) for part in (matrix.data, matrix.scale))
        return Stacked(data, scale, matrix.spec)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.data.shape[0], self.data.shape[1], self.data.shape[2])

    @cached_property
    def experts(self) -> tuple[Operand, ...]:
        """Every matrix as an operand over this storage; the same objects every time."""
        if self.prepared is not None:
            return tuple(weight_of(matrix) for matrix in self.prepared)
        if self.scale is None or self.spec is None:
            return self.data.unbind(0)
        return tuple(QTensor(data, scale, self.spec) for data, scale in zip(self.data.unbind(0), self.scale.unbind(0)))

    @property
    def each(self) -> tuple[Sequence[Prepared], Sequence[Tensor | None]]:
        """Every expert's matrix, prepared if it was, and its bias."""
        matrices = self.prepared or self.experts
        return matrices, [None] * len(matrices) if self.bias is None else self.bias.unbind(0)

    @cached_property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        assert self.spec is not None
        return self.spec.block(self.shape[1:])

    def transpose(self) -> "Stacked":
        """Every matrix transposed, over the same storage."""
        scale = None if self.scale is None else self.scale.transpose(1, 2)
        return Stacked(self.data.transpose(1, 2), scale, None if self.spec is None else self.spec.transpose())

    def map(self, change: Callable[[Operand], Operand]) -> "Stacked":
        """Every matrix changed, in a new storage."""
        return Stacked.of((change(matrix) for matrix in self.experts), len(self.experts))

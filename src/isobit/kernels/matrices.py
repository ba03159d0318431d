"""Matrices as products take them: plain or quantized (`Operand`), a weight with what a backend
packed of it (`Packed`), a frozen one with two codes to a byte (`PackedFP4`), and the weights of
several experts in one storage (`Stacked`).

Left out: the products (`Ops`), and the layout of packs, which each backend chooses.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from isobit.precision import PackedFP4, QTensor, QuantSpec
from isobit.precision.packed_fp4 import GROUP, NVFP4, panels, unpacked, unpacked_scales

Operand = Tensor | QTensor
Gradients = Sequence[Tensor | None]
"""Of several weights; None: it has none yet."""
LIBRARY_ROWS = 512
"""Rows, of which a library of products gets a multiple where there are as many."""
StoredWeight = Operand | PackedFP4
"""A working weight as it is stored. Products unpack two codes to a byte a part at a time."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight [N, K], and its values in the order in which a backend's inner loop reads them
    (`Ops.prepare`).

    The backend alone reads `panels`; `values` [N, K], if it needs them, are the dequantized weight.
    Both hold the weight as it was when it was prepared: after writing into a weight, prepare it
    again.
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
        return sum(
            t.numel() * t.element_size() for t in (self.panels, self.values) if t is not None
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Divided(Packed):
    """Some rows of a weight of `whole_rows`: a product has the bits that these rows of the whole
    weight's have, so what its number of rows decides is decided by `whole_rows`.

    Where ranks hold a model together (`backends/rows.py`), `operand` are the columns of the
    operand that each rank has, if not each has all, and `result` those of the result, if every rank
    needs all.
    """

    whole_rows: int
    operand: tuple[int, ...] | None = None
    result: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole weight."""
        return (self.whole_rows, self.weight.shape[1])


Prepared = StoredWeight | Packed
"""A weight as products take it."""


@overload
def weight_of(prepared: Operand | Packed) -> Operand: ...
@overload
def weight_of(prepared: PackedFP4) -> PackedFP4: ...
def weight_of(prepared: Prepared) -> StoredWeight:
    """Return the weight without its packs."""
    return prepared.weight if isinstance(prepared, Packed) else prepared


def tensors_of(kept: StoredWeight) -> tuple[Tensor, ...]:
    """Return the tensors of a matrix: itself, or codes and scales."""
    if isinstance(kept, Tensor):
        return (kept,)
    return kept.tensors if isinstance(kept, PackedFP4) else (kept.data, kept.scale)


def values(operand: Prepared) -> Tensor:
    """Return the values of an operand: a plain tensor itself, or the dequantized float32 matrix."""
    matrix = weight_of(operand)
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize()


def picked(operand: Operand, rows: Tensor) -> Operand:
    """Return the rows of an operand at these indices."""
    if isinstance(operand, Tensor):
        return operand.index_select(0, rows)
    codes = operand.data.view(torch.uint8).index_select(0, rows).view(operand.data.dtype)
    return QTensor(codes, operand.scale.index_select(0, rows), operand.spec)


def plain(operand: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return a plain tensor itself, or the dequantized matrix in `dtype`."""
    return operand if isinstance(operand, Tensor) else operand.dequantize().to(dtype)


def is_rounded(a: Operand, spec: QuantSpec | None) -> bool:
    """Return whether a product takes values of this format, NVFP4's, rounded to BF16, as `a` is
    BF16: as its input gradient takes them."""
    return spec == NVFP4 and isinstance(a, Tensor) and a.dtype == torch.bfloat16


Product = Callable[[Operand, Operand, Tensor | None, torch.dtype], Tensor]


def by_rows(
    product: Product, a: Operand, b: PackedFP4, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    """Return `product` of a and a few rows of b at a time: as an element's bits do not depend on
    the other rows of b, those of the whole."""
    products = [
        product(a, b.part(rows), None if bias is None else bias[rows], out)
        for rows in panels(b.shape[0], b.shape[1])
    ]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


@dataclass(frozen=True, eq=False)
class Stacked:
    """E matrices [N, K] of one shape and format, in one storage: the weights of a layer's experts.

    data [E, N, K]; quantized: E4M3 or another format of `spec`, with scale [E, block rows, block
    columns] float32. Else a plain type, without scale and spec. With `common` [E, 1] they are
    `PackedFP4`: data [E, N, K / 2] and scale uint8. `prepared`: every matrix as `Ops.prepare`
    returned it, if it was prepared. `bias` [E, N]: what a forward's product adds, if anything; a
    stack that is made of this one has none.
    """

    data: Tensor
    scale: Tensor | None = None
    spec: QuantSpec | None = None
    prepared: tuple[Prepared, ...] | None = None
    bias: Tensor | None = None
    common: Tensor | None = None

    @staticmethod
    def of(matrices: Iterable[StoredWeight], count: int) -> "Stacked":
        """Copy `count` matrices, taken one after the other, into one storage."""
        stacked: Stacked | None = None
        for index, matrix in enumerate(matrices):
            if stacked is None:
                stacked = Stacked._like(matrix, count)
            for target, tensor in zip(
                (stacked.data, stacked.scale, stacked.common), tensors_of(matrix)
            ):
                assert target is not None
                target[index].copy_(tensor)
        assert stacked is not None
        return stacked

    @staticmethod
    def _like(matrix: StoredWeight, count: int) -> "Stacked":
        data, *scales = (tensor.new_empty((count, *tensor.shape)) for tensor in tensors_of(matrix))
        if isinstance(matrix, Tensor):
            return Stacked(data)
        return Stacked(
            data,
            scales[0],
            matrix.spec,
            common=scales[1] if isinstance(matrix, PackedFP4) else None,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        columns = self.data.shape[2] if self.common is None else 2 * self.data.shape[2]
        return (self.data.shape[0], self.data.shape[1], columns)

    @cached_property
    def experts(self) -> tuple[StoredWeight, ...]:
        """Every matrix as an operand over this storage; the same objects every time."""
        if self.prepared is not None:
            return tuple(weight_of(matrix) for matrix in self.prepared)
        if self.scale is None or self.spec is None:
            return self.data.unbind(0)
        if self.common is not None:
            return tuple(
                map(PackedFP4, self.data.unbind(0), self.scale.unbind(0), self.common.unbind(0))
            )
        return tuple(
            QTensor(data, scale, self.spec)
            for data, scale in zip(self.data.unbind(0), self.scale.unbind(0))
        )

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
        """Return the matrices transposed, as views of the same storage."""
        scale = None if self.scale is None else self.scale.transpose(1, 2)
        return Stacked(
            self.data.transpose(1, 2), scale, None if self.spec is None else self.spec.transpose()
        )

    def map(self, change: Callable[[StoredWeight], Operand]) -> "Stacked":
        """Apply a function to every matrix and return the results in a new storage."""
        return Stacked.of((change(matrix) for matrix in self.experts), len(self.experts))

    def values(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return some rows and columns of every expert's packed codes, dequantized: float32 [E,
        rows, columns]."""
        assert self.scale is not None
        assert self.common is not None
        start, stop, _ = columns.indices(self.shape[2])
        scale = unpacked_scales(
            self.scale[:, rows, start // GROUP : stop // GROUP], self.common.unsqueeze(2)
        )
        return unpacked(
            self.data[:, rows, start // 2 : stop // 2]
        ).float() * scale.repeat_interleave(GROUP, 2)


def rows_of(operand: Operand, start: int, stop: int) -> Operand:
    """Return rows [start, stop) of an operand whose scales, if it has any, each belong to one
    row."""
    if isinstance(operand, Tensor):
        return operand[start:stop]
    assert operand.block[0] == 1, "rows share scales"
    return QTensor(operand.data[start:stop], operand.scale[start:stop], operand.spec)

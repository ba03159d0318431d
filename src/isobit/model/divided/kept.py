"""Bytes of working weights that ranks hold together: what one of them keeps, and what is whole on a
rank while a layer is open."""

from collections import Counter

from isobit.distributed.layout import Layout
from isobit.distributed.weights import part_of
from isobit.model.weights.layout import Working, nbytes, rows_of
from isobit.precision import PackedFP4


def kept_bytes(working: Working, layout: Layout, rank: int) -> int:
    """Return the bytes of the working weights that a rank keeps, of tensors that are whole, or
    have shapes alone."""
    total = 0
    for name, operand, _ in working.tensors():
        if isinstance(operand, PackedFP4) or not layout.divided(name):
            total += nbytes(operand)
        else:
            total += sum(nbytes(rows_of(operand, rows)) for rows in layout.rows(name, rank))
    return total


def largest_part(working: Working) -> int:
    """Return the bytes of what opens together: a layer, the embedding, or the head."""
    sizes = Counter[str]()
    for name, operand, _ in working.tensors():
        sizes[part_of(name)] += nbytes(operand)
    return max(sizes.values())

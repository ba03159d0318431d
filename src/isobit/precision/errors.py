"""What quantization does to tensors: elements clamped and flushed, and the size of the error.

`error_sums` is the definition of the figures of one matrix; a backend may compute them faster
(`Ops.error_sums`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.precision.quantize import BLOCK, QTensor, block_amax, expand_scale


@dataclass(frozen=True)
class QuantStats:
    """The effect of a quantization: fractions of all elements, and the norm of the error relative
    to the input's."""

    saturated: float
    flushed: float
    relative_error: float


@dataclass(frozen=True, eq=False)
class ErrorSums:
    """The quantization error of a matrix of `count` elements, as sums that can be added up.

    `counts` [2] float64: elements clamped, elements flushed to zero. `squares` [2, blocks] float64:
    for every 128 rows the sum of squares of the values, then of the noise.
    """

    count: int
    counts: Tensor
    squares: Tensor


def error_sums(x: Tensor, quantized: QTensor) -> ErrorSums:
    """Compute the error sums of a matrix [R, C] and its quantization."""
    values, restored = x.detach().float(), quantized.dequantize()
    # a zero always has the code of zero
    flushed = values.count_nonzero() - restored.count_nonzero()
    counts = torch.stack((_clamped(values, quantized).double(), flushed.double()))
    return ErrorSums(
        x.numel(), counts, torch.stack([_block_squares(t) for t in (values, restored.sub_(values))])
    )


class QuantTotals:
    """The statistics of several tensors together, each element with the same weight.

    Sums are of blocks of 128 rows, added with one rounding, so they are the same in whatever order
    and parts the blocks come. Figures stay on each tensor's device until they are read, so that
    nothing waits for a GPU before.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counts: list[Tensor] = []  # per tensor [2]: elements clamped and flushed
        self._squares: list[
            Tensor
        ] = []  # per tensor [2, blocks] float64: sums of squares of values and of noise

    def add(self, sums: ErrorSums) -> None:
        """Add the error sums of a matrix and its quantization."""
        self._counts.append(sums.counts)
        self._squares.append(sums.squares)
        self.count += sums.count

    def merge(self, other: "QuantTotals") -> None:
        """Add the totals of another `QuantTotals`."""
        self.count += other.count
        self._counts += other._counts
        self._squares += other._squares

    def to_json(self) -> list[Any]:
        """Return the totals as a list that JSON can hold, which `from_json` reads."""
        if not self._counts:
            return [self.count, [0.0, 0.0], [[], []]]
        squares = torch.cat(self._squares, 1)
        sums = torch.cat(
            [torch.stack(self._counts).sum(0), squares.view(-1)]
        ).tolist()  # one wait for all
        return [
            self.count,
            sums[:2],
            [sums[2 : 2 + squares.shape[1]], sums[2 + squares.shape[1] :]],
        ]

    @staticmethod
    def from_json(values: Sequence[Any]) -> "QuantTotals":
        """Return the totals that `to_json` wrote."""
        totals = QuantTotals()
        totals.count, counts, squares = values
        totals._counts = [torch.tensor(counts).double()]
        totals._squares = [torch.tensor(squares, dtype=torch.float64)]
        return totals

    def stats(self) -> QuantStats:
        """Return the statistics of all that was added; zeros if nothing was."""
        _, (clamped, flushed), squares = self.to_json()
        signal, noise = (math.fsum(sums) for sums in squares)
        count = max(self.count, 1)
        error = math.sqrt(noise / signal) if signal > 0 else 0.0
        return QuantStats(clamped / count, flushed / count, error)


def _block_squares(x: Tensor) -> Tensor:
    """Return the sums of squares [blocks] float64 of blocks of 128 rows of x [R, C]."""
    rows = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square_()
    return torch.nn.functional.pad(rows, (0, -len(rows) % BLOCK)).view(-1, BLOCK).sum(1)


def _clamped(values: Tensor, quantized: QTensor) -> Tensor:
    """Return how many elements exceed what their scale can represent. A block's own maximum may do
    so by the rounding of its scale; that is not counted."""
    limit = quantized.spec.format.max * (1 + 2**-20) * quantized.scale
    # on a CPU this check costs no wait, and saves the expansion
    if values.device.type == "cpu" and not bool(
        (block_amax(values, quantized.block) > limit).any()
    ):
        return torch.zeros(())
    return (values.abs() > expand_scale(limit, quantized.block, quantized.shape)).sum()

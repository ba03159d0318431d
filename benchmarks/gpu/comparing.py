"""Two tensors compared bit for bit, as a row of a case; and operands that would show an order of
sums."""

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isobit.kernels import Operand, Ops
from isobit.precision import E4M3, QTensor, QuantSpec

if TYPE_CHECKING:
    from benchmarks.gpu.common import Case

ROW, BLOCK = QuantSpec(E4M3, "1x128"), QuantSpec(E4M3, "128x128")


def compared(
    case: "Case", what: str, found: Tensor, wanted: Tensor, expected: str | None = "equal"
) -> None:
    """A row for two tensors; `expected` equal, different (a control), or None: a record without a
    claim."""
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} and {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype} and {wanted.dtype}"
    unequal = (_bits(found) != _bits(wanted)).flatten()
    count = int(unequal.sum())
    sound = bool(torch.isfinite(wanted.float()).all()) and float((wanted != 0).float().mean()) > 0.5
    more: dict[str, object] = {}
    if count:
        distance = (found.float() - wanted.float()).abs()
        more = {
            "first": int(unequal.nonzero()[0, 0]),
            "largest": float(distance.max() / wanted.float().abs().max()),
        }
    if expected is not None:
        more |= {"expected": expected, "holds": sound and (count == 0) == (expected == "equal")}
    case.row(what, compared=unequal.numel(), differing=count, sound=sound, **more)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def operands(kind: str, rows: int, outputs: int, inputs: int, ops: Ops) -> tuple[Operand, Operand]:
    """Random operands of widely varying magnitudes: sums of equal ones would hide an order."""
    x, w = (
        (
            torch.randn(n, inputs, device=ops.device)
            * torch.exp(torch.randn(n, inputs, device=ops.device))
        ).bfloat16()
        for n in (rows, outputs)
    )
    if kind == "fp32":
        return x.float(), w.float()
    return (ops.quantize(x, ROW), ops.quantize(w, BLOCK)) if kind == "fp8" else (x, w)


def cuts(count: int, size: int) -> list[tuple[int, int]]:
    """Return ranges of whole blocks of 128, as equal as they can be, none empty; the last may end
    within a block."""
    bounds = [count // 128 * i // size * 128 for i in range(size)] + [count]
    return [(lo, hi) for lo, hi in pairwise(bounds) if hi > lo]


def rows_of_weight(w: Operand, lo: int, hi: int) -> Operand:
    """Return some rows of a weight, whose scales, if it has any, are of blocks of 128."""
    if isinstance(w, QTensor):
        return QTensor(w.data[lo:hi], w.scale[lo // 128 : -(-hi // 128)], w.spec)
    return w[lo:hi]


def columns_of(x: Operand, lo: int, hi: int) -> Operand:
    """Return some columns of an operand, whose scales, if it has any, are of blocks of 128."""
    if isinstance(x, QTensor):
        scale = x.scale[:, lo // 128 : -(-hi // 128)].contiguous()
        return QTensor(x.data[:, lo:hi].contiguous(), scale, x.spec)
    return x[:, lo:hi].contiguous()


def taken(x: Operand, start: int, stop: int) -> Operand:
    return (
        QTensor(x.data[start:stop], x.scale[start:stop], x.spec)
        if isinstance(x, QTensor)
        else x[start:stop]
    )

"""Two tensors compared bit for bit, as a row of a case; and operands that would show an order of
sums."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isobit.distributed.layout import cut
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
    """Return the ranges of whole blocks of 128 that ranks have, none empty."""
    ranges = (cut(count, rank, size, 128) for rank in range(size))
    return [(lo, hi) for lo, hi in ranges if hi > lo]


def columns_of(x: Operand, lo: int, hi: int) -> Operand:
    """Return some columns of an operand, whose scales, if it has any, are of blocks of 128."""
    if isinstance(x, QTensor):
        scale = x.scale[:, lo // 128 : -(-hi // 128)].contiguous()
        return QTensor(x.data[:, lo:hi].contiguous(), scale, x.spec)
    return x[:, lo:hi].contiguous()

"""Weight sync to a second engine: the rollout's own copy, received into buffers of its own and checked every time.

Before a sync every buffer is poisoned with NaN, so that one that nothing writes cannot pass for weights; after it each
tensor is compared with its master. Silent corruption at this point (experts never quantized, stale layouts, unwritten
buffers) is the worst class of bug in two-engine systems. Left out: the transport, which here is a copy in memory.
"""

from dataclasses import replace

import torch
from torch import Tensor

from isobit.errors import RunFailed
from isobit.kernels import Operand
from isobit.model.autograd import Vector, Weight
from isobit.model.working import Working, map_parts, nbytes, tensors_of
from isobit.precision import QTensor

_LARGEST_ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "e4m3": 0.1}
"""Relative error (norms) above which a received tensor is broken; healthy E4M3 blocks have 0.026 to 0.053, broken ones
1 and more. An element of E4M3 is off by 2^-4 at most where it is normal, one of BF16 by 2^-9."""


class Receiver:
    """The rollout's copy of the working weights, in storage that lives through all syncs."""

    def __init__(self) -> None:
        self.working: Working | None = None
        self.bytes = 0

    def receive(self, sent: Working) -> Working:
        """Take over what the learner's side sends. Raises RunFailed, naming the tensor, if it did not arrive whole."""
        if self.working is None:
            self.working = _buffers(sent)
        sources = {name: operand for name, operand, _ in sent.tensors()}
        for _, buffer, _ in self.working.tensors():
            poison(buffer)
        self.bytes = 0
        for name, buffer, _ in self.working.tensors():
            self.transfer(buffer, sources[name])
            self.bytes += nbytes(buffer)
        tensors = list(self.working.tensors())
        distances = [_distance(buffer, master) for _, buffer, master in tensors]
        for (name, buffer, _), (norm, error) in zip(tensors, torch.stack(distances).tolist()):  # one wait for all
            _check(name, buffer, norm, error)
        return self.working

    def transfer(self, buffer: Operand, source: Operand) -> None:
        """Copy one tensor."""
        for target, values in zip(tensors_of(buffer), tensors_of(source)):
            target.copy_(values)


def poison(buffer: Operand) -> None:
    """Make every element NaN."""
    for tensor in tensors_of(buffer):
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in E4M3 and in E5M2
        else:
            tensor.fill_(torch.nan)


def _distance(buffer: Operand, master: Tensor) -> Tensor:
    """Norms of the master and of the difference [2]."""
    values = buffer.dequantize() if isinstance(buffer, QTensor) else buffer.float()
    expected = master.detach()
    return torch.stack((torch.linalg.vector_norm(expected), torch.linalg.vector_norm(values - expected)))


def _check(name: str, buffer: Operand, norm: float, error: float) -> None:
    """Raise RunFailed unless a received tensor is its master, up to the rounding of its format."""
    quantized = isinstance(buffer, QTensor)
    form = buffer.spec.format.name if isinstance(buffer, QTensor) else _FORM[buffer.dtype]
    limit = _LARGEST_ERROR.get(form, 0.25)
    relative = error / norm if norm > 0 else error
    if not relative <= limit:  # NaN is broken too
        kind = "quantized " if quantized else ""
        raise RunFailed(
            f"weight sync: {kind}tensor {name} arrived broken in the rollout engine: relative error {relative:.3g} "
            f"against its master, where {form} allows {limit:.3g}"
        )


_FORM = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def _buffers(sent: Working) -> Working:
    """The same structure over new storage."""
    known: dict[int, Operand] = {}

    def fresh(operand: Operand) -> Operand:
        if id(operand) not in known:
            known[id(operand)] = (
                QTensor(torch.empty_like(operand.data), torch.empty_like(operand.scale), operand.spec)
                if isinstance(operand, QTensor)
                else torch.empty_like(operand)
            )
        return known[id(operand)]

    def copied(part: Weight | Vector) -> Weight | Vector:
        working = fresh(part.working)
        if isinstance(part, Weight):
            bias = None if part.bias is None else torch.empty_like(part.bias)
            return replace(part, working=working, bias=bias)
        assert isinstance(working, Tensor)
        return replace(part, working=working)

    buffers = map_parts(sent, copied)
    assert isinstance(buffers, Working)
    return buffers

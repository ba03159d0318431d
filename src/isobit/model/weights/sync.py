"""Weight sync to a second engine: the rollout has its own copy of the weights, which is checked at
every sync.

Before a sync every buffer is poisoned with NaN, so that one that was not written cannot pass for
weights; after it each tensor is compared with its master. Silent corruption at this point (experts
never quantized, stale layouts, unwritten buffers) is the worst class of bug in two-engine systems.
Left out: the transport, which here is a copy in memory.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from isobit.errors import RunFailed
from isobit.kernels import Operand, Ops, StoredWeight, tensors_of
from isobit.model.weights.layout import Working, nbytes, remake, write
from isobit.model.weights.masters import Masters
from isobit.model.weights.stored import working_vector
from isobit.precision import QTensor

_LARGEST_ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "e4m3": 0.1}
"""Relative error (norms) above which a received tensor is broken. Healthy E4M3 blocks have 0.026 to
0.053, broken ones 1 and more: a normal E4M3 number is off by at most 2^-4, a BF16 number by at most
2^-9."""


class Receiver:
    """Fills the rollout's copy of the working weights, whose storage lives through all syncs."""

    def __init__(self) -> None:
        self.bytes = 0

    def receive(
        self, working: Working, ops: Ops, multiplying: Ops, masters: Masters, names: Collection[str]
    ) -> None:
        """Overwrite the copies of these masters; `ops`, the learner's, quantize them, and
        `multiplying`, the rollout's, pack them. Raises RunFailed, naming the tensor, if one arrives
        broken: the rows that this rank keeps are compared with their masters, the others must be
        there."""
        tensors = list(working.written(names))
        for _, buffer in tensors:
            poison(buffer)
        remake([working], ops, masters, names, self.transfer, multiplying)
        self.bytes = sum(nbytes(buffer) for _, buffer in tensors)
        distances = [
            _distance(buffer, name, masters, working.offsets.get(name, 0.0))
            for name, buffer in tensors
        ]

        def check() -> None:
            for (name, buffer), (norm, error) in zip(
                tensors, torch.stack(distances).tolist()
            ):  # one wait for all
                _check(name, buffer, norm, error)

        masters.shards.ranks.run_on_all(check)

    def transfer(self, buffer: Operand, source: Operand) -> None:
        """Copy one tensor into the buffer."""
        write(buffer, source)


def poison(buffer: StoredWeight) -> None:
    """Set every element to NaN."""
    for tensor in tensors_of(buffer):
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in E4M3 and in E5M2
        else:
            tensor.fill_(torch.nan)


def _distance(buffer: Operand, name: str, masters: Masters, offset: float) -> Tensor:
    """Return [2]: the norm of this rank's rows of a master plus `offset`, and the norm of their
    difference from a buffer; NaN where any number of the buffer is NaN."""
    values = buffer.dequantize() if isinstance(buffer, QTensor) else buffer.float()
    shards = masters.shards
    expected = (
        working_vector(masters.parameters[name], torch.float32, offset)
        if shards.owned(name)
        else values[:0]
    )
    difference = torch.linalg.vector_norm(values[slice(*shards.own(name))] - expected)
    if shards.ranks.size > 1:
        difference = difference + 0 * values.sum()  # NaN in the rows of the others too
    return torch.stack((torch.linalg.vector_norm(expected), difference))


def _check(name: str, buffer: Operand, norm: float, error: float) -> None:
    """Raise RunFailed unless a received tensor is its master up to its format's rounding."""
    quantized = isinstance(buffer, QTensor)
    form = buffer.spec.format.name if isinstance(buffer, QTensor) else _FORM[buffer.dtype]
    limit = _LARGEST_ERROR.get(form, 0.25)
    relative = error / norm if norm > 0 else error
    if not relative <= limit:  # NaN is broken too
        kind = "quantized " if quantized else ""
        raise RunFailed(
            f"weight sync: {kind}tensor {name} arrived broken in the rollout engine: relative "
            f"error {relative:.3g} against its master, where {form} allows {limit:.3g}"
        )


_FORM = {torch.float32: "fp32", torch.bfloat16: "bf16"}

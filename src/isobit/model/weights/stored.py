"""What a forward multiplies by: weights of linear layers with their products' formats, adapters on
them, and vectors.

Weights enter an operator twice: the *working* weight that is multiplied, and the *master* that
receives the gradient. A frozen weight has no master, and none of its inputs is kept for the
backward, unless adapters need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isobit.kernels import Operand, Ops, Prepared, Stacked, StoredWeight, weight_of
from isobit.precision import QuantSpec, along_rows

FROZEN = torch.empty(0)
"""In the place of a frozen weight's master: no gradient is computed for it."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A linear layer's weights [N, K]: masters, working copies, and how its three products run.

    `prepared` is the working weight as the forward's product takes it, with what the backend packed
    of it. `adapters` are added to its result (`adapters/low_rank.py`), or `several` in a model that
    serves them, each to its own rows.
    """

    name: str
    master: Tensor
    prepared: Prepared
    bias_master: Tensor | None
    bias: Tensor | None
    activation: QuantSpec | None = None
    gradient: QuantSpec | None = None
    dgrad: str = "bf16"
    wgrad: str = "bf16"
    own_copy: bool = False  # WGrad takes the unquantized activation, quantized along the tokens
    adapters: tuple["LowRank", ...] = ()
    several: "OfRows | None" = None

    @property
    def working(self) -> StoredWeight:
        """The working weight itself."""
        return weight_of(self.prepared)

    @property
    def keeps_inputs(self) -> bool:
        """Whether the backward needs what the forward multiplied."""
        return self.master.requires_grad or bool(self.adapters)

    @property
    def adapter_masters(self) -> tuple[Tensor, ...]:
        """A and B of each adapter in turn."""
        return tuple(
            factor.master for factors in self.adapters for factor in (factors.a, factors.b)
        )


class OfRows(Protocol):
    """A product that is made in another way: rows are of several adapters
    (`adapters/multi_lora.py`), or ranks have their own columns of a result to which adapters add
    (`divided/adapters.py`)."""

    def product(self, x: Operand, weight: Weight, ops: Ops, dtype: torch.dtype) -> Tensor: ...


class OfExpertRows(OfRows, Protocol):
    """The same of a layer's experts."""

    def product_of_experts(
        self,
        x: Operand,
        weights: Sequence[Weight],
        stacked: Stacked,
        token: Tensor,
        offsets: Tensor,
        ops: Ops,
        dtype: torch.dtype,
    ) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank factors a [r, K] and b [n, r]: scale · b · a is added to rows `lo` to `hi` = lo + n
    of a weight. `together`: of an expert's, the a and the b of all experts, whose storage its own
    are views of."""

    a: Weight
    b: Weight
    lo: int
    hi: int
    scale: float
    together: tuple[Stacked, Stacked] | None = None


@dataclass(frozen=True, eq=False)
class Vector:
    """A norm's weight [C] or an embedding [V, C]: its master and its working copy, which is the
    master and `offset`; with an offset it is float32."""

    name: str
    master: Tensor
    working: Tensor
    offset: float = 0.0


def working_vector(master: Tensor, dtype: torch.dtype, offset: float) -> Tensor:
    """Return a new working copy of a vector's master in `dtype`; in float32 with an `offset`
    added."""
    if not offset:
        plain = torch.contiguous_format  # a leaf of one number, expanded, has a step of 0
        return master.detach().to(dtype, copy=True, memory_format=plain)
    return master.detach().float() + offset


def has_own_copy(weight: Weight) -> bool:
    """Return whether WGrad multiplies a copy of the activation, quantized along tokens."""
    return weight.own_copy and weight.wgrad == "fp8" and weight.activation is not None


def copy_spec(weight: Weight) -> QuantSpec:
    """Return the spec of the copy [K, T] of the inputs, which WGrad multiplies."""
    assert weight.activation is not None
    return along_rows(weight.activation).transpose()

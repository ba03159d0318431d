"""Adapters of low rank on frozen weights (LoRA: Hu et al. 2021, arXiv 2106.09685), never merged,
with their gradients.

For a linear layer with working weight W, rows x̂ as W multiplies them (dequantized, if they are
quantized), and factors A [r, K] and B [n, r] of some rows of W, with s = alpha / r, or alpha / √r
(rsLoRA: Kalajdzievski 2023, arXiv 2312.03732):

    y = round(W·x̂ + bias + s · (B · u)),  u = round(A · x̂)

W·x̂ + bias and B·u are float32 results of `Ops.product`; times s and the sum are float32
operations, element by element; `round` is to the compute format. A fused matrix has factors for
each of its projections; columns without any have W·x̂ + bias alone. So a row's bits do not depend
on its batch (`tests/model/test_low_rank.py`), and with B = 0 they are those of W alone where a
backend's float32 result, rounded, is its BF16 result: under `bitwise`; under `exact` y is then
rounded twice. The backward, of dy:

    du = round(s · (dy·B)),  dx = round(dy·W + Σ du·A),  dA = duᵀ·x̂,  dB = s · (dyᵀ·u)

where dy·W runs as the flow says. Of a layer's experts all have factors, each its own; their sums
are grouped (`kernels/low_rank/experts.py`). Left out: DoRA, dropout, which the rollout would not
have, and adapters of embeddings, heads and routers.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from isobit.kernels import Operand, Ops, Stacked, plain
from isobit.kernels.low_rank.definition import Part, add_part
from isobit.kernels.reference.sums import block_sum
from isobit.model.families.family import Packing
from isobit.model.hub.wrapped import ALONE
from isobit.model.weights.stored import LowRank, Weight


class Projection(NamedTuple):
    """A matrix [hi - lo, inputs] of a model: rows `lo` to `hi` of the master `weight`. `name` is
    `layers.3.q_proj`, `module` Hugging Face's name."""

    name: str
    module: str
    weight: str
    lo: int
    hi: int
    inputs: int

    @property
    def masters(self) -> tuple[str, str]:
        """The names of the projection's two factors, A and B."""
        return f"{self.name}.lora_A", f"{self.name}.lora_B"

    @property
    def expert(self) -> tuple[str, int] | None:
        """The name of an expert's matrix for all experts, and the expert's number:
        (`layers.3.experts.gate_proj`, number); None for a matrix that is not an expert's."""
        layer, separator, rest = self.name.partition(".experts.")
        if not separator:
            return None
        number, _, role = rest.partition(".")
        return f"{layer}.experts.{role}", int(number)


@dataclass(frozen=True, eq=False)
class Adapter:
    """Factors of `projections`, whole, FP32 on the CPU, by name. `base`: the path of the model that
    they adapt. `rslora`: alpha is divided by the root of the rank. `together`: how PEFT holds the
    factors of a layer's experts in one tensor, if it does (`peft_experts.py`). `classes`: how names
    begin in its folder, for each class of the model (`hub/wrapped.py`). `renamed`: as in the
    family's mixtures."""

    rank: int
    alpha: float
    projections: tuple[Projection, ...]
    tensors: Mapping[str, Tensor]
    base: str = ""
    rslora: bool = False
    together: Packing | None = None
    classes: tuple[str, ...] = (ALONE,)
    renamed: bool = False

    @property
    def scale(self) -> float:
        """The factor of the product of B and A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B of each projection, in the order of the projections."""
        return factor_shapes(self.projections, self.rank)

    def of(self, weight: str) -> list[Projection]:
        """Return the adapted projections of a master."""
        return self._by_weight.get(weight, [])

    @cached_property
    def _by_weight(self) -> dict[str, list[Projection]]:
        groups: dict[str, list[Projection]] = {}
        for proj in self.projections:
            groups.setdefault(proj.weight, []).append(proj)
        return groups

    @cached_property
    def experts(self) -> dict[str, int]:
        """The number of experts that have factors, by names such as `layers.3.experts.gate_proj`:
        all of a layer's."""
        return Counter(proj.expert[0] for proj in self.projections if proj.expert is not None)

    def __str__(self) -> str:
        names = dict.fromkeys(proj.name.rpartition(".")[2] for proj in self.projections)
        by = " (rsLoRA)" if self.rslora else ""
        return f"adapter of rank {self.rank}, alpha {self.alpha:g}{by}, on {', '.join(names)}"


def factor_shapes(projections: Sequence[Projection], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A [rank, inputs] and B [outputs, rank] of projections, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for proj in projections:
        a, b = proj.masters
        shapes |= {a: (rank, proj.inputs), b: (proj.hi - proj.lo, rank)}
    return shapes


def product(
    x: Operand, weight: Weight, ops: Ops, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (y [T, N] in `dtype` for x [T, K], the u [T, r] of each adapter)."""
    if not weight.adapters:
        return ops.product(x, weight.prepared, weight.bias, dtype), ()
    total = ops.product(x, weight.prepared, weight.bias, torch.float32)
    us = add(total, x, weight.adapters, ops, dtype)
    return total.to(dtype), us


def add(
    total: Tensor, x: Operand, adapters: Iterable[LowRank], ops: Ops, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Add what the adapters of a weight make of x [T, K] to W·x̂ + bias, `total` [T, N] float32;
    return the u of each adapter."""
    values = plain(x, dtype)
    return tuple(
        add_part(
            ops, total, values, Part(pair.a.prepared, pair.b.prepared, pair.lo, pair.hi), pair.scale
        )
        for pair in adapters
    )


def backward(
    dy: Tensor,
    x: Operand,
    down_products: Sequence[Tensor],
    weight: Weight,
    ops: Ops,
    needs_input: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Return (what the adapters add to dx [T, K], float32, or None; dA and dB of each adapter in
    turn, float32) for dy [T, N]."""
    values, dx, gradients = plain(x, dy.dtype), None, list[Tensor]()
    for lora, u in zip(weight.adapters, down_products):
        slice_ = dy[:, lora.lo : lora.hi].contiguous()
        a, b = (plain(factor.working, dy.dtype) for factor in (lora.a, lora.b))
        du = ops.gradient_product(slice_, b.t(), torch.float32).mul_(lora.scale).to(dy.dtype)
        da = ops.gradient_product(du.t(), values.t(), torch.float32)
        db = ops.gradient_product(slice_.t(), u.t(), torch.float32).mul_(lora.scale)
        gradients += [da, db]
        if needs_input:
            more = ops.gradient_product(du, a.t(), torch.float32)
            dx = more if dx is None else dx.add_(more)
    return dx, gradients


def update_norm(adapters: Iterable[LowRank], ops: Ops) -> float:
    """Compute the Frobenius norm of scale · B·A over all `adapters`, from the working factors: the
    square of an adapter's is the sum over (Bᵀ·B) ∘ (A·Aᵀ), whose factors are [r, r]. For a layer's
    experts, which are all among the adapters, it is computed for all at once."""
    squares, seen = [], set[int]()
    for lora in adapters:
        if lora.together is None:
            a, b = plain(lora.a.working, torch.float32), plain(lora.b.working, torch.float32).t()
            grams = [
                ops.gradient_product(factor, factor, torch.float32).double() for factor in (a, b)
            ]
        elif id(lora.together) in seen:
            continue
        else:
            seen.add(id(lora.together))
            first, second = lora.together
            grams = [_grams(matrix, ops) for matrix in (first.data, second.data.transpose(1, 2))]
        squares.append(block_sum(grams[0] * grams[1]) * lora.scale**2)
    total = math.fsum(torch.stack(squares).tolist()) if squares else 0.0
    return math.sqrt(max(total, 0.0))


def _grams(factors: Tensor, ops: Ops) -> Tensor:
    """Compute the products of each matrix's rows [E, r, K] with each other: [E r, r], float64."""
    count, rank, inputs = factors.shape
    matrix = factors.contiguous()
    offsets = torch.arange(count + 1, device=matrix.device) * rank
    rows = matrix.view(count * rank, inputs)
    return ops.grouped_product(rows, Stacked(matrix), offsets, torch.float32).double()

"""An adapter added to its model's weights, for systems that do not take adapters, and how much of
it survives.

W + s · B·A is computed in float64 and rounded to the FP32 master. A run trains the model Q(W) with
the update Δ = s · B·A next to it, unrounded; a merged model is Q(W + Δ). Where an update is smaller
than the weights' rounding, it arrives with an error larger than itself. So the gap is measured:
|Q(W + Δ) - Q(W) - Δ| / |Δ|, of Frobenius norms over all matrices that have an adapter
(`tests/commands/test_merge.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobit.kernels import plain
from isobit.kernels.reference.sums import block_sum
from isobit.model.adapters.peft import base_of, brings_tokenizer, read_peft
from isobit.model.model import Model
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.weights.layout import made_like
from isobit.precision import PackedFP4, Precision


@dataclass(frozen=True)
class Gap:
    """The gap of a merge: `update` is |Δ| / |W|, `error` that of the quantized sum relative to
    |Δ|."""

    update: float
    error: float

    def text(self, precision: str) -> str:
        """Return the gap under a precision as one line."""
        if not self.update:
            return "merged: the adapter changes nothing"
        return (
            f"merged: the update has {self.update:.2e} of the weights' norm; in the weights as "
            f"{precision} multiplies them it has an error of {self.error:.2g} times its own norm"
        )


@torch.no_grad()
def merged(folder: Path, precision: str | Mapping[str, Any] | Precision) -> tuple[Model, Gap]:
    """Return the model of an adapter's folder with the adapter in its masters, and the gap under a
    flow. Raises IsobitError as `Model.load` does."""
    model = Model.load(base_of(folder), precision)
    adapter = read_peft(folder, model.config)
    if brings_tokenizer(folder):
        model.tokenizer = Tokenizer.load(folder)
    masters = model.named_parameters()
    working = {weight.name: weight.working for weight in model.transformer.rollout_weights()}
    sums = torch.zeros(3, dtype=torch.float64)  # squares of W, of the update, of its error
    for name in dict.fromkeys(proj.weight for proj in adapter.projections):
        previous = masters[name].double()
        update = torch.zeros_like(masters[name], dtype=torch.float64)
        for proj in adapter.of(name):
            a, b = (adapter.tensors[factor].to(update.device).double() for factor in proj.masters)
            update[proj.lo : proj.hi] = adapter.scale * (b @ a)
        masters[name].copy_(previous + update)
        old = working[name]
        assert not isinstance(old, PackedFP4)  # nothing is frozen here
        new = made_like(old, masters[name], model.ops, name)
        error = plain(new, torch.float32).double() - plain(old, torch.float32).double() - update
        sums += torch.stack(
            [block_sum(matrix.square()) for matrix in (previous, update, error)]
        ).cpu()
    model.sync()
    norms = [math.sqrt(square) for square in sums.tolist()]
    return model, Gap(norms[1] / norms[0], norms[2] / norms[1] if norms[1] else 0.0)

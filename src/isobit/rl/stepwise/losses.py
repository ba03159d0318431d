"""The losses of Tinker's API, by their names there, each summed over tokens, never averaged.

A loss is a function of rows: of a target token, its log-probability and what else the loss reads of
it. Left out: custom losses, which a client computes itself and which arrive as `cross_entropy`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.errors import IsobitError, listed


@dataclass(frozen=True, eq=False)
class Rows:
    """Target tokens of a micro-batch, one after the other: `logprobs` [T] float32, with a gradient;
    `inputs` [T] float32 by name; `sequence` [T] int64, each row's datum; `options` of the loss."""

    logprobs: Tensor
    inputs: Mapping[str, Tensor]
    sequence: Tensor
    options: Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """`of` rows, [T]; the names that it reads of each datum beside target_tokens, and its options
    with their defaults."""

    of: Callable[[Rows], Tensor]
    inputs: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=dict)


def cross_entropy(rows: Rows) -> Tensor:
    """-weight · log p."""
    return -rows.inputs["weights"] * rows.logprobs


def importance_sampling(rows: Rows) -> Tensor:
    """-p / q · A, of tokens that q sampled."""
    ratio = torch.exp(rows.logprobs - rows.inputs["logprobs"])
    return -ratio * rows.inputs["advantages"]


LOSSES = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling, ("logprobs", "advantages")),
}


def loss_of(name: str) -> Loss:
    """Raises IsobitError for a name that is none."""
    if name not in LOSSES:
        raise IsobitError(f"loss: expected one of {listed(LOSSES)}, got {name!r:.80}")
    return LOSSES[name]

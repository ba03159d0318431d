"""The losses of Tinker's API by their names there (tinker-docs.thinkingmachines.ai, "Loss
functions", November 2026): sums over target tokens, never means.

p is the probability of a target token, q the one that its sampler recorded, A its advantage. A loss
is a function of `Rows`; autograd has its gradient, by log p alone. The formulas are not those of
`rl/algorithm/loss.py`, which bound the log of a ratio, and clip around 1 by two numbers for all
tokens. Left out: custom losses, which a client differentiates itself and sends as `cross_entropy`
with weight -dL/d log p, and `stable_reinforce`, whose formula is not published.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.errors import IsobitError, brief, listed
from isobit.rl.algorithm.loss import Loss

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
_CLIPS = {LOW: 0.8, HIGH: 1.2}


@dataclass(frozen=True, eq=False)
class Rows:
    """Target tokens of a micro-batch, one after the other: `logprobs` [T] with a gradient; by name
    what the loss needs, and its options [T]; `sequence` [T] int64, the number of each one's datum."""

    logprobs: Tensor
    inputs: Mapping[str, Tensor]
    sequence: Tensor

    @property
    def ratio(self) -> Tensor:
        """The ratio p / q of each row."""
        return torch.exp(self.logprobs - self.inputs["logprobs"])

    @property
    def advantages(self) -> Tensor:
        return self.inputs["advantages"]

    def clipped(self, ratio: Tensor) -> Tensor:
        """Return a ratio within the thresholds."""
        return torch.clamp(ratio, self.inputs[LOW], self.inputs[HIGH])


@dataclass(frozen=True)
class SummedLoss(Loss[Rows, Tensor]):
    """A loss that `needs` inputs of each datum besides target_tokens; its options with their
    defaults, of which a datum may give those in `of_tokens` for each token. `several`: whether a
    position may have several targets."""

    options: Mapping[str, float] = field(default_factory=dict)
    of_tokens: tuple[str, ...] = ()
    several: bool = False


def cross_entropy(rows: Rows) -> Tensor:
    """Return the loss -weight · log p."""
    return -rows.inputs["weights"] * rows.logprobs


def importance_sampling(rows: Rows) -> Tensor:
    """Return the loss -p / q · A."""
    return -rows.ratio * rows.advantages


def ppo(rows: Rows) -> Tensor:
    """Return -min(p / q · A, clip(p / q) · A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7)."""
    return _least(rows, rows.ratio)


def cispo(rows: Rows) -> Tensor:
    """Return -clip(p / q) · A · log p, no gradient through the clipped ratio (MiniMax 2025, arXiv
    2506.13585, eq. 4)."""
    return -rows.clipped(rows.ratio).detach() * rows.logprobs * rows.advantages


def dro(rows: Rows) -> Tensor:
    """Return -(log p · A - beta / 2 · (log p / q)²) (Richemond et al. 2024, arXiv 2405.19107)."""
    squared = (rows.logprobs - rows.inputs["logprobs"]) ** 2
    return -(rows.logprobs * rows.advantages - 0.5 * rows.inputs["beta"] * squared)


def gspo(rows: Rows) -> Tensor:
    """Return `ppo` with one ratio for a sequence, exp of the mean of log p / q over the tokens
    where `sequence_ratio_mask` is not 0; each token carries its own part of the gradient
    (GSPO-token: Zheng et al. 2025, arXiv 2507.18071, eq. 13 and 14). Of no token the ratio is 1."""
    policy, sequence = rows.logprobs.detach(), rows.sequence
    chosen = rows.inputs["sequence_ratio_mask"] != 0
    count = int(sequence.max()) + 1
    sums = torch.zeros(count, dtype=policy.dtype).index_add(
        0, sequence[chosen], (policy - rows.inputs["logprobs"])[chosen]
    )
    tokens = torch.bincount(sequence[chosen], minlength=count).clamp(min=1)
    return _least(rows, torch.exp((sums / tokens)[sequence] + rows.logprobs - policy))


def _least(rows: Rows, ratio: Tensor) -> Tensor:
    return -torch.minimum(ratio * rows.advantages, rows.clipped(ratio) * rows.advantages)


_SAMPLED = ("logprobs", "advantages")
_CLIPPED = "advantages", _CLIPS, tuple(_CLIPS)
LOSSES = {
    "cross_entropy": SummedLoss(cross_entropy, ("weights",), "weights", several=True),
    "importance_sampling": SummedLoss(importance_sampling, _SAMPLED, "advantages"),
    "ppo": SummedLoss(ppo, _SAMPLED, *_CLIPPED),
    "cispo": SummedLoss(cispo, _SAMPLED, *_CLIPPED),
    "dro": SummedLoss(dro, _SAMPLED, options={"beta": 0.05}),
    "gspo": SummedLoss(gspo, (*_SAMPLED, "sequence_ratio_mask"), *_CLIPPED),
}


def loss_of(name: str) -> SummedLoss:
    """Return the loss by this name. Raises IsobitError where there is none."""
    if name not in LOSSES:
        raise IsobitError(f"loss: expected one of {listed(LOSSES)}, got {brief(repr(name))}")
    return LOSSES[name]


def options_of(name: str, loss: SummedLoss, given: Mapping[str, float]) -> dict[str, float]:
    """Return all options of a loss. Raises IsobitError for an unknown option, and for values that
    are not numbers from 0 on, or thresholds in the wrong order."""
    for key, value in given.items():
        if key not in loss.options:
            known = f"; it has {listed(loss.options)}" if loss.options else ", and has none"
            raise IsobitError(f"loss {name}: {brief(repr(key))} is no option of it{known}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise IsobitError(
                f"loss {name}: {key}: expected a number from 0 on, got {brief(repr(value))}"
            )
    options = {**loss.options, **given}
    if options.get(LOW, 0.0) > options.get(HIGH, 0.0):
        raise IsobitError(
            f"loss {name}: {LOW} {options[LOW]:g} is above {HIGH} {options[HIGH]:g}; they are bounds "
            "of the ratio, such as 0.8 and 1.2"
        )
    return options

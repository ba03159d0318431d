"""A rollout batch as the learner takes it: the fixed tensors that its loss compares with; how far its two sides are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.rl.mismatch import mismatch_metrics, sequence_metrics
from isobit.rl.samples import Sample

Advantage = float | Sequence[float]
"""Of a completion: one number for all of its tokens, or one for each trained token."""


@dataclass(eq=False)
class Batch:
    """Per sample, [trained tokens] float32: advantages and log-probabilities; `fresh`: it has to be of the weights
    that learning begins with, so that a difference is a mismatch. `kept`, bool: the tokens that are averaged over, if
    not all are."""

    samples: Sequence[Sample]
    advantages: list[Tensor]
    rollout: list[Tensor]
    old: list[Tensor]
    fresh: list[bool]
    reference: list[Tensor] | None = None
    weights: list[Tensor] | None = None
    kept: list[Tensor] | None = None

    @property
    def counted(self) -> list[int]:
        """The tokens of each sample that the loss is averaged over."""
        return [len(row) for row in self.rollout] if self.kept is None else [int(row.sum()) for row in self.kept]

    def mismatch(self, found: Sequence[tuple[int, Tensor]]) -> dict[str, float]:
        """Of the learner's log-probabilities by index against the rollout's."""
        return _mismatch([(logprobs, self.rollout[i]) for i, logprobs in found])

    def staleness(self) -> dict[str, float]:
        """How far samples of older weights are from the policy of now."""
        found = self.mismatch([(i, old) for i, old in enumerate(self.old) if not self.fresh[i]])
        names = ("kl_k3", "token_mult_prob_error")
        return {f"staleness/{name}": found[f"mismatch/{name}"] for name in names} if found else {}


def per_token(samples: Sequence[Sample], advantages: Sequence[Advantage]) -> list[Tensor]:
    """Advantages of tokens [trained tokens] float32 for each sample."""
    found = []
    for sample, given in zip(samples, advantages, strict=True):
        length = sample.num_trained
        values = [given] * length if isinstance(given, (int, float)) else list(given)
        assert len(values) == length
        found.append(torch.tensor(values, dtype=torch.float32))
    return found


def _mismatch(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Nothing if no token was compared: that is not agreement."""
    measured = [pair for pair in pairs if pair[0].numel()]
    if not measured:
        return {}
    learner, rollout = [pair[0] for pair in measured], [pair[1] for pair in measured]
    return mismatch_metrics(torch.cat(learner), torch.cat(rollout)) | sequence_metrics(learner, rollout)

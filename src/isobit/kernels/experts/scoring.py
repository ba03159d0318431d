"""Routing by scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): each expert has a score of its
own, and a bias, which balances their loads, has a say in which are chosen and none in their gates.

For a token: s = σ(logits), float64 inside, rounded to float32; the choice is by s + bias, in
float32. Experts stand in groups; a group counts as the sum of its two largest, and experts of the
`best` groups can be chosen: the largest, ties to the lower index. Their gates are s, divided by
their sum and 1e-20 where the architecture says so, times `scale`. No sum depends on the number of
rows (`tests/kernels/test_scoring.py`). The same PyTorch on every backend; left out: a kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.experts.definition import ordered_sum

_NEVER_0 = 1e-20


@dataclass(frozen=True)
class Scoring:
    """The choice of experts by their scores. Experts stand in `groups`, of which the `best` are
    open to a token; gates are multiplied by `scale`."""

    groups: int
    best: int
    scale: float

    def check(self, experts: int, per_token: int) -> None:
        """Raise IsobitError unless the experts divide into the groups, of two or more each."""
        size = experts // self.groups
        if experts % self.groups or size < 2:
            raise IsobitError(
                f"config.json: {experts} experts do not stand in {self.groups} groups of equal "
                "size, of two or more each"
            )
        if not per_token <= self.best * size or self.best > self.groups:
            raise IsobitError(
                f"config.json: {per_token} experts per token, of {self.best} of {self.groups} "
                f"groups of {size}: expected no more than there are"
            )


def by_score(
    logits: Tensor,
    bias: Tensor,
    count: int,
    normalize: bool,
    scoring: Scoring,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores [T, E] float32; the `count` experts chosen [T, count] int64, in descending
    order; gates [T, count] float32) of logits [T, E] float32 and bias [E] float32. Gates are of the
    experts `given` [T, count] int64, by default of those chosen."""
    scores = torch.sigmoid(logits.double()).float()
    wanted = scores + bias
    if scoring.groups > 1:
        wanted = _open(wanted, scoring)
    chosen = _largest(wanted, count)
    gates = scores.gather(1, chosen if given is None else given)
    if normalize:
        gates = gates / (ordered_sum(gates).unsqueeze(1) + _NEVER_0)
    return scores, chosen, gates * scoring.scale


def by_score_backward(
    dscores: Tensor,
    dgates: Tensor,
    scores: Tensor,
    experts: Tensor,
    normalize: bool,
    scoring: Scoring,
) -> Tensor:
    """Return the gradient of the logits [T, E] float32: of gates g = scale · s / Σ s, ds = (scale ·
    dg - Σ dg · g) / Σ s, and d logits = ds · s · (1 - s)."""
    s, dpicked = scores.double(), dgates.double() * scoring.scale
    if normalize:
        picked = s.gather(1, experts)
        total = picked.sum(1, keepdim=True) + _NEVER_0
        dpicked = (dpicked - (dpicked * picked / total).sum(1, keepdim=True)) / total
    ds = dscores.double().scatter_add(1, experts, dpicked)
    return (ds * s * (1 - s)).float()


def _open(wanted: Tensor, scoring: Scoring) -> Tensor:
    """Return `wanted` [T, E], -inf in all groups but the best."""
    grouped = wanted.unflatten(1, (scoring.groups, -1))
    two = grouped.sort(dim=2, descending=True, stable=True).values[..., :2]
    best = _largest(two[..., 0] + two[..., 1], scoring.best)
    closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(closed.unsqueeze(2), -torch.inf).flatten(1)


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest numbers of each row, descending, ties to the lower
    index."""
    return x.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()

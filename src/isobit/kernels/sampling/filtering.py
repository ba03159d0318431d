"""The support of a row of logits under top-k, top-p and min-p: the tokens that can be drawn from
it.

The rollout's sampler and the learner's head call `filter_logits` on the same bits, so both have one
support, and softmax over it is one distribution (tests/training/test_filtered_sampling.py). Order:
penalize repeated tokens, divide by the temperature, keep the top k, of these the smallest set with
probability at least p, of these the tokens with at least min_p times the largest probability. A
token that is left out has logit -inf from there on: probability 0, and no gradient.

Every reduction is over one contiguous row, in float64 where it sums. Left out: the renormalization,
which is that of `Ops.token_logprobs`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.ops import Temperature

Cut = tuple[int, float, float]
"""Top-k, top-p and min-p of all rows; 0, 1 and 0 leave nothing out."""

Filtering = tuple[int, float, float, float]
"""Top-k, top-p, min-p and repetition penalty of all rows; 0, 1, 0 and 1 leave the distribution as
it is."""

LOGITS_AT_ONCE = 2**22
"""Elements of logits that `filter_around` sorts at a time."""

WORKING_BYTES = 43
"""Of such an element, at most, while it is sorted (tests/kernels/test_filtering.py)."""


@dataclass(frozen=True, eq=False)
class Limits:
    """Filters of R rows: `top_k`, `top_p`, `min_p` [R] float64. `most_k`: at least every top-k, 0
    if there is none; `nucleus`: some top-p is below 1."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    most_k: int
    nucleus: bool


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens before each of R rows: `first[r]` to `last[r]` of `tokens` [T]; `first`, `last`
    [R]."""

    tokens: Tensor
    first: Tensor
    last: Tensor

    def to(self, device: torch.device) -> "Context":
        """Return the same with its tensors on `device`."""
        return Context(*(tensor.to(device) for tensor in (self.tokens, self.first, self.last)))

    def seen(self, rows: slice, vocabulary: int) -> Tensor:
        """Mask of the tokens that are among those of each of these rows, [rows, vocabulary]."""
        first, last = self.first[rows], self.last[rows]
        mask = torch.zeros(len(first), vocabulary, dtype=torch.bool, device=self.tokens.device)
        for start in first.unique().tolist():
            mine = first == start
            indices = torch.arange(start, int(last[mine].max()) + 1, device=self.tokens.device)
            earliest = indices.new_full((vocabulary,), torch.iinfo(torch.int64).max)
            earliest.scatter_reduce_(0, self.tokens[indices], indices, "amin")
            mask[mine] = earliest <= last[mine].unsqueeze(1)
        return mask


def slopes(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Return what `penalize` multiplies logits by, as its gradient."""
    return torch.where(seen, torch.where(logits > 0, 1 / penalty, penalty), 1.0)


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Return logits [R, V] float32 in which those of tokens that were `seen` [R, V] are divided by
    the row's `penalty` [R, 1] float32 where they are positive and multiplied by it elsewhere
    (Keskar et al. 2019, as transformers and vLLM have it)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, temperature: Temperature, limits: Limits) -> Tensor:
    """Return logits [R, V] float32, with -inf for the tokens outside the support. Ties at the edge
    of top-k stay in."""
    scaled = logits / (temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature)
    size = scaled.shape[-1]
    if limits.most_k > 0:
        values = scaled.topk(min(limits.most_k, size), dim=-1).values
        threshold = values.gather(
            1, (limits.top_k.long() - 1).clamp(0, values.shape[1] - 1).unsqueeze(1)
        )
        limited = ((limits.top_k > 0) & (limits.top_k < size)).unsqueeze(1)
        scaled = scaled.masked_fill(limited & (scaled < threshold), -torch.inf)
    if limits.nucleus:
        scaled = scaled.masked_fill(~nucleus(scaled, limits.top_p), -torch.inf)
    relative = (scaled - scaled.amax(-1, keepdim=True)).double().exp()
    return logits.masked_fill(
        (scaled == -torch.inf) | (relative < limits.min_p.unsqueeze(1)), -torch.inf
    )


def filter_around(logits: Tensor, tokens: Tensor, temperature: float, cut: Cut) -> Tensor:
    """Return `filter_logits`, in place, of rows that share their settings, but each row's token [R]
    stays in.

    A drawn token is in its row's support by construction; where the weights have moved since, it is
    added to it, so that its log-probability is finite."""
    token_logits = logits.gather(1, tokens.unsqueeze(1))
    if cut == (0, 1, 0):
        return logits
    for rows in logits.split(max(1, LOGITS_AT_ONCE // logits.shape[1])):
        rows.copy_(filter_logits(rows, of_rows(temperature, rows), _limits(cut, rows)))
    return logits.scatter_(1, tokens.unsqueeze(1), token_logits)


def of_rows(temperature: float, rows: Tensor) -> Temperature:
    """Return the temperature as a sampler has it: by row, unless it is 1. A GPU divides by a number
    in another way."""
    return (
        1.0 if temperature == 1 else torch.full((rows.shape[0],), temperature, device=rows.device)
    )


def nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Return the mask [R, V] of the smallest set of most probable tokens whose probability reaches
    `top_p` [R]; ties: lower index. All tokens where `top_p` is 1."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered.double(), -1)
    if (
        scaled.shape[0] == 1
    ):  # on a GPU PyTorch adds up a lone row in another order than one of several
        reached = probability.expand(2, -1).contiguous().cumsum(-1)[:1]
    else:
        reached = probability.cumsum(-1)
    wanted = torch.where(top_p < 1, top_p, torch.inf).unsqueeze(1)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter(
        -1, order, reached - probability < wanted
    )


def _limits(cut: Cut, rows: Tensor) -> Limits:
    top_k, top_p, min_p = (
        torch.tensor(cut, dtype=torch.float64, device=rows.device).unsqueeze(1).unbind(0)
    )
    count = rows.shape[0]
    return Limits(top_k.expand(count), top_p.expand(count), min_p.expand(count), cut[0], cut[1] < 1)

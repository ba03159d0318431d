"""Draw tokens, and their log-probabilities under the distribution that they were drawn from.

A row's token depends on its hidden state and its key (seed, prompt id, sample index, position), and on nothing else.
Order: divide by the temperature, keep the top k, of these the smallest set with probability at least p, of these the
tokens with at least min_p times the largest probability; renormalize. A truncated token has logit -inf from there on.

Every reduction is over one contiguous row, in float64 where it sums: tests/engine/test_sampler.py compares rows alone
and in a batch, bit for bit. Left out: the generator itself (`Ops.sample`).
"""

import torch
from torch import Tensor

from isobit.engine.types import Sampling
from isobit.kernels import Ops, Prepared

LOGITS_AT_ONCE = 2**26
"""Elements of logits that are held at a time (256 MiB)."""


def draw(
    hidden: Tensor, weight: Prepared, keys: Tensor, sampling: Sampling, ops: Ops, source: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64 and log-probabilities [R] float32 for keys [R, 4] int64: key r draws from row `source[r]`, by
    default row r, of hidden [T, C] under the output head's weight [V, C]."""
    rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
    fused = ops.fused_head and not (sampling.greedy or sampling.truncated)
    if keys.shape[0] <= rows or fused:
        return _draw(hidden, weight, keys, sampling, ops, source)
    hidden = hidden if source is None else hidden.index_select(0, source)
    parts = [_draw(h, weight, k, sampling, ops, None) for h, k in zip(hidden.split(rows), keys.split(rows))]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _draw(
    hidden: Tensor, weight: Prepared, keys: Tensor, sampling: Sampling, ops: Ops, source: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not (sampling.greedy or sampling.truncated):
        return ops.head_sample(hidden, weight, keys, sampling.temperature, source)
    logits = ops.product(hidden, weight, None, torch.float32)
    logits = logits if source is None else logits.index_select(0, source)
    if sampling.truncated:
        logits = truncate(logits, sampling)
        tokens = ops.sample(logits, keys, sampling.temperature)
        return tokens, ops.token_logprobs(logits, tokens, sampling.temperature)[0]
    tokens = logits.argmax(-1)
    if not ops.fused_head:  # it would compute these logits again
        return tokens, ops.token_logprobs(logits, tokens, 1.0)[0]
    hidden = hidden if source is None else hidden.index_select(0, source)
    return tokens, ops.head_logprobs(hidden, weight, tokens, 1.0)[0]


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [R, V] with -inf where top-k, top-p or min-p leaves a token out. Ties at the edge of top-k stay in."""
    scaled = logits / sampling.temperature
    size = scaled.shape[-1]
    if 0 < sampling.top_k < size:
        threshold = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    if sampling.top_p < 1:
        scaled = scaled.masked_fill(~nucleus(scaled, sampling.top_p), -torch.inf)
    if sampling.min_p > 0:
        relative = (scaled - scaled.amax(-1, keepdim=True)).double().exp()
        scaled = scaled.masked_fill(relative < sampling.min_p, -torch.inf)
    return logits.masked_fill(scaled == -torch.inf, -torch.inf)


def nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Mask [R, V] of the smallest set of most probable tokens whose probability reaches `top_p`; ties: lower index."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered.double(), -1)
    if scaled.shape[0] == 1:  # on a GPU PyTorch adds up a lone row in another order than one of several
        reached = probability.expand(2, -1).contiguous().cumsum(-1)[:1]
    else:
        reached = probability.cumsum(-1)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, order, reached - probability < top_p)

"""The two matrices over the vocabulary: the gradient of the embedding, and the output head, whose
logits are a product and are held. Left out: log-probabilities and samples of logits
(`sampling/definition.py`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from isobit.kernels.matrices import Prepared, values
from isobit.kernels.ops import Ops, Temperature


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, tokens)


def embedding_backward(dy: Tensor, tokens: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dy.shape[1], device=dy.device).index_add_(0, tokens, dy.float())


def head_logprobs(
    ops: Ops, hidden: Tensor, weight: Prepared, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    return ops.token_logprobs(ops.product(hidden, weight, None, torch.float32), tokens, temperature)


def head_sample(
    ops: Ops,
    hidden: Tensor,
    weight: Prepared,
    keys: Tensor,
    temperature: Temperature,
    source: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = ops.product(hidden, weight, None, torch.float32)
    logits = logits if source is None else logits.index_select(0, source)
    tokens = ops.sample(logits, keys, temperature)
    return tokens, ops.token_logprobs(logits, tokens, temperature)[0]


def head_backward(
    ops: Ops,
    dlogprobs: Tensor,
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    dentropy: Tensor | None = None,
    into: Tensor | None = None,
    trained: bool = True,
) -> tuple[Tensor, Tensor | None]:
    logits = ops.product(hidden, weight, None, torch.float32)
    inputs = (hidden, weight, tokens, temperature, dentropy)
    return head_gradients(ops, dlogprobs, logits, *inputs, into=into, trained=trained)


def head_backward_kept(
    ops: Ops,
    dlogprobs: Tensor,
    logits: Sequence[Tensor],
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    dentropy: Tensor | None = None,
    into: Tensor | None = None,
    from_zero: bool = False,
    trained: bool = True,
) -> tuple[Tensor, Tensor | None]:
    dhidden, total = torch.empty_like(hidden), None
    for rows, some in rows_of(logits):
        dhidden[rows], total = head_gradients(
            ops, dlogprobs[rows], some, hidden[rows], weight, tokens[rows], temperature,
            None if dentropy is None else dentropy[rows], into=total, trained=trained,
        )  # fmt: skip
    if total is None:
        return dhidden, into
    if into is not None:
        return dhidden, into.add_(total)
    return dhidden, total.add_(0.0) if from_zero else total


def rows_of(chunks: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each chunk in the whole, and the chunk."""
    start = 0
    for chunk in chunks:
        yield slice(start, start + len(chunk)), chunk
        start += len(chunk)


def head_gradients(
    ops: Ops,
    dlogprobs: Tensor,
    logits: Tensor,
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    dentropy: Tensor | None = None,
    slope: Tensor | None = None,
    into: Tensor | None = None,
    trained: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Compute `Ops.head_backward` where the logits [T, V] float32 are given; one of -inf has no
    gradient. `slope` [T, V]: their derivatives by those of the head."""
    # d log p(token) / d logits = (onehot - softmax) / temperature
    dlogits = torch.softmax(logits / temperature, -1)
    of_entropy = None if dentropy is None else _entropy_slope(dlogits)
    dlogits.neg_()
    dlogits[torch.arange(dlogits.shape[0], device=tokens.device), tokens] += 1.0
    dlogits *= (dlogprobs / temperature).unsqueeze(-1)
    if of_entropy is not None and dentropy is not None:
        dlogits += of_entropy * (dentropy / temperature).unsqueeze(-1)
    dlogits = (dlogits if slope is None else dlogits * slope).to(hidden.dtype)
    dhidden = ops.gradient_product(dlogits, values(weight).t(), hidden.dtype)
    if not trained:
        return dhidden, None
    return dhidden, ops.gradient_product(dlogits.t(), hidden.t(), torch.float32, into)


def _entropy_slope(probabilities: Tensor) -> Tensor:
    """Return d entropy / d log-odds = -p·(log p + entropy), [T, V]; 0 where p is 0."""
    terms = torch.special.entr(probabilities)
    return terms - probabilities * terms.sum(-1, keepdim=True)

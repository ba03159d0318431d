"""The likeliest tokens of a row and their log-probabilities, next to the token that is drawn.

They come from the same operators as a drawn token's log-probability, on their own rows, so a
token has the same bits here and there, and asking changes no other
(tests/engine/test_top_logprobs.py).
"""

import torch
from torch import Tensor

from isobit.kernels.matrices import Prepared
from isobit.kernels.ops import Ops, Temperature
from isobit.kernels.sampling.capped import logits_of


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the `count` tokens of the largest logits [V], fewer where others have no probability
    (-inf): int64, in descending order, ties to the lower."""
    least = logits.topk(min(count, logits.shape[0])).values[-1]
    places = ((logits >= least) & (logits > -torch.inf)).nonzero().flatten()
    return places[logits[places].sort(descending=True, stable=True).indices[:count]]


def top_logprobs(
    hidden: Tensor,
    weight: Prepared,
    logits: Tensor,
    temperature: Temperature,
    count: int,
    ops: Ops,
    *,
    changed: bool,
) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens of a row and their log-probabilities: of its hidden state
    [1, C] under the head's weight [V, C], and its logits [1, V]. `changed`: by filters, a penalty
    or a cap, so they are of logits that are held also where the head's own operators are others."""
    tokens = likeliest(logits[0], count)
    times = tokens.shape[0]
    each = float(temperature)
    if ops.fused_head and not changed:
        found = ops.head_logprobs(hidden.expand(times, -1), weight, tokens, each)[0]
    else:
        found = ops.token_logprobs(logits.expand(times, -1).contiguous(), tokens, each)[0]
    return list(zip(tokens.tolist(), found.tolist()))


def top_of_rows(
    hidden: Tensor, weight: Prepared, count: int, ops: Ops, cap: float | None = None
) -> list[list[tuple[int, float]]]:
    """Return the same of every row of hidden [T, C], at temperature 1; logits are capped by
    `cap`."""
    return [
        top_logprobs(
            row,
            weight,
            logits_of(ops, row, weight, cap),
            1.0,
            count,
            ops,
            changed=cap is not None,
        )
        for row in hidden.split(1)
    ]

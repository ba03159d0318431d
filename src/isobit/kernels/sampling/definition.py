"""Log-probabilities and counter-based sampling, each a function of one row of logits.

Sampling is the exponential race, which is Gumbel-max in another form: argmax_v p_v / E_v with E_v =
-log(u_v). The uniform numbers are Philox4x32-10 (Salmon et al. 2011) of (seed; token, position,
sample, prompt): no state, no order of work.
"""

from typing import TypeVar

import torch
from torch import Tensor

from isobit.kernels.ops import Temperature

MASK = 0xFFFFFFFF
_Word = TypeVar("_Word", int, Tensor)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# PyTorch splits the sum of a single very long row over threads; sums of short rows it does not
_SUM_BLOCK = 1024


def scaled(logits: Tensor, temperature: Temperature) -> Tensor:
    """Divide logits [T, V] by the temperature, rounded once."""
    return logits / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(logits / temperature) at `tokens`, and the entropy, both [T] float32;
    float64 inside."""
    z = scaled(logits, temperature).contiguous()
    shifted = z.double() - z.amax(-1, keepdim=True).double()
    weights = torch.exp(shifted)
    total = row_sum(weights)
    log_total = torch.log(total)
    chosen = shifted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    energy = row_sum(torch.where(weights > 0, weights * shifted, torch.zeros_like(weights)))
    return (chosen - log_total).float(), (log_total - energy / total).float()


def sample(logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
    """Draw one token per row; ties go to the lowest index, and a token of probability 0 never
    wins."""
    z = scaled(logits, temperature)
    weights = torch.exp(z.double() - z.amax(-1, keepdim=True).double())
    return (weights / exponentials(keys, logits.shape[-1])).argmax(-1)


def exponentials(keys: Tensor, count: int) -> Tensor:
    """Compute -log(u) for tokens 0 to count-1 of every row of `keys` [B, 4] (seed, prompt, sample,
    position): [B, count] float64."""
    seed, prompt, index, position = (column.unsqueeze(-1) for column in keys.unbind(-1))
    token = torch.arange(-(-count // 4), device=keys.device).unsqueeze(0)
    counter = tuple(
        t.expand(keys.shape[0], token.shape[1]) & MASK for t in (token, position, index, prompt)
    )
    words = philox(
        (counter[0], counter[1], counter[2], counter[3]), (seed & MASK, (seed >> 32) & MASK)
    )
    uniform = (
        torch.stack(words, -1).reshape(keys.shape[0], -1)[:, :count].double() + 0.5
    ) * 2.0**-32
    return -torch.log(uniform)


def philox(
    counter: tuple[_Word, _Word, _Word, _Word], key: tuple[_Word, _Word]
) -> tuple[_Word, _Word, _Word, _Word]:
    """Compute Philox4x32-10 on 32-bit words: integers, or int64 tensors of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def _multiply(word: _Word, multiplier: int) -> tuple[_Word, _Word]:
    """Return the high and low halves of the 64-bit product; it wraps around in int64, whose bits
    are still right."""
    wide = word * multiplier
    return (wide >> 32) & MASK, wide & MASK


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in two fixed levels, so that no order depends on threads."""
    if x.shape[-1] <= _SUM_BLOCK:
        return x.sum(-1)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % _SUM_BLOCK))
    return padded.view(*x.shape[:-1], -1, _SUM_BLOCK).sum(-1).contiguous().sum(-1)

"""Draw tokens, and their log-probabilities under the distribution that they were drawn from.

A row's token depends on its hidden state, its key (seed, prompt id, sample index, position) and its
settings, and on nothing else: rows with different settings are drawn together.
tests/engine/test_sampler.py compares rows alone, in a batch and next to rows with other settings,
bit for bit. Left out: which tokens top-k, top-p and min-p keep (`kernels/sampling/filtering.py`),
and the generator (`Ops.sample`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.engine.changes import Changes
from isobit.engine.types import Top
from isobit.kernels import Ops, Prepared
from isobit.kernels.ops import Temperature
from isobit.kernels.sampling import filtering
from isobit.kernels.sampling.capped import logits_of
from isobit.kernels.sampling.filtering import Limits
from isobit.kernels.sampling.top import top_logprobs

LOGITS_AT_ONCE = 2**26
"""Elements of logits that are held at a time (256 MiB)."""

NEUTRAL = (1.0, 0.0, 1.0, 0.0)
"""Settings of a row: temperature (0: greedy), top-k, top-p, min-p."""


@dataclass(frozen=True)
class Kinds:
    """The kinds of draws among some rows, as far as the operators depend on them: a captured step
    serves all rows of its kinds.

    `plain`, `filtered`, `greedy`: such rows. `unit`: every temperature is 1. `nucleus`: some top-p
    is below 1. `most_k`: a power of two, at least every top-k; 0 without top-k.
    """

    plain: bool
    filtered: bool
    greedy: bool
    unit: bool
    nucleus: bool
    most_k: int


def kinds_of(settings: NDArray[np.float64]) -> Kinds:
    """Return the kinds of rows with `settings` [R, 4]."""
    temperature, top_k, top_p, min_p = settings.T
    greedy, nucleus, most_k = temperature == 0, top_p < 1, int(top_k.max(initial=0))
    filtered = (top_k > 0) | nucleus | (min_p > 0)
    return Kinds(
        plain=bool((~greedy & ~filtered).any()),
        filtered=bool(filtered.any()),
        greedy=bool(greedy.any()),
        unit=bool(((temperature == 1) | greedy).all()),
        nucleus=bool(nucleus.any()),
        most_k=1 << (most_k - 1).bit_length() if most_k else 0,
    )


@dataclass(frozen=True, eq=False)
class Draws:
    """The settings by which R tokens are drawn: `keys` [R, 4] int64, `settings` [R, 4] float64, and
    their kinds; `changes`: of the logits before, None: of no row."""

    keys: Tensor
    settings: Tensor
    kinds: Kinds
    changes: Changes | None = None

    @property
    def greedy(self) -> Tensor:
        return self.settings[:, 0] == 0

    @property
    def filtered(self) -> Tensor:
        _, top_k, top_p, min_p = self.settings.unbind(1)
        return (top_k > 0) | (top_p < 1) | (min_p > 0)

    @property
    def temperature(self) -> Temperature:
        """The temperature of each row; 1 for a greedy row, at which its log-probability is
        taken."""
        if self.kinds.unit:
            return 1.0
        return torch.where(self.greedy, 1.0, self.settings[:, 0]).float()

    def split(self, rows: int) -> "list[Draws]":
        def of(start: int, tensor: Tensor) -> Tensor:
            return tensor[start : start + rows]

        return [
            Draws(
                of(start, self.keys),
                of(start, self.settings),
                self.kinds,
                None if self.changes is None else self.changes.each(partial(of, start)),
            )
            for start in range(0, self.keys.shape[0], rows)
        ]


def draw(
    hidden: Tensor,
    weight: Prepared,
    draws: Draws,
    ops: Ops,
    source: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return tokens [R] int64 and log-probabilities [R] float32: draw r is from row `source[r]`, by
    default row r, of hidden [T, C] under the output head's weight [V, C], whose logits are capped
    by `cap`."""
    rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
    fused = ops.fused_head and not _held(draws, cap)
    if draws.keys.shape[0] <= rows or fused:
        return _draw(hidden, weight, draws, ops, source, cap)
    hidden = hidden if source is None else hidden.index_select(0, source)
    pairs = zip(hidden.split(rows), draws.split(rows))
    blocks = [_draw(h, weight, d, ops, None, cap) for h, d in pairs]
    return torch.cat([block[0] for block in blocks]), torch.cat([block[1] for block in blocks])


def _held(draws: Draws, cap: float | None) -> bool:
    """Return whether logits are held in memory, because the head's fused operators cannot draw
    so."""
    kinds = draws.kinds
    return kinds.greedy or kinds.filtered or draws.changes is not None or cap is not None


def _draw(
    hidden: Tensor,
    weight: Prepared,
    draws: Draws,
    ops: Ops,
    source: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    kinds, temperature = draws.kinds, draws.temperature
    if not _held(draws, cap):
        return ops.head_sample(hidden, weight, draws.keys, temperature, source)
    logits = logits_of(ops, hidden, weight, cap)
    logits = logits if source is None else logits.index_select(0, source)
    if draws.changes is not None:
        logits = draws.changes.apply(logits)
    tokens = logits.argmax(-1)
    if kinds.plain or kinds.filtered:
        allowed = filtered_logits(logits, draws) if kinds.filtered else logits
        tokens = torch.where(draws.greedy, tokens, ops.sample(allowed, draws.keys, temperature))
        logits = allowed
    if not ops.fused_head or cap is not None:
        return tokens, ops.token_logprobs(logits, tokens, temperature)[0]
    # the head's own operators have other bits than logits that are held, the learner's: for all but
    # filtered rows
    rows = hidden if source is None else hidden.index_select(0, source)
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    changed = torch.zeros_like(draws.greedy) if draws.changes is None else draws.changes.rows
    if kinds.filtered or draws.changes is not None:
        logprobs = ops.token_logprobs(logits, tokens, temperature)[0]
    if kinds.greedy:
        logprobs = torch.where(
            draws.greedy & ~changed, ops.head_logprobs(rows, weight, tokens, 1.0)[0], logprobs
        )
    if kinds.plain:
        not_plain = draws.greedy | draws.filtered | changed
        (head_tokens, head_logprobs) = ops.head_sample(rows, weight, draws.keys, temperature)
        tokens, logprobs = (
            torch.where(not_plain, tokens, head_tokens),
            torch.where(not_plain, logprobs, head_logprobs),
        )
    return tokens, logprobs


def top_of_draws(
    hidden: Tensor,
    weight: Prepared,
    draws: Draws,
    ops: Ops,
    source: Tensor | None,
    cap: float | None,
    counts: Sequence[int],
) -> list[Top]:
    """Return, for draw r, the counts[r] likeliest tokens under the distribution that it was drawn
    from; the arguments are those of `draw`."""
    likeliest = list[Top]()
    for row, (single, count) in enumerate(zip(draws.split(1), counts)):
        if not count:
            likeliest.append([])
            continue
        row_hidden = hidden[row : row + 1] if source is None else hidden[source[row : row + 1]]
        logits = logits_of(ops, row_hidden, weight, cap)
        changed = bool(single.filtered & ~single.greedy) or cap is not None
        if single.changes is not None:
            logits = single.changes.apply(logits)
            changed |= bool(single.changes.rows)
        if bool(single.filtered & ~single.greedy):
            logits = filtered_logits(logits, single)
        likeliest.append(
            top_logprobs(
                row_hidden, weight, logits, single.temperature, count, ops, changed=changed
            )
        )
    return likeliest


def filtered_logits(logits: Tensor, draws: Draws) -> Tensor:
    """Return logits [R, V] with -inf where top-k, top-p or min-p leaves a token out; computed for
    as many rows at a time as the learner filters."""
    rows = max(1, filtering.LOGITS_AT_ONCE // logits.shape[1])
    filtered = torch.empty_like(logits)
    for out, block, of_block in zip(filtered.split(rows), logits.split(rows), draws.split(rows)):
        out.copy_(filtering.filter_logits(block, of_block.temperature, _limits(of_block)))
    return filtered


def _limits(draws: Draws) -> Limits:
    _, top_k, top_p, min_p = draws.settings.unbind(1)
    return Limits(top_k, top_p, min_p, draws.kinds.most_k, draws.kinds.nucleus)

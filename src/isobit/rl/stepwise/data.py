"""Sequences with what a loss needs of each: what they must be, and their packed rows.

Position i of a datum's `tokens` predicts entry i of its `target_tokens`, whatever token that is, or
K of them at once. Left out: the losses (`losses.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.kernels.sampling.filtering import Context
from isobit.rl.learner.packing import PackedBatch
from isobit.rl.stepwise.losses import Loss

TARGETS = "target_tokens"


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence: the model's input `tokens` [N], and by Tinker's names `target_tokens` [N] or
    [N, K] int64, and weights, advantages or logprobs, float32 of their shape."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Tensor]

    @property
    def targets(self) -> Tensor:
        """[N] or [N, K] int64."""
        return self.inputs[TARGETS]


def check(datum: Datum, place: int, loss: Loss, vocab_size: int, longest: int) -> None:
    """Raise IsobitError unless a loss can be computed of the datum number `place`."""
    where, count = f"datum {place}", len(datum.tokens)
    if not count:
        raise IsobitError(f"{where}: it has no tokens")
    if count > longest:
        raise IsobitError(
            f"{where}: it has {count:,} tokens, more than the model's context of {longest:,}"
        )
    if (wrong := next((t for t in datum.tokens if not 0 <= t < vocab_size), None)) is not None:
        raise IsobitError(f"{where}: token {wrong} is not in the vocabulary of {vocab_size:,}")
    for name in (TARGETS, *loss.inputs):
        if name not in datum.inputs:
            raise IsobitError(f"{where}: {name} is missing, which this loss reads")
    targets = datum.targets
    if targets.ndim not in (1, 2) or targets.shape[0] != count or not targets.numel():
        raise IsobitError(
            f"{where}: {TARGETS} has shape {list(targets.shape)}; expected [{count}] or "
            f"[{count}, K], a token or K of them for each of its tokens"
        )
    if bool(((targets < 0) | (targets >= vocab_size)).any()):
        raise IsobitError(
            f"{where}: {TARGETS} has a token that is not in the vocabulary of {vocab_size:,}"
        )
    for name in loss.inputs:
        given = datum.inputs[name]
        if given.shape != targets.shape:
            raise IsobitError(
                f"{where}: {name} has shape {list(given.shape)}, and {TARGETS} {list(targets.shape)}"
            )
        if not bool(given.isfinite().all()):
            raise IsobitError(f"{where}: {name} has NaN or infinity in it")


def micro_batches(data: Sequence[Datum], budget: int) -> Iterator[range]:
    """Consecutive ranges of data of at most `budget` targets each; a larger one stands alone."""
    start = total = 0
    for place, datum in enumerate(data):
        size = datum.targets.numel()
        if place > start and total + size > budget:
            yield range(start, place)
            start, total = place, 0
        total += size
    if start < len(data):
        yield range(start, len(data))


def pack(data: Sequence[Datum]) -> PackedBatch:
    """The data as packed rows; targets in their order, and of several at one position the first
    before the others."""
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    tokens = torch.tensor([token for datum in data for token in datum.tokens], dtype=torch.int64)
    width = torch.tensor([datum.targets.numel() // len(datum.tokens) for datum in data])
    rows = torch.arange(len(tokens)).repeat_interleave(width.repeat_interleave(lengths))
    sequence = torch.arange(len(data)).repeat_interleave(width * lengths)
    starts = (lengths.cumsum(0) - lengths)[sequence]
    return PackedBatch(
        tokens=tokens,
        layout=Layout.packed(lengths.tolist()),
        rows=rows,
        targets=torch.cat([datum.targets.reshape(-1) for datum in data]),
        sequence=sequence,
        whole=torch.arange(len(tokens)),
        context=Context(tokens, starts, rows),
    )

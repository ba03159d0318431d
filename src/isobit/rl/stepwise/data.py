"""Sequences with what a loss needs of each: what they must be, their micro-batches, and the packed
rows of one.

Position i of a datum's `tokens` predicts entry i of its `target_tokens`, whatever token that is, or
K of them. Left out: the losses (`losses.py`), and how such data travel.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import IsobitError, brief, listed
from isobit.kernels import Layout
from isobit.kernels.sampling.filtering import Context
from isobit.rl.learner.packing import PackedBatch
from isobit.rl.stepwise.losses import LOSSES, Loss

TARGETS = "target_tokens"
_NAMES = {TARGETS, *(n for loss in LOSSES.values() for n in (*loss.inputs, *loss.of_tokens))}


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence: the model's input `tokens` [N], and by Tinker's names `target_tokens` [N] or
    [N, K] int64, and weights, advantages, logprobs and what else a loss reads, float32 of their
    shape. What the loss at hand does not read is passed over."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Tensor]

    @property
    def targets(self) -> Tensor:
        """[N] or [N, K] int64."""
        return self.inputs[TARGETS]

    def of_rows(self, name: str, default: float = 0.0) -> Tensor:
        """An input of each target in turn, float32; the default where it is not given."""
        given = self.inputs.get(name)
        count = self.targets.numel()
        return torch.full((count,), default) if given is None else given.float().reshape(-1)


def check(datum: Datum, place: int, loss: Loss, vocab_size: int, longest: int) -> None:
    """Raise IsobitError unless a loss can be computed of the datum number `place`."""
    where, count = f"datum {place}", len(datum.tokens)
    if not count:
        raise IsobitError(f"{where}: it has no tokens")
    if count > longest:
        raise IsobitError(
            f"{where}: it has {count:,} tokens, more than the model's context of {longest:,}"
        )
    for token in datum.tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise IsobitError(
                f"{where}: token {brief(repr(token))} is not in the vocabulary of {vocab_size:,}"
            )
    if unknown := datum.inputs.keys() - _NAMES:
        raise IsobitError(
            f"{where}: {brief(repr(min(unknown)))} is no input of a loss; there are "
            f"{listed(sorted(_NAMES))}"
        )
    for name in (TARGETS, *loss.inputs):
        if name not in datum.inputs:
            raise IsobitError(f"{where}: {name} is missing, which the loss reads")
    _check_targets(datum.targets, where, count, loss.several, vocab_size)
    for name in (*loss.inputs, *loss.of_tokens):
        if name in datum.inputs:
            _check_numbers(datum.inputs[name], f"{where}: {name}", datum.targets)


def _check_targets(targets: Tensor, where: str, count: int, several: bool, vocab_size: int) -> None:
    if targets.dtype != torch.int64:
        raise IsobitError(f"{where}: {TARGETS} has dtype {targets.dtype}; expected int64")
    wide = targets.ndim == 2 and several
    if not (targets.ndim == 1 or wide) or targets.shape[0] != count or not targets.numel():
        expected = f"[{count}] or [{count}, K]" if several else f"[{count}]"
        raise IsobitError(
            f"{where}: {TARGETS} has shape {list(targets.shape)}; expected {expected}, as it has "
            f"{count:,} tokens"
        )
    wrong = targets[(targets < 0) | (targets >= vocab_size)]
    if len(wrong):
        raise IsobitError(
            f"{where}: {TARGETS}: token {int(wrong[0])} is not in the vocabulary of {vocab_size:,}"
        )


def _check_numbers(given: Tensor, what: str, targets: Tensor) -> None:
    if not given.is_floating_point():
        raise IsobitError(f"{what} has dtype {given.dtype}; expected float32")
    if given.shape != targets.shape:
        raise IsobitError(
            f"{what} has shape {list(given.shape)}, and {TARGETS} {list(targets.shape)}"
        )
    if not bool(given.float().isfinite().all()):
        raise IsobitError(f"{what} has NaN or infinity in it")


def micro_batches(data: Sequence[Datum], budget: int) -> Iterator[range]:
    """Consecutive ranges of data of at most `budget` targets; a datum with more stands alone."""
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
    """The data as packed rows, with their targets in turn."""
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    widths = torch.tensor([datum.targets.numel() // len(datum.tokens) for datum in data])
    tokens = torch.tensor([token for datum in data for token in datum.tokens], dtype=torch.int64)
    rows = torch.arange(len(tokens)).repeat_interleave(widths.repeat_interleave(lengths))
    sequence = torch.arange(len(data)).repeat_interleave(widths * lengths)
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

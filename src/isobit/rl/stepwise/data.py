"""Sequences with what a loss needs of each: what they must be, their micro-batches, and the packed
rows of one.

Position i of a datum's `tokens` predicts entry i of its `target_tokens`, whatever token that is, or
K of them. Data of a micro-batch that begin with the same tokens, as answers to one prompt do, share
the rows of these: log-probabilities have the same bits, and sums of the gradient are rounded
elsewhere (tests/rl/test_stepwise_sharing.py). Left out: the losses (`losses.py`), and how such data
travel.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.errors import IsobitError, brief, listed
from isobit.kernels.sampling.filtering import Context
from isobit.model.images.bank import Bank, turns_of
from isobit.rl.learner.packing import PackedBatch, shared_rows
from isobit.rl.stepwise.losses import LOSSES, SummedLoss

TARGETS = "target_tokens"
_LEAST_SHARED = 0.1
"""Of a micro-batch's rows: where fewer would be shared, there is little to gain."""
_NAMES = {TARGETS, *(n for loss in LOSSES.values() for n in (*loss.needs, *loss.of_tokens))}


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence: the model's input `tokens` [N], and by Tinker's names `target_tokens` [N] or [N,
    K] int64, and weights, advantages, logprobs and other inputs of a loss, float32 of their shape.
    Inputs that the loss at hand does not read are passed over."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Tensor]

    @property
    def targets(self) -> Tensor:
        """The target tokens, [N] or [N, K] int64."""
        return self.inputs[TARGETS]

    def of_rows(self, name: str, default: float = 0.0) -> Tensor:
        """Return an input of each target in turn, float32; the default where it is not given."""
        values = self.inputs.get(name)
        count = self.targets.numel()
        return torch.full((count,), default) if values is None else values.float().reshape(-1)


def check(
    datum: Datum,
    place: int,
    loss: SummedLoss,
    vocab_size: int,
    longest: int,
    images: Bank | None = None,
) -> None:
    """Raise IsobitError unless a loss can be computed of the datum number `place`, whose tokens may
    name `images`."""
    num_ids = vocab_size if images is None else images.num_ids
    where, count = f"datum {place}", len(datum.tokens)
    if not count:
        raise IsobitError(f"{where}: it has no tokens")
    if count > longest:
        raise IsobitError(
            f"{where}: it has {count:,} tokens, more than the model's context of {longest:,}"
        )
    for token in datum.tokens:
        if type(token) is not int or not 0 <= token < num_ids:
            raise IsobitError(
                f"{where}: token {brief(repr(token))} is not in the vocabulary of {vocab_size:,}"
            )
    if unknown := datum.inputs.keys() - _NAMES:
        raise IsobitError(
            f"{where}: {brief(repr(min(unknown)))} is no input of a loss; there are "
            f"{listed(sorted(_NAMES))}"
        )
    for name in (TARGETS, *loss.needs):
        if name not in datum.inputs:
            raise IsobitError(f"{where}: {name} is missing, which the loss reads")
    _check_targets(datum.targets, where, count, loss.several, vocab_size)
    for name in (*loss.needs, *loss.of_tokens):
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


def _check_numbers(values: Tensor, what: str, targets: Tensor) -> None:
    if not values.is_floating_point():
        raise IsobitError(f"{what} has dtype {values.dtype}; expected float32")
    if values.shape != targets.shape:
        raise IsobitError(
            f"{what} has shape {list(values.shape)}, and {TARGETS} {list(targets.shape)}"
        )
    if not bool(values.float().isfinite().all()):
        raise IsobitError(f"{what} has NaN or infinity in it")


def micro_batches(data: Sequence[Datum], budget: int) -> Iterator[range]:
    """Yield consecutive ranges of data of at most `budget` targets; a datum with more stands
    alone."""
    start = total = 0
    for index, datum in enumerate(data):
        size = datum.targets.numel()
        if index > start and total + size > budget:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(data):
        yield range(start, len(data))


def pack(data: Sequence[Datum], share: bool = True, images: Bank | None = None) -> PackedBatch:
    """Return the data as packed rows, with their targets in turn; with `share` those that begin
    alike have these rows once. `images`: those that tokens may name."""
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    widths = torch.tensor([datum.targets.numel() // len(datum.tokens) for datum in data])
    tokens = torch.tensor([token for datum in data for token in datum.tokens], dtype=torch.int64)
    positions = torch.arange(len(tokens)).repeat_interleave(widths.repeat_interleave(lengths))
    sequence = torch.arange(len(data)).repeat_interleave(widths * lengths)
    starts = (lengths.cumsum(0) - lengths)[sequence]
    first, shared = begun_alike([datum.tokens for datum in data])
    row, whole, layout = shared_rows(lengths.numpy(), first, shared * share)
    turns = turns_of(images, [datum.tokens for datum in data])
    layout = replace(layout, turns=None if turns is None else turns[whole])
    return PackedBatch(
        tokens=tokens[whole],
        layout=layout,
        rows=torch.from_numpy(row)[positions],
        targets=torch.cat([datum.targets.reshape(-1) for datum in data]),
        sequence=sequence,
        whole=torch.from_numpy(whole),
        context=Context(tokens, starts, positions),
    )


def begun_alike(
    sequences: Sequence[tuple[int, ...]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each sequence an earlier one that shares its longest beginning, and how many
    tokens these are; itself, and 0, where there is none, or they are too few to be worth it."""
    first, shared = np.arange(len(sequences)), np.zeros(len(sequences), np.int64)
    sorted_before = list[
        tuple[tuple[int, ...], int]
    ]()  # of which neighbours have the most in common
    for number, tokens in enumerate(sequences):
        rank = bisect_left(sorted_before, (tokens, number))
        for neighbour, earlier in sorted_before[max(rank - 1, 0) : rank + 1]:
            if (count := _in_common(tokens, neighbour)) > shared[number]:
                first[number], shared[number] = earlier, count
        sorted_before.insert(rank, (tokens, number))
    if shared.sum() < _LEAST_SHARED * sum(map(len, sequences)):
        return np.arange(len(sequences)), np.zeros_like(shared)
    return first, shared


def _in_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Count the tokens at the beginning of both."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])

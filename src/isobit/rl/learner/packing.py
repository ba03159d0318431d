"""Samples to packed rows, without padding: what the learner's forward takes.

A sequence is prompt and completion without its last token, since nothing is predicted from that.
Row i of `targets` is predicted from row `rows[i]`; given tokens are context and no targets.
Deterministic, in the order of the samples.

Completions of one prompt may share its rows: these are computed once, for the first of them, and
the others' own rows follow them (Liu et al. 2025, arXiv 2506.05433; verl's `use_prefix_grouper`). A
row's bits depend on what is before it and on nothing else, so log-probabilities are the same bits;
of the gradient, the sums over the copies of a row are rounded elsewhere
(tests/rl/test_shared_prompts.py). Left out: completions that begin alike, and which samples are
packed together (`schedule.py`).

A sample that forks is a sequence for each of its contexts, and one sample to the loss.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.kernels import Copies, Keys, Layout
from isobit.kernels.sampling.filtering import Context
from isobit.model.images.bank import Bank, turns_of
from isobit.rl.algorithm.samples import Sample, given_behind

MOST_KEYS = 4
"""Tokens of whole sequences in a micro-batch over its rows, at most: a backward has gradients for
each as a key."""


@dataclass(frozen=True)
class _Context:
    """A context of a sample: what begins it, and what follows."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Observed:
    """The tokens that environments wrote, K of them: of each the row that predicts it, its id and
    its sample's number, [K] int64."""

    rows: Tensor
    targets: Tensor
    sequence: Tensor


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """tokens [T] int64 with their layout; for each of C trained tokens its row, its id and its
    sample's number, `sequence` [C] int64.

    `whole` [T] int64 are the places of the rows among those of all sequences, W; where none is
    shared, all in turn. `context`: the tokens before each target. `observed`: what environments
    said, where that is learned and there is any.
    """

    tokens: Tensor
    layout: Layout
    rows: Tensor
    targets: Tensor
    sequence: Tensor
    whole: Tensor
    context: Context
    observed: Observed | None = None

    @property
    def num_targets(self) -> int:
        return self.targets.shape[0]

    @property
    def rows_shared(self) -> int:
        """Rows of sequences that are those of an earlier one."""
        return self.context.tokens.shape[0] - self.tokens.shape[0]


def pack(
    samples: Sequence[Sample],
    share_prompts: bool = False,
    observes: bool = False,
    images: Bank | None = None,
) -> PackedBatch:
    """Pack samples with a prompt of at least one token; empty completions contribute no rows to
    predict. Where it `observes`, with the rows of what environments said, but `images`."""
    owners, contexts = list[int](), list[_Context]()
    for number, sample in enumerate(samples):
        forks = list(_contexts(sample))
        owners += [number] * len(forks)
        contexts += forks
    prompts = np.array([len(context.prompt_ids) for context in contexts], np.int64)
    completions = np.array([len(context.completion_ids) for context in contexts], np.int64)
    assert bool((prompts > 0).all()), "every sample needs a prompt token to predict from"
    lengths = prompts + completions - (completions > 0)
    tokens = np.array(
        [t for context in contexts for t in (*context.prompt_ids, *context.completion_ids[:-1])],
        np.int64,
    )
    targets = np.array([t for context in contexts for t in context.completion_ids], np.int64)
    starts = np.cumsum(lengths) - lengths
    sequence = np.repeat(np.arange(len(contexts)), completions)
    offset = np.arange(len(targets)) - (np.cumsum(completions) - completions)[sequence]
    positions = (starts + prompts - 1)[sequence] + offset
    trained = np.array([trained for context in contexts for trained in context.mask], bool)
    first = _first_of_prompt(contexts) if share_prompts else np.arange(len(contexts))
    shared = np.where(first == np.arange(len(contexts)), 0, prompts)
    row, whole, layout = shared_rows(lengths, first, shared)
    turns = turns_of(images, np.split(tokens, np.cumsum(lengths)[:-1]))
    layout = replace(layout, turns=None if turns is None else turns[torch.from_numpy(whole)])
    of_sample = np.array(owners, np.int64)[sequence]

    def chosen(which: NDArray[np.bool_]) -> list[Tensor]:
        forks = row[positions[which]], targets[which], of_sample[which]
        return list(map(torch.from_numpy, forks))

    rows, ids, numbers = chosen(trained)
    written = _said(contexts) if observes else np.zeros(0, bool)
    if images is not None and observes:
        written &= targets < images.vocabulary
    return PackedBatch(
        tokens=torch.from_numpy(tokens[whole]),
        layout=layout,
        rows=rows,
        targets=ids,
        sequence=numbers,
        whole=torch.from_numpy(whole),
        context=Context(
            *map(torch.from_numpy, (tokens, starts[sequence[trained]], positions[trained]))
        ),
        observed=Observed(*chosen(written)) if written.any() else None,
    )


def _said(parts: Sequence[_Context]) -> NDArray[np.bool_]:
    """Return a mask of the tokens that environments wrote, among those behind the beginnings of all
    contexts."""
    masks = [np.zeros(len(context.mask), bool) for context in parts]
    for written, context in zip(masks, parts):
        written[given_behind(context.mask)] = True
    return np.concatenate(masks)


def _contexts(sample: Sample) -> Iterator[_Context]:
    """Yield the contexts of a sample. A later one is begun by its first token, which is given."""
    ids, mask = (
        sample.completion_ids,
        sample.completion_mask or (True,) * len(sample.completion_ids),
    )
    edges = [*sample.forks, len(ids)]
    yield _Context(sample.prompt_ids, ids[: edges[0]], mask[: edges[0]])
    for begin, end in pairwise(edges):
        assert not mask[begin], "a context begins with a given token"
        yield _Context(ids[begin : begin + 1], ids[begin + 1 : end], mask[begin + 1 : end])


_Ints = NDArray[np.int64]


def shared_rows(lengths: _Ints, first: _Ints, shared: _Ints) -> tuple[_Ints, _Ints, Layout]:
    """Return (the row that computes each place of the whole sequences [W], the place of each row
    [T], the layout of the rows) of sequences of these `lengths`, of which number s has its first
    shared[s] rows from an earlier one, first[s], which begins alike. [S] int64 each."""
    starts = np.cumsum(lengths) - lengths
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    fresh = np.arange(len(sequence)) - starts[sequence] >= shared[sequence]
    row = np.cumsum(fresh) - 1
    for s in np.flatnonzero(shared):  # in their order: an earlier one may have rows of others too
        start, source, count = starts[s], starts[first[s]], shared[s]
        row[start : start + count] = row[source : source + count]
    return row, np.flatnonzero(fresh), _layout(row, starts, lengths, shared)


def _first_of_prompt(samples: Sequence[_Context]) -> _Ints:
    """Return for each context the first that has its prompt."""
    seen: dict[tuple[int, ...], int] = {}
    return np.array(
        [seen.setdefault(sample.prompt_ids, index) for index, sample in enumerate(samples)],
        np.int64,
    )


def _layout(row: _Ints, starts: _Ints, lengths: _Ints, contexts: _Ints) -> Layout:
    """Return the layout of the rows that are computed: each sequence's follow the shared ones. A
    page is a row's slot then."""
    if not contexts.any():
        return Layout.packed(lengths.tolist())
    live = [s for s in range(len(lengths)) if lengths[s] > contexts[s]]
    keys = [row[starts[s] : starts[s] + lengths[s]] for s in live]
    table = np.zeros((len(live), max(map(len, keys))), np.int32)
    for sequence, slots in enumerate(keys):
        table[sequence, : len(slots)] = slots
    layout = Layout.build(
        (lengths - contexts)[live].tolist(), contexts[live].tolist(), torch.from_numpy(table), 1
    )
    start = torch.from_numpy(np.cumsum([0, *map(len, keys)]))
    copies = Copies.of(torch.from_numpy(np.concatenate(keys)), layout.num_rows)
    return replace(layout, keys=Keys(start, copies))

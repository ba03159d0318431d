"""The rows that a frozen tower made of images, which token ids above the vocabulary name.

The id of row r is vocabulary + r, and an image's rows follow each other; no id is given out twice.
So tokens say which images are among them: pages are remembered by them, prompts are compared and
packed by them, and what handles tokens need not know of images. Which ids an image has depends on
the order in which images came, and no bit of a result does. Left out: what makes the rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.model.families.rope import Tables
from isobit.model.images.given_rows import GivenRows

Grid = tuple[int, int]
_MOST_IDS = 2**31 - 1  # what pages remember is int32


@dataclass(frozen=True, eq=False)
class Image:
    """An image, for which the ids [first, first + count) stand. `rows`: its embeddings [count, H],
    and what is added to it behind the first layers; `grid`: its height and width in rows, where
    positions have three axes."""

    first: int
    rows: tuple[Tensor, ...]
    grid: Grid | None = None

    @property
    def count(self) -> int:
        return len(self.rows[0])

    @property
    def ids(self) -> range:
        return range(self.first, self.first + self.count)


class Axes(NamedTuple):
    """The axes of positions, time, height and width, in the columns of a rotary table: `sections`
    of columns one after the other; or every third, as many of height and width as they say, where
    they are `interleaved`."""

    sections: tuple[int, ...]
    interleaved: bool

    def of_columns(self, count: int) -> Tensor:
        """Return the axis of each column, [count] int64."""
        column = torch.arange(count)
        if not self.interleaved:
            ends = torch.tensor(self.sections).cumsum(0)
            return torch.bucketize(column, ends, right=True) * (column < ends[-1])
        axis = column % 3
        return torch.where(column < 3 * torch.tensor([count, *self.sections[1:]])[axis], axis, 0)


class Bank:
    """The images of a model of a `vocabulary`. `stand_in`: the token that layers with inputs of
    their own take in an image's place."""

    def __init__(self, vocabulary: int, stand_in: int, axes: Axes | None = None) -> None:
        self.vocabulary, self.stand_in, self.axes = vocabulary, stand_in, axes
        self.num_ids = vocabulary
        self._images: list[Image] = []
        self._first = np.zeros(0, np.int64)

    def add(self, rows: Sequence[Tensor], grid: Grid | None = None) -> Image:
        """Register an image. Raises IsobitError where its ids would be too large."""
        assert (grid is None) == (self.axes is None), "the axes of positions follow an image's grid"
        assert grid is None or grid[0] * grid[1] == len(rows[0])
        image = Image(self.num_ids, tuple(row.detach() for row in rows), grid)
        if image.ids.stop > _MOST_IDS:
            raise IsobitError(
                f"images: their rows, {image.ids.stop - self.vocabulary:,}, are more than the token "
                "ids of one process; start another one"
            )
        self.num_ids = image.ids.stop
        self._images.append(image)
        self._first = np.append(self._first, image.first)
        return image

    def check(self, where: str, tokens: Sequence[int]) -> None:
        """Raise IsobitError unless every image among the tokens is whole."""
        ids = np.array(tokens, np.int64)
        stop = 0
        for begin in np.flatnonzero(ids >= self.vocabulary).tolist():
            if begin < stop:
                continue
            image = self._of(ids[begin])
            stop = begin + image.count
            if ids[begin:stop].tolist() != list(image.ids):
                raise IsobitError(
                    f"{where}: the image at token {begin} is not whole: expected its "
                    f"{image.count} ids, {image.first} to {image.ids.stop - 1}, in turn"
                )

    def are_in(self, tokens: Iterable[int]) -> bool:
        """Return whether an image is among the tokens."""
        return any(token >= self.vocabulary for token in tokens)

    def turns(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of rotary tables that turn the tokens of a whole sequence, [L, 3]; [L]
        where no image with axes is among them. What follows an image goes on behind its longer
        side."""
        turns = np.arange(tokens.size)
        begins = np.flatnonzero(np.isin(tokens, self._first))
        if self.axes is None or not begins.size:
            return turns
        turns = np.repeat(turns[:, None], 3, 1)
        for begin in begins.tolist():
            image = self._of(tokens[begin])
            assert image.grid is not None
            stop, first = begin + image.count, int(turns[begin, 0])
            axes = np.indices((1, *image.grid)).reshape(3, -1).T
            turns[begin:stop] = first + axes[: tokens.size - begin]
            turns[stop:] -= image.count - max(image.grid)
        return turns

    def text(self, tokens: Tensor) -> Tensor:
        """Return the tokens with the one that stands for images in their places."""
        return torch.where(tokens >= self.vocabulary, self.stand_in, tokens)

    def given(self, tokens: Tensor) -> GivenRows | None:
        """Return the rows that tokens [T] name, on their device; None if they name none."""
        at = torch.nonzero(tokens >= self.vocabulary).flatten()
        if not at.numel():
            return None
        ids = tokens[at].cpu().numpy()
        numbers = np.searchsorted(self._first, ids, side="right") - 1
        used, which = np.unique(numbers, return_inverse=True)
        images = [self._images[number] for number in used.tolist()]
        starts = np.cumsum([0, *(image.count for image in images)])[which]
        index = torch.from_numpy(starts + ids - self._first[numbers])
        embeddings, *added = (
            torch.cat(rows)[index].to(tokens.device) for rows in zip(*(i.rows for i in images))
        )
        return GivenRows(at, embeddings, tuple(added))

    def turned(self, tables: Tables, layout: Layout) -> tuple[Tables, Layout]:
        """Return the rotary tables and the layout of a forward; where its rows turn by axes, tables
        with a row for each, whose columns are those of the rows of their axes."""
        if layout.turns is None or layout.turns.ndim == 1:
            return tables, layout
        assert self.axes is not None
        turns, turned = layout.turns, Tables()
        for kind, table in tables.items():
            columns = torch.arange(table.cos.shape[1], device=turns.device)
            at = turns[:, self.axes.of_columns(columns.numel()).to(turns.device)]
            turned[kind] = table._replace(cos=table.cos[at, columns], sin=table.sin[at, columns])
        return turned, replace(layout, turns=torch.arange(len(turns), device=turns.device))

    def _of(self, token: int) -> Image:
        return self._images[int(np.searchsorted(self._first, token, side="right")) - 1]


def joined(chunks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the turns of several chunks in turn: [T], or [T, 3] where some have axes."""
    if any(turns.ndim == 2 for turns in chunks):
        chunks = [turns if turns.ndim == 2 else np.repeat(turns[:, None], 3, 1) for turns in chunks]
    return np.concatenate(chunks)


def turns_of(
    images: Bank | None, sequences: Sequence[Sequence[int] | NDArray[np.int64]]
) -> Tensor | None:
    """Return the turns of whole sequences in turn, [T, 3]; None where no image with axes is among
    them, and a token's position turns it."""
    if images is None or images.axes is None:
        return None
    turns = joined([images.turns(np.array(tokens, np.int64)) for tokens in sequences])
    return torch.from_numpy(turns) if turns.ndim == 2 else None

"""The pages of the KV cache: which sequences hold which page, by reference counts, and which tokens
are in it.

A page is `page_size` consecutive slots of every layer's keys and values. A sequence holds a
reference to each page of its table. A page is free exactly when no sequence holds it. A full page
may be remembered by its tokens and by all that come before them; then it stays unchanged while it is
free, until no other page is, and any sequence with the same tokens so far may share it. A page that
is partly full may be remembered too; a sequence with the same tokens so far takes it while it is
free, and goes on in it, so the next turn of a conversation computes nothing of the last one again.
Of the free pages those that are remembered go last, the least recently used first.

A page is remembered under its own tokens and the entry of the page before it, or a root that says
what else its contents depend on. Entries are compared and not hashed to numbers, so two prompts are
never confused.

Left out: what is in the pages (`kernels.KVStore`), and which sequence is given one
(`scheduler.py`).
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from isobit.model import ModelConfig

CACHE_BYTES = 2 << 30
DEFAULT_PAGES = 512
GPU_FRACTION = 3  # of free memory: a third for rollouts, one of the rest for an evaluation
_PAGE, _PAGE_WITH_STATES = 16, 256


def tokens_of_a_page(config: ModelConfig, page_size: int | None) -> int:
    """Return the tokens of a page: `page_size` if set; by default few, so that little of the last
    page is empty, or more where each page has states of linear attention, which may take as much
    memory as hundreds of tokens."""
    if page_size is not None:
        return page_size
    return _PAGE if config.linear is None else _PAGE_WITH_STATES


def cache_pages(
    pages_of_sequence: int, sequences: int, most_sequences: int, most_bytes: int, page_bytes: int
) -> int:
    """Return the pages of a cache for `sequences` of `pages_of_sequence` pages, of which
    `most_sequences` run at a time, and for a prompt in addition to the sequences that share its
    pages: at most `most_bytes`, but room for one sequence."""
    most_pages = most_bytes // max(page_bytes, 1)  # a model without attention stores nothing
    return max(
        pages_of_sequence, min((min(sequences, most_sequences) + 1) * pages_of_sequence, most_pages)
    )


def most_cache_bytes(device: torch.device, reserved: int) -> int:
    """Return the bytes of keys and values that an engine takes by default."""
    if device.type != "cuda":
        return CACHE_BYTES
    return max(torch.cuda.mem_get_info(device)[0] - reserved, 0) // GPU_FRACTION


class PagePool:
    """An allocator of `num_pages` pages of `page_size` tokens. Pages are handed out in a fixed
    order, so a run repeats itself. `parts`: whether pages that are not full are remembered, which
    states of linear attention do not allow."""

    def __init__(self, num_pages: int, page_size: int, *, parts: bool = True) -> None:
        self.num_pages, self.page_size, self._keeps_parts = num_pages, page_size, parts
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: dict[int, None] = {}  # free, and remembered; the least recently used first
        self._page_of: dict[tuple[Hashable, bytes], int] = {}
        self._entry_of: dict[
            int, tuple[tuple[Hashable, bytes], int]
        ] = {}  # page to its key, and the entry's number
        self._numbers = itertools.count()
        self.peak_used = 0
        self.changes = 0
        """Grows when pages are given back or remembered: nothing else makes more of them free, or
        found."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference. The caller has made sure that there are
        enough."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.pop() if self._free else self._forgotten() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are in use or remembered."""
        for page in pages:
            assert self.references[page] > 0 or page in self._idle, (
                f"page {page} is free and cannot be shared"
            )
            self._idle.pop(page, None)
            self.references[page] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def find(self, root: Hashable, tokens: NDArray[np.int64]) -> list[int]:
        """Return the pages that are remembered for these tokens, from the first on."""
        pages, parent = list[int](), root
        for block in _parts(tokens, self.page_size):
            page = self._page_of.get((parent, block))
            if page is None:
                break
            pages.append(page)
            parent = self._entry_of[page][1]
        return pages

    def find_part(
        self, root: Hashable, tokens: NDArray[np.int64], pages: list[int]
    ) -> tuple[int, int] | None:
        """Return (page, the number of tokens in it) for the free page that holds the most of these
        tokens behind those of `pages`, and no other token; or None."""
        parent, start = self._entry_of[pages[-1]][1] if pages else root, len(pages) * self.page_size
        rest = tokens[start : start + self.page_size - 1].astype(np.int32).tobytes()
        for size in range(len(rest), 0, -4):
            page = self._page_of.get((parent, rest[:size]))
            if page in self._idle:
                return page, size // 4
        return None

    def take_part(self, page: int) -> None:
        """Hold a page that `find_part` has returned, and forget its tokens, since it will be
        written to."""
        self._forget(page)
        self.references[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)

    def remember(self, root: Hashable, tokens: NDArray[np.int64], pages: list[int]) -> None:
        """Register computed pages in the prefix cache under their tokens. An existing entry for the
        same tokens stays."""
        parent = root
        self.changes += 1
        for block, page in zip(_parts(tokens, self.page_size, self._keeps_parts), pages):
            key = (parent, block)
            if key not in self._page_of:
                if page in self._entry_of:  # after a page that was forgotten
                    del self._page_of[self._entry_of[page][0]]
                self._page_of[key], self._entry_of[page] = page, (key, next(self._numbers))
            parent = self._entry_of[self._page_of[key]][1]

    def forget(self) -> None:
        """Forget which tokens the pages hold: their contents are not valid any more."""
        self._free += reversed(self._idle)
        self._idle, self._page_of, self._entry_of = {}, {}, {}

    def num_idle(self, pages: Iterable[int]) -> int:
        """Count the free ones among these remembered pages."""
        return sum(page in self._idle for page in pages)

    def _forgotten(self) -> int:
        page = next(iter(self._idle))
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        del self._idle[page], self._page_of[self._entry_of.pop(page)[0]]

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page, the last first; pages that are then without a reference
        become free."""
        self.changes += 1
        for page in reversed(list(pages)):
            assert self.references[page] > 0, (
                f"page {page} is released more often than it was taken"
            )
            self.references[page] -= 1
            if self.references[page] == 0 and page in self._entry_of:
                self._idle[page] = None
            elif self.references[page] == 0:
                self._free.append(page)

    def integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Prove that the counts are right: `tables` are all the references that exist, one table
        per holder.

        Raises AssertionError if a page is leaked, held without a count, both free and used, or
        twice in one table.
        """
        held: Counter[int] = Counter()
        for table in tables:
            pages = list(table)
            assert len(set(pages)) == len(pages), f"a page table holds a page twice: {pages}"
            held.update(pages)
        for page, references in enumerate(self.references):
            assert references == held[page], (
                f"page {page} has {references} references, but {held[page]} holders"
            )
        free = {*self._free, *self._idle}
        assert len(free) == self.num_free, "a page is twice in the free list"
        used = {page for page, references in enumerate(self.references) if references > 0}
        assert not free & used, f"pages are both free and used: {sorted(free & used)}"
        assert len(free) + len(used) == self.num_pages, "pages are neither free nor used"
        remembered = {page: key for key, page in self._page_of.items()}
        assert {page: key for page, (key, _) in self._entry_of.items()} == remembered, (
            "a page is remembered wrongly"
        )
        assert all((page in self._idle) == (page in remembered) for page in free), (
            "a free page is in the wrong list"
        )


def _parts(tokens: NDArray[np.int64], page_size: int, rest: bool = False) -> Iterable[bytes]:
    """Return the tokens of each full page, and with `rest` those of the last, as bytes."""
    count = tokens.size if rest else tokens.size // page_size * page_size
    data, step = tokens[:count].astype(np.int32).tobytes(), 4 * page_size
    return (data[i : i + step] for i in range(0, len(data), step))


def pages_needed(length: int, new_tokens: int, page_size: int) -> int:
    """Return the number of pages of one sequence; the last token sampled does not need a key and a
    value."""
    return -(-(length + new_tokens - 1) // page_size)

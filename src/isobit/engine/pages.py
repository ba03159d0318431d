"""The pages of the KV cache: who holds which page, by reference counts.

A page is `page_size` consecutive slots of every layer's keys and values. A sequence holds a reference to each page of
its table; a group holds one to each page that its members share. A page is free exactly when nobody holds it.

Left out: what is in the pages (`kernels.KVStore`), and which sequence deserves one (`scheduler.py`).
"""

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Allocator of `num_pages` pages. Pages are handed out in a fixed order, so a run repeats itself."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference. The caller has made sure that there are enough."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are in use."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} is free and cannot be shared"
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page; those that nobody holds any more become free."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} is released more often than it was taken"
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)

    def integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Prove that the counts are right: `tables` are all the references that exist, one table per holder.

        Raises AssertionError if a page is leaked, held without a count, both free and used, or twice in one table.
        """
        held: Counter[int] = Counter()
        for table in tables:
            pages = list(table)
            assert len(set(pages)) == len(pages), f"a page table holds a page twice: {pages}"
            held.update(pages)
        for page, count in enumerate(self.references):
            assert count == held[page], f"page {page} has {count} references, but {held[page]} holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        used = {page for page, count in enumerate(self.references) if count > 0}
        assert not free & used, f"pages are both free and used: {sorted(free & used)}"
        assert len(free) + len(used) == self.num_pages, "pages are neither free nor used"


def pages_needed(length: int, new_tokens: int, page_size: int) -> int:
    """Pages of one sequence; the last token sampled needs no key and value."""
    return -(-(length + new_tokens - 1) // page_size)

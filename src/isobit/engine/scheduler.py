"""Which tokens are computed in which step: continuous batching over a fixed number of pages.

Every step has one row for each decoding sequence and, in what the token budget leaves, chunks of the oldest prompts.
A group's prompt is computed once: when it is, the first tokens of all its samples are drawn, and each sample that finds
room becomes a sequence that shares the full pages of the prompt and gets a copy of the last, partly filled one. When
pages run out, the youngest sequence gives its pages back; it is computed again later (prompt and generated tokens), and
goes on where it was. A sequence is a number: group * n + sample index. A smaller number is older.

Tokens and log-probabilities do not depend on any of these decisions: tests/engine/test_invariance.py compares the bits.

Left out: the arithmetic, sampling and stopping (`engine.py`), and priorities other than first come, first served.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from isobit.engine.pages import PagePool, pages_needed
from isobit.engine.rows import DecodeRows

HEADROOM_STEPS = 8
"""A sequence is admitted if the running ones can then go on for about this many steps without a preemption."""


@dataclass
class Stats:
    """What a `generate` call did. Tokens count what was computed: a preempted sequence's are counted again."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    shared_pages: int = 0
    copied_pages: int = 0
    peak_pages: int = 0


@dataclass(eq=False)
class Group:
    """A prompt and its samples, which need at most `most_pages` each. `prefix`: the prompt's full pages, kept for
    members that have yet to start."""

    index: int
    prompt_length: int
    most_pages: int
    unfinished: int
    prefix: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Running:
    """A sequence that holds pages: it is being prefilled (`computed` tokens so far) or decodes."""

    index: int
    group: Group
    pages: list[int]
    computed: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens [start, stop) of a sequence that is being prefilled; `samples` are drawn from its last row."""

    sequence: Running
    start: int
    stop: int
    samples: range


@dataclass(frozen=True, eq=False)
class Plan:
    """A step: the first `decode` rows of the table, then the chunks. `sampled`: who gets a token, in that order."""

    decode: int
    chunks: tuple[Chunk, ...]
    sampled: NDArray[np.int64]


class Scheduler:
    """The life of all sequences of one `generate` call; `generated[i]` counts the tokens sampled by sequence i."""

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        new_token_limits: Sequence[int],
        prompt_ids: Sequence[int],
        pages: PagePool,
        *,
        n: int,
        seed: int,
        page_size: int,
        max_batch_tokens: int,
        max_sequences: int,
    ) -> None:
        most = [pages_needed(*lengths, page_size) for lengths in zip(prompt_lengths, new_token_limits)]
        self.groups = [Group(i, length, most[i], n) for i, length in enumerate(prompt_lengths)]
        self.prompt_ids = list(prompt_ids)
        self.pages = pages
        self.n = n
        self.seed = seed
        self.page_size = page_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = min(max_sequences, max_batch_tokens)
        self.generated = np.zeros(len(self.groups) * n, np.int64)
        capacity = min(self.max_sequences, max(self.generated.size, 1))
        self.rows = DecodeRows(capacity, max(most, default=1), page_size)
        self.running: dict[int, Running] = {}
        self.may_need = 0  # pages that the running sequences can still ask for
        self.prefilling: list[Running] = []
        self.keeping: dict[int, Group] = {}  # groups that hold a prefix
        self.copies: list[tuple[int, int]] = []  # pages (from, to) to copy before the next step
        self.waiting = [group.index * n for group in self.groups]
        heapify(self.waiting)
        self.stats = Stats()
        pages.peak_used = pages.num_used

    @property
    def finished(self) -> bool:
        return not self.running and not self.waiting

    def length(self, index: int) -> int:
        """Tokens known of a sequence: its prompt and what it has sampled."""
        return self.groups[index // self.n].prompt_length + int(self.generated[index])

    def key(self, index: int) -> tuple[int, int, int]:
        """The part of a sequence's sampling key that does not change: (seed, prompt id, sample index)."""
        return (self.seed, self.prompt_ids[index // self.n], index % self.n)

    def plan(self) -> Plan:
        """Decide the next step, and give every row and chunk in it the pages it needs."""
        self._grow_rows()
        decode = self.rows.count
        chunks = tuple(self._chunks(self.max_batch_tokens - decode))
        assert decode or chunks, "a step without work"
        sampled = [self.rows.sequence[:decode].copy(), *(np.arange(c.samples.start, c.samples.stop) for c in chunks)]
        self.stats.steps += 1
        self.stats.decode_tokens += decode
        self.stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in chunks)
        self.stats.peak_pages = self.pages.peak_used
        return Plan(decode, chunks, np.concatenate(sampled) if chunks else sampled[0])

    def look_ahead(self, going: NDArray[np.int64]) -> bool:
        """May rows `going` of a step that has yet to be accounted for be launched again at once? If so, they have the
        pages that takes. Not while a prompt could be computed instead, nor where a page would have to be taken back:
        those are decisions of `plan`."""
        full = self.rows.next_full(going)
        if self.prefilling or self.pages.num_free < full.size:
            return False
        if self.waiting and self._room(self._pages_to_admit(self.waiting[0])):
            return False
        self._add_pages(full)
        return going.size > 0

    def launched(self, computed: int) -> Plan:
        """The step that was launched ahead, over `computed` rows: of these, the rows that have not ended since."""
        self.stats.steps += 1
        self.stats.decode_tokens += computed
        self.stats.peak_pages = self.pages.peak_used
        return Plan(self.rows.count, (), self.rows.sequence[: self.rows.count].copy())

    def commit(self, plan: Plan, tokens: NDArray[np.int64], done: NDArray[np.bool_]) -> None:
        """Account for a step: `tokens` were sampled by `plan.sampled`, and where `done` they were the last ones."""
        self.generated[plan.sampled] += 1
        self.rows.advance(tokens[: plan.decode])
        # from the last row down: then the row that fills a gap is never one that is done
        for row in np.flatnonzero(done[: plan.decode])[::-1].tolist():
            sequence = self.running[int(self.rows.sequence[row])]
            self.rows.remove(row)
            self._leave(sequence)
            self._finish(sequence.group)
        begin = plan.decode
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.stop
            end = begin + len(chunk.samples)
            if chunk.samples:
                self._prefilled(chunk, tokens[begin:end].tolist(), done[begin:end].tolist())
            begin = end

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages to copy now, (from, to). All are read before any is written."""
        copies, self.copies = self.copies, []
        return copies

    def release(self) -> None:
        """Give all pages back, whatever state the sequences are in: the call ends here."""
        for sequence in list(self.running.values()):
            self._leave(sequence)
        for group in list(self.keeping.values()):
            self._drop_prefix(group)
        self.prefilling.clear()
        self.waiting.clear()
        self.copies.clear()
        self.rows.count = 0

    # pages

    def _grow_rows(self) -> None:
        full = self.rows.full()
        while self.pages.num_free < full.size:
            self._reclaim()
            full = self.rows.full()
        self._add_pages(full)

    def _add_pages(self, rows: NDArray[np.int64]) -> None:
        """A free page for each of these rows."""
        for row, page in zip(rows.tolist(), self.pages.allocate(rows.size)):
            self.running[int(self.rows.sequence[row])].pages.append(page)
            self.rows.add_page(row, page)
        self.may_need -= int(rows.size)

    def _reclaim(self) -> None:
        """Take pages back: a prefix that no running sequence uses, else those of the youngest sequence."""
        if not self._reclaim_prefix():
            self._preempt(self.running[max(self.running)])

    def _reclaim_prefix(self) -> bool:
        for group in sorted(self.keeping.values(), key=lambda group: -group.index):
            if self.pages.references[group.prefix[0]] == 1:
                self._drop_prefix(group)
                return True
        return False

    def _drop_prefix(self, group: Group) -> None:
        self.pages.release(group.prefix)
        group.prefix = []
        del self.keeping[group.index]

    def _preempt(self, sequence: Running) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:
            self.rows.remove(self.rows.row_of(sequence.index))
        self._leave(sequence)
        heappush(self.waiting, sequence.index)
        self.stats.preemptions += 1

    def _room(self, count: int) -> bool:
        """Whether another sequence that takes `count` pages may run."""
        soon = -(-len(self.running) * HEADROOM_STEPS // self.page_size)
        headroom = min(soon, self.may_need)
        return len(self.running) < self.max_sequences and self.pages.num_free - count >= headroom

    # sequences

    def _enter(self, sequence: Running) -> None:
        self.running[sequence.index] = sequence
        self.may_need += sequence.group.most_pages - len(sequence.pages)

    def _leave(self, sequence: Running) -> None:
        del self.running[sequence.index]
        self.may_need -= sequence.group.most_pages - len(sequence.pages)
        self.pages.release(sequence.pages)

    def _chunks(self, budget: int) -> Iterator[Chunk]:
        """Chunks of the prompts under way and, while the budget lasts, of newly admitted ones."""
        waiting_in_line = iter(list(self.prefilling))
        while budget > 0:
            sequence = next(waiting_in_line, None) or self._admit()
            if sequence is None:
                return
            length = self.length(sequence.index)
            stop = min(length, sequence.computed + budget)
            budget -= stop - sequence.computed
            yield Chunk(sequence, sequence.computed, stop, self._samples(sequence) if stop == length else range(0))

    def _pages_to_admit(self, index: int) -> int:
        """Pages for all tokens of a waiting sequence, besides those that its group keeps."""
        return -(-self.length(index) // self.page_size) - len(self.groups[index // self.n].prefix)

    def _samples(self, sequence: Running) -> range:
        """Who draws a token when this sequence is prefilled: the whole group, where the prompt is new."""
        first = self.generated[sequence.index] == 0
        return range(sequence.index, sequence.index + (self.n if first else 1))

    def _admit(self) -> Running | None:
        """Give the oldest waiting sequence pages for all its tokens, or None if it has to wait."""
        if not self.waiting:
            return None
        index = self.waiting[0]
        group = self.groups[index // self.n]
        needed = self._pages_to_admit(index)
        if not self._room(needed):
            if self.running:
                return None
            self.pages.share(group.prefix)  # so that it is not the prefix that goes
            while self.pages.num_free < needed:
                reclaimed = self._reclaim_prefix()
                assert reclaimed, "a sequence that can never fit was accepted"
            self.pages.release(group.prefix)
        heappop(self.waiting)
        self.pages.share(group.prefix)
        self.stats.shared_pages += len(group.prefix)
        pages = [*group.prefix, *self.pages.allocate(needed)]
        sequence = Running(index, group, pages, len(group.prefix) * self.page_size)
        self._enter(sequence)
        self.prefilling.append(sequence)
        return sequence

    def _prefilled(self, chunk: Chunk, tokens: list[int], done: list[bool]) -> None:
        """The sequence's tokens are all computed: let it decode, and with it the samples that forked from it."""
        sequence, group = chunk.sequence, chunk.sequence.group
        self.prefilling.remove(sequence)
        full = group.prompt_length // self.page_size
        if full and not group.prefix and group.unfinished > 1:
            group.prefix = sequence.pages[:full]
            self.pages.share(group.prefix)
            self.keeping[group.index] = group
        for index, token, last in zip(chunk.samples, tokens, done):
            if last:
                self._finish(group)
            elif index == sequence.index:
                self._decode(sequence, token)
            elif self._room(1):
                self._decode(self._fork(sequence, index), token)
            else:
                heappush(self.waiting, index)
        if done[0]:  # the sequence itself: its pages were needed until the others had forked
            self._leave(sequence)

    def _fork(self, parent: Running, index: int) -> Running:
        """A sample of the same prompt: full pages shared, the partly filled one copied, since it is written to."""
        full = parent.group.prompt_length // self.page_size
        shared, partial = parent.pages[:full], parent.pages[full:]
        self.pages.share(shared)
        copied = self.pages.allocate(len(partial))
        self.copies.extend(zip(partial, copied))
        self.stats.shared_pages += full
        self.stats.copied_pages += len(copied)
        child = Running(index, parent.group, [*shared, *copied], parent.computed)
        self._enter(child)
        return child

    def _decode(self, sequence: Running, token: int) -> None:
        position = self.length(sequence.index) - 1
        self.rows.add(sequence.index, token, position, sequence.pages, self.key(sequence.index))

    def _finish(self, group: Group) -> None:
        group.unfinished -= 1
        if group.unfinished == 0 and group.prefix:
            self._drop_prefix(group)

    def integrity(self) -> None:
        """Prove that no page is leaked or shared wrongly, and that every sequence is in one place. AssertionError."""
        tables = [sequence.pages for sequence in self.running.values()]
        self.pages.integrity([*tables, *(group.prefix for group in self.keeping.values())])
        prefilling = {sequence.index for sequence in self.prefilling}
        decoding = self.rows.sequence[: self.rows.count].tolist()
        assert len(set(decoding)) == len(decoding), "a sequence has two rows"
        assert len(set(self.waiting)) == len(self.waiting), "a sequence waits twice"
        assert prefilling.isdisjoint(decoding), "a sequence is prefilled and decodes"
        assert prefilling | set(decoding) == set(self.running), "a running sequence has no place"
        assert not set(self.waiting) & set(self.running), "a sequence runs and waits"
        may_need = sum(sequence.group.most_pages - len(sequence.pages) for sequence in self.running.values())
        assert self.may_need == may_need, f"running sequences may need {may_need} pages, not {self.may_need}"
        for sequence in self.prefilling:
            self._check_private(sequence, sequence.computed)
        for row, index in enumerate(decoding):
            sequence = self.running[index]
            held = len(sequence.pages)
            assert self.rows.table[row, :held].tolist() == sequence.pages, "a row's page table is not its sequence's"
            assert self.rows.num_slots[row] == held * self.page_size, "a row's slots are not its pages'"
            assert self.rows.position[row] == self.length(index) - 1, "a row's position is not its sequence's"
            self._check_private(sequence, int(self.rows.position[row]))

    def _check_private(self, sequence: Running, next_position: int) -> None:
        for page in sequence.pages[next_position // self.page_size :]:
            assert self.pages.references[page] == 1, f"page {page} of sequence {sequence.index} is shared and written"

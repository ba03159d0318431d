"""The choice of the tokens that a step computes: continuous batching over a fixed number of pages.

Requests arrive and are cancelled at any time. Every step has one row for each decoding sequence
and, in what the token budget leaves, chunks of the oldest prompts. A request's prompt is computed
once: when it is, the first tokens of all its samples are drawn, and each sample that finds room
becomes a sequence that shares the full pages of the prompt and gets a copy of the last, partly
filled one. Where decode steps are launched ahead, chunks join the step whose rows are under way,
and rows that came since then sit it out. When pages run out, the youngest sequence gives its pages
back; it is computed again later (prompt and generated tokens), and goes on where it was. A sequence
that is admitted shares the pages that are remembered of its tokens (`pages.py`): those of its
request's prompt, its own from before, and with `prefix_cache` those of any sequence.

Tokens and log-probabilities do not depend on any of these decisions:
tests/engine/test_invariance.py compares the bits.

Left out: the arithmetic and sampling (`runner.py`), stopping (`endings.py`), and priorities other
than first come, first served.
"""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from isobit.engine.pages import PagePool, pages_needed
from isobit.engine.record import Record
from isobit.engine.rows import DecodeRows
from isobit.engine.sequences import Chunk, RunningRequest, Sequence, Stats, StepPlan
from isobit.engine.speculation import Speculation
from isobit.engine.stopping import StopStrings
from isobit.engine.types import Request
from isobit.model.images.bank import Bank, joined

HEADROOM_STEPS = 8
"""A sequence is admitted if the running ones can then go on for about this many steps without a
preemption."""


class Scheduler:
    """The life of all open sequences over the pages of an engine; `at` finds one by its slot in the
    record."""

    def __init__(
        self,
        pages: PagePool,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        self.pages = pages
        self.speculation = speculation
        self.page_size = pages.page_size
        self.prefix_cache = prefix_cache
        self.root: Hashable = None  # what the contents of pages depend on besides the tokens
        self.begun: list[tuple[Request, int]] = []  # in the last step, with what was found in pages
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = min(max_sequences, max_batch_tokens)
        self.record = Record()
        self.rows = DecodeRows(self.max_sequences, self.page_size)
        self.requests: dict[Request, RunningRequest] = {}
        self.at: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.may_need = 0  # pages that the running sequences can still ask for
        self.prefilling: list[Sequence] = []
        self.waiting: list[tuple[int, Sequence]] = []
        self.copies: list[tuple[int, int]] = []  # pages (from, to) to copy before the next step
        self.stats = Stats()
        self.images: Bank | None = None
        self.num_changed = 0  # open requests whose logits are changed: penalties, shaping
        self.num_with_top = 0  # open requests that ask for the likeliest tokens
        self._next_number = 0
        self._refused: tuple[int, int] | None = (
            None  # of what had to wait: its number, and `pages.changes` then
        )

    @property
    def finished(self) -> bool:
        return not self.requests

    @property
    def may_be_captured(self) -> bool:
        """Whether captured steps can serve all that is open."""
        return not (self.num_changed or self.num_with_top)

    def begin(self, root: Hashable) -> None:
        """Prepare for the first request after none was open. Pages that were computed under another
        `root` are forgotten."""
        if root != self.root:
            self.pages.forget()
        self.root, self.stats = root, Stats()
        self.pages.peak_used = self.pages.num_used

    def add(
        self,
        request: Request,
        limit: int,
        stop: StopStrings | None = None,
        where: str = "the prompt",
    ) -> None:
        """Queue a request, whose sequences sample at most `limit` tokens each."""
        prompt, number = np.array(request.prompt_token_ids, np.int64), self._next_number
        turns = np.arange(prompt.size) if self.images is None else self.images.turns(prompt)
        most_pages = pages_needed(prompt.size, limit, self.page_size)
        running = RunningRequest(request, where, number, limit, most_pages, stop, prompt, turns)
        running.members = [
            Sequence(number + sample, running) for sample in range(request.sampling.n)
        ]
        self._next_number += request.sampling.n
        self.num_changed += request.sampling.changed
        self.num_with_top += request.sampling.top_logprobs > 0
        self.requests[request] = running
        heappush(self.waiting, (number, running.members[0]))

    def cancel(self, request: Request) -> None:
        """End a request at once, whatever state its sequences are in."""
        running = self.requests[request]
        self.waiting = [entry for entry in self.waiting if entry[1].owner is not running]
        heapify(self.waiting)
        for sequence in list(running.members):
            if sequence.number in self.running:
                self._stop(sequence)
            self._finish(sequence)

    def length(self, sequence: Sequence) -> int:
        """Count the known tokens of a sequence: its prompt and what it has sampled."""
        generated = int(self.record.generated[sequence.slot]) if sequence.slot >= 0 else 0
        return sequence.owner.prompt.size + generated

    def tokens(self, sequence: Sequence, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens [start, stop) of a sequence."""
        prompt = sequence.owner.prompt
        if stop <= prompt.size:
            return prompt[start:stop]
        sampled = self.record.tokens[
            sequence.slot, max(start - prompt.size, 0) : stop - prompt.size
        ]
        return np.concatenate([prompt[start:], sampled])

    def turns(self, sequence: Sequence, start: int, stop: int) -> NDArray[np.int64]:
        """Return the turns of tokens [start, stop) of a sequence, [L] or [L, 3]: those behind its
        prompt go on from the largest there."""
        turns, size = sequence.owner.turns, sequence.owner.prompt.size
        if stop <= size:
            return turns[start:stop]
        behind = np.arange(max(start, size), stop) - size + int(turns.max()) + 1
        return joined([turns[start:], behind]) if start < size else behind

    def key(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return the part of a sequence's sampling key that does not change: (seed, prompt id,
        sample index)."""
        request = sequence.owner.request
        return request.sampling.seed, request.prompt_id, sequence.sample_index

    def plan(self) -> StepPlan:
        """Decide the next step, and give every row and chunk in it the pages it needs, and what is
        left to drafts."""
        if self.speculation is None:
            self._grow_rows()
            return self._planned(self.rows.count, self.rows.count)
        self._give_back_pages()
        self._grow_rows()
        decode = self.rows.count
        plan = self._planned(decode, decode)
        drafts = self._drafts(self.speculation, plan)
        return replace(plan, drafts=drafts) if drafts else plan

    def going(self, slots: NDArray[np.int64]) -> StepPlan | None:
        """Return those of these decoding sequences that have not ended, as a step that is computed
        already: the step of the next tokens, which were drafted and sampled. None if all have
        ended."""
        going = np.isin(self.rows.slot[: self.rows.count], slots)
        if not going.any():
            return None
        self.rows.put_first(going)
        decode = int(going.sum())
        return StepPlan(decode, (), self.rows.slot[:decode].copy())

    def look_ahead(self, plan: StepPlan, going: NDArray[np.int64]) -> bool:
        """Return whether rows `going` of a step that has yet to be accounted for may be launched
        again at once. If so, they have the pages that this takes. They may not where a page would
        have to be taken back, which is a decision of `plan`, nor while a row sits out: its token is
        not among those that the step leaves on the device."""
        full = self.rows.next_full(going)
        if not going.size or self.rows.count > plan.decode or self.pages.num_free < full.size:
            return False
        self._add_pages(full)
        return True

    def launched(self, slots: NDArray[np.int64]) -> StepPlan | None:
        """Return the step whose decoding rows, those of `slots`, were launched ahead: the rows that
        have not ended since, and chunks that find room next to all launched ones. Rows that have
        come meanwhile sit out. None if no row is left."""
        under_way = np.isin(self.rows.slot[: self.rows.count], slots)
        if not under_way.any():
            return None
        self.rows.put_first(under_way)
        return self._planned(int(under_way.sum()), slots.size)

    def _planned(self, decode: int, computed: int) -> StepPlan:
        """Return a step of the first `decode` rows and the chunks that find room next to the
        `computed` ones."""
        chunks = tuple(self._chunks(self.max_batch_tokens - computed))
        assert decode or chunks, "a step without work"
        self.stats.steps += 1
        self.stats.decode_tokens += computed
        self.stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in chunks)
        self.stats.peak_pages = self.pages.peak_used
        first = [sequence.slot for chunk in chunks for sequence in chunk.samples]
        sampled = np.concatenate([self.rows.slot[:decode], np.array(first, np.int64)])
        return StepPlan(decode, chunks, sampled)

    def commit(self, plan: StepPlan, tokens: NDArray[np.int64], done: NDArray[np.bool_]) -> None:
        """Account for a step: `tokens`, which the record has, were sampled by `plan.sampled`, and
        where `done` they were the last ones."""
        self.record.generated[plan.sampled] += 1
        self.stats.sampled_tokens += tokens.size
        self.rows.advance(tokens[: plan.decode])
        # from the last row down: then the row that fills a gap is never one that is done
        for row in done[: plan.decode].nonzero()[0][::-1].tolist():
            sequence = self.at[int(self.rows.slot[row])]
            self.rows.remove(row)
            self._leave(sequence)
            self._finish(sequence)
        begin = plan.decode
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.stop
            end = begin + len(chunk.samples)
            if chunk.samples:
                self._prefilled(chunk, tokens[begin:end].tolist(), done[begin:end].tolist())
            begin = end

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pages to copy now, (from, to). All are read before any is written."""
        copies, self.copies = self.copies, []
        return copies

    # pages

    def _grow_rows(self) -> None:
        full = self.rows.full()
        while self.pages.num_free < full.size:
            self._preempt(self.running[max(self.running)])
            full = self.rows.full()
        self._add_pages(full)

    def _add_pages(self, rows: NDArray[np.int64]) -> None:
        """Give each of these rows a free page."""
        for row, page in zip(rows.tolist(), self.pages.allocate(rows.size)):
            self.at[int(self.rows.slot[row])].pages.append(page)
            self.rows.add_page(row, page)
        self.may_need -= int(rows.size)

    def _drafts(self, speculation: Speculation, plan: StepPlan) -> dict[int, list[int]]:
        """Return, by decoding row, the tokens that are computed behind its next one, as far as the
        step has room for tokens, and pages are free that running sequences will not need soon."""
        rows = plan.decode + sum(chunk.stop - chunk.start for chunk in plan.chunks)
        drafts = dict[int, list[int]]()
        if not speculation.looks(rows):
            return drafts
        left = self.record.limit[plan.sampled] - self.record.generated[plan.sampled] - 1
        for row, room in enumerate(left[: plan.decode].tolist()):
            sequence = self.at[int(self.rows.slot[row])]
            room = min(room, self.max_batch_tokens - rows, self._slots_behind(row))
            sampling = sequence.owner.request.sampling
            if room < 1 or sampling.top_logprobs or sampling.shaping is not None:
                continue
            drafted = self._of_text(speculation.draft(sequence, self.record, room, rows))
            if not drafted:
                continue
            drafts[row] = drafted
            rows += len(drafted)
            while self.rows.position[row] + len(drafted) >= self.rows.num_slots[row]:
                self._add_pages(np.array([row]))
        self.stats.num_drafts += len(drafts)
        drafted_tokens = sum(map(len, drafts.values()))
        self.stats.num_draft_tokens += drafted_tokens
        self.stats.decode_tokens += drafted_tokens
        self.stats.peak_pages = self.pages.peak_used
        return drafts

    def _of_text(self, drafted: list[int]) -> list[int]:
        """Return the drafted tokens before the first that names an image: none is ever sampled."""
        images = self.images
        if images is None:
            return drafted
        return list(takewhile(lambda token: token < images.vocabulary, drafted))

    def _slots_behind(self, row: int) -> int:
        """Return the number of positions behind a row's next one that may have a slot."""
        spare = max(self.pages.num_free - self._headroom(), 0)
        return int(self.rows.num_slots[row] - self.rows.position[row]) - 1 + spare * self.page_size

    def _give_back_pages(self) -> None:
        """Release the pages that only held drafts which did not count."""
        count, size = self.rows.count, self.page_size
        needed = (self.rows.position[:count] // size + 1) * size
        for row in np.flatnonzero(self.rows.num_slots[:count] > needed).tolist():
            sequence = self.at[int(self.rows.slot[row])]
            keep = int(needed[row]) // size
            self.may_need += len(sequence.pages) - keep
            self.pages.release(sequence.pages[keep:])
            del sequence.pages[keep:]
            self.rows.num_slots[row] = needed[row]

    def preempt_all(self) -> None:
        """Make all sequences wait, to be computed again from their full pages."""
        for number in sorted(self.running, reverse=True):
            self._preempt(self.running[number])

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        heappush(self.waiting, (sequence.number, sequence))
        self.stats.preemptions += 1

    def _room(self, count: int) -> bool:
        """Return whether another sequence that takes `count` pages may run."""
        room = self.pages.num_free - count >= self._headroom()
        return len(self.running) < self.max_sequences and room

    def _headroom(self) -> int:
        """Return the number of pages that running sequences will need soon."""
        soon = -(-len(self.running) * HEADROOM_STEPS // self.page_size)
        return min(soon, self.may_need)

    # sequences

    def _enter(self, sequence: Sequence) -> None:
        self.running[sequence.number] = sequence
        self.may_need += sequence.owner.most_pages - len(sequence.pages)

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.number]
        self.may_need -= sequence.owner.most_pages - len(sequence.pages)
        self._remember(sequence)
        self.pages.release(sequence.pages)
        sequence.pages = []

    def _remember(self, sequence: Sequence) -> None:
        """Register a sequence's pages in the prefix cache, with its tokens that have keys and
        values: all but the last one sampled, or the first `computed` of them during the prefill."""
        computed = sequence.computed if sequence in self.prefilling else self.length(sequence) - 1
        self.pages.remember(
            self._root(sequence), self.tokens(sequence, 0, computed), sequence.pages
        )

    def _root(self, sequence: Sequence) -> Hashable:
        root = self.root if self.prefix_cache else (self.root, sequence.owner.number)
        request = sequence.owner.request
        further = request.adapter, request.salt
        return root if further == (None, None) else (root, *further)

    def _stop(self, sequence: Sequence) -> None:
        """Take a running sequence out of the steps, with its pages."""
        if sequence not in self.prefilling:
            self.rows.remove(self.rows.row_of(sequence.slot))
        self._leave(sequence)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence, and its request if it was the last one."""
        running = sequence.owner
        if sequence.slot >= 0:
            if self.speculation is not None:
                self.speculation.finish(sequence, self.record)
            self.record.give_back(sequence.slot)
            del self.at[sequence.slot]
        running.members.remove(sequence)
        if not running.members:
            del self.requests[running.request]
            self.num_changed -= running.request.sampling.changed
            self.num_with_top -= running.request.sampling.top_logprobs > 0

    def _chunks(self, budget: int) -> Iterator[Chunk]:
        """Yield chunks of the prompts under way and, while the budget lasts, of newly admitted
        ones."""
        waiting_in_line = iter(list(self.prefilling))
        while budget > 0:
            sequence = next(waiting_in_line, None) or self._admit()
            if sequence is None:
                return
            length = self.length(sequence)
            stop = min(length, sequence.computed + budget)
            budget -= stop - sequence.computed
            yield Chunk(
                sequence, sequence.computed, stop, self._samples(sequence) if stop == length else ()
            )

    def _admissible(self) -> tuple[list[int], tuple[int, int] | None] | None:
        """Return the pages that the oldest waiting sequence would share, and the page that it would
        go on in (`PagePool.find_part`); or None where no sequence waits, or it has to go on
        waiting. Once refused, it waits for a page to be given back or remembered: until then it
        finds no more, and running sequences only take pages. So a step costs nothing for its
        length."""
        if not self.waiting or not self._room(0):
            return None
        sequence = self.waiting[0][1]
        if self._refused == (sequence.number, self.pages.changes):
            return None
        length = self.length(sequence)
        # at least one token is computed, for there is one to draw after it
        root, tokens = self._root(sequence), self.tokens(sequence, 0, length - 1)
        shared = self.pages.find(root, tokens)
        needed = -(-length // self.page_size) - len(shared)
        if self._room(needed + self.pages.num_idle(shared)):
            return shared, self.pages.find_part(root, tokens, shared)
        self._refused = sequence.number, self.pages.changes
        return None

    def _samples(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Return the sequences for which a token is drawn when this one is prefilled: all samples
        of the request, where the prompt is new."""
        return (
            (sequence,) if self.record.generated[sequence.slot] else tuple(sequence.owner.members)
        )

    def _admit(self) -> Sequence | None:
        """Give the oldest waiting sequence pages for all its tokens, or None if it has to wait."""
        admissible = self._admissible()
        if admissible is None:
            return None
        shared, partial = admissible
        sequence = heappop(self.waiting)[1]
        length, cached = self.length(sequence), len(shared) * self.page_size
        self.pages.share(shared)
        self.stats.shared_pages += len(shared)
        if partial is not None:
            self.pages.take_part(partial[0])
            shared, cached = [*shared, partial[0]], cached + partial[1]
        sequence.pages = [*shared, *self.pages.allocate(-(-length // self.page_size) - len(shared))]
        sequence.computed = cached
        if sequence.slot < 0:
            self._begin(sequence.owner)
            self.stats.prompt_tokens += length
            self.stats.cached_tokens += cached
            self.begun.append((sequence.owner.request, cached))
        self._enter(sequence)
        self.prefilling.append(sequence)
        return sequence

    def _begin(self, running: RunningRequest) -> None:
        """Give the sequences of a request their slots, before its prompt is computed for the first
        time."""
        self.rows.widen(running.most_pages)
        sampling = running.request.sampling
        for sequence in running.members:
            watched = running.stop is not None or bool(sampling.stop_tokens)
            sequence.slot = self.record.take(running.limit, not sampling.ignore_eos, watched)
            self.at[sequence.slot] = sequence

    def _prefilled(self, chunk: Chunk, tokens: list[int], done: list[bool]) -> None:
        """Let a sequence whose tokens are all computed decode, together with the samples that
        forked from it."""
        parent = chunk.sequence
        self.prefilling.remove(parent)
        self._remember(parent)
        for sequence, token, last in zip(chunk.samples, tokens, done):
            if last:
                continue
            if sequence is parent:
                self._decode(parent, token)
            elif self._room(1):
                self._decode(self._fork(parent, sequence), token)
            else:
                heappush(self.waiting, (sequence.number, sequence))
        if done[0]:  # the parent: its pages were needed until the others had forked
            self._leave(parent)
        for sequence, last in zip(chunk.samples, done):
            if last:
                self._finish(sequence)

    def _fork(self, parent: Sequence, child: Sequence) -> Sequence:
        """Start a sample of the same prompt: full pages are shared, the partly filled one is
        copied, since it is written to."""
        full = parent.owner.prompt.size // self.page_size
        shared, partial = parent.pages[:full], parent.pages[full:]
        self.pages.share(shared)
        copied = self.pages.allocate(len(partial))
        self.copies.extend(zip(partial, copied))
        self.stats.shared_pages += full
        self.stats.copied_pages += len(copied)
        child.pages, child.computed = [*shared, *copied], parent.computed
        self._enter(child)
        return child

    def _decode(self, sequence: Sequence, token: int) -> None:
        settings = sequence.owner.request.sampling.settings
        position = self.length(sequence) - 1
        (turn,) = self.turns(sequence, position, position + 1).tolist()
        key = self.key(sequence)
        self.rows.add(sequence.slot, token, position, sequence.pages, key, settings, turn)

"""The scheduler alone, driven by a model that only remembers which token stands in which slot."""

from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.engine.batch import build
from isobit.engine.integrity import integrity
from isobit.engine.pages import PagePool, pages_needed
from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import Sequence, Stats
from isobit.engine.types import Request, Sampling


@dataclass
class Case:
    """Prompt lengths, samples per prompt, how many tokens each sequence samples, and the engine's
    sizes. `alike`: all prompts begin alike."""

    prompts: list[int]
    n: int
    new_tokens: list[int]
    page_size: int
    num_pages: int
    max_batch_tokens: int
    max_sequences: int
    prefix_cache: bool = True
    alike: bool = False


class Shadow:
    """Plays the model: writes tokens into slots, and checks that every sampled row sees its own
    sequence, whole."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pool = PagePool(case.num_pages, case.page_size)
        sizes = {"max_batch_tokens": case.max_batch_tokens, "max_sequences": case.max_sequences}
        self.scheduler = Scheduler(self.pool, **sizes, prefix_cache=case.prefix_cache)
        sampling = Sampling(case.n, seed=5)
        for group, limit in enumerate(self._most()):
            self.scheduler.add(Request(self._prompt(group), sampling, group, 0), limit)
        self.slots = np.full((case.num_pages * case.page_size, 2), -1)
        self.known = [self._prompt(i // case.n) for i in range(len(case.prompts) * case.n)]
        self.tokens_per_step: list[int] = []

    def _most(self) -> list[int]:
        n = self.case.n
        return [max(self.case.new_tokens[g * n : g * n + n]) for g in range(len(self.case.prompts))]

    def _prompt(self, group: int) -> list[int]:
        return [
            1000 * (1 if self.case.alike else group + 1) + i
            for i in range(self.case.prompts[group])
        ]

    def run(self) -> Stats:
        scheduler = self.scheduler
        integrity(scheduler)
        while not scheduler.finished:
            plan = scheduler.plan()
            integrity(scheduler)
            batch = build(plan, scheduler)
            self._write(batch)
            self._check(plan, batch)
            indices = self._sampled(plan)
            tokens = np.array([self._sample(i) for i in indices], np.int64)
            for index, token in zip(indices, tokens.tolist()):
                self.known[index].append(token)
            done = np.array([self._drawn(i) >= self.case.new_tokens[i] for i in indices], np.bool_)
            scheduler.record.write(plan.sampled, tokens, np.zeros(tokens.size, np.float32))
            scheduler.commit(plan, tokens, done)
            copies = scheduler.take_copies()
            before, size = self.slots.copy(), self.case.page_size
            for source, target in copies:
                self.slots[target * size : (target + 1) * size] = before[
                    source * size : (source + 1) * size
                ]
            integrity(scheduler)
        assert [self._drawn(i) for i in range(len(self.known))] == self.case.new_tokens
        assert self.pool.num_free == self.case.num_pages
        return scheduler.stats

    def _sampled(self, plan) -> list[int]:  # type: ignore[no-untyped-def]
        return [self.scheduler.at[slot].number for slot in plan.sampled.tolist()]

    def _drawn(self, index: int) -> int:
        return len(self.known[index]) - self.case.prompts[index // self.case.n]

    def _sample(self, index: int) -> int:
        return 1_000_000 * (index + 1) + len(self.known[index])

    def _write(self, batch) -> None:  # type: ignore[no-untyped-def]
        layout = batch.layout
        self.tokens_per_step.append(layout.num_rows)
        assert layout.num_rows == batch.tokens.shape[0] <= self.case.max_batch_tokens
        assert layout.context.shape[0] <= min(self.case.max_sequences, self.case.max_batch_tokens)
        assert layout.slots.unique().numel() == layout.num_rows, "two rows write one slot"
        self.slots[layout.slots.numpy(), 0] = batch.tokens.numpy()
        self.slots[layout.slots.numpy(), 1] = layout.positions.numpy()

    def _check(self, plan, batch) -> None:  # type: ignore[no-untyped-def]
        layout, n, size = batch.layout, self.case.n, self.case.page_size
        rows = batch.take.tolist() if batch.take is not None else list(range(plan.decode))
        source = batch.source.tolist() if batch.source is not None else list(range(len(rows)))
        assert len(source) == plan.sampled.size == batch.draws.keys.shape[0]
        ends = layout.row_start[1:].tolist()
        for index, place, key in zip(self._sampled(plan), source, batch.draws.keys.tolist()):
            known = self.known[index]
            assert key == [5, index // n, index % n, len(known)]
            position = int(layout.positions[rows[place]])
            assert position == len(known) - 1
            table = layout.page_table[ends.index(rows[place] + 1)].tolist()
            seen = [
                self.slots[table[p // size] * size + p % size].tolist() for p in range(position + 1)
            ]
            assert seen == [[token, p] for p, token in enumerate(known)]


def case(**changes: object) -> Case:
    values = {
        "prompts": [5, 16, 33],
        "n": 4,
        "new_tokens": [9] * 12,
        "page_size": 4,
        "num_pages": 100,
        "max_batch_tokens": 64,
        "max_sequences": 32,
    }
    return Case(**(values | changes))  # type: ignore[arg-type]


def test_a_prompt_is_computed_once_and_its_full_pages_are_shared() -> None:
    shadow = Shadow(case())
    stats = shadow.run()
    assert stats.prefill_tokens == 5 + 16 + 33
    assert stats.decode_tokens == 12 * 8  # the last token of each is sampled, and never computed
    assert stats.shared_pages == 3 * (1 + 4 + 8)
    assert stats.copied_pages == 3 * (1 + 0 + 1)
    assert stats.preemptions == 0
    # at the end: shared pages, and for each sequence those of its own 9, 8 and 9 last tokens
    assert stats.peak_pages == (1 + 4 + 8) + 4 * 3 + 4 * 2 + 4 * 3


def test_decode_rows_go_first_and_prompts_fill_the_budget() -> None:
    shadow = Shadow(case(prompts=[3, 40], n=2, new_tokens=[20, 20, 4, 4], max_batch_tokens=10))
    shadow.run()
    # 3 + 7 of the second prompt; then two decode rows leave 8 a step: 8, 8, 8, 8, 1; then four rows
    # decode
    assert shadow.tokens_per_step[:8] == [10, 10, 10, 10, 10, 3, 4, 4]


def test_the_youngest_gives_way_and_the_oldest_is_never_preempted() -> None:
    shadow = Shadow(case(prompts=[6, 6, 6], n=1, new_tokens=[20, 20, 20], num_pages=9, page_size=4))
    preempted: list[tuple[int, int]] = []
    preempt = shadow.scheduler._preempt

    def watch(sequence: Sequence) -> None:
        preempted.append((sequence.number, max(shadow.scheduler.running)))
        preempt(sequence)

    shadow.scheduler._preempt = watch  # type: ignore[method-assign]
    stats = shadow.run()
    assert stats.preemptions == len(preempted) > 0
    assert all(index == youngest > 0 for index, youngest in preempted)
    assert stats.prefill_tokens > 18  # what was given back is computed again


def test_who_waits_is_looked_up_once_for_each_change_of_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages of a long sequence that was preempted are not searched for at every step of
    another; in the control they are."""
    searched: list[int] = []
    find = PagePool.find
    monkeypatch.setattr(
        PagePool, "find", lambda *given: searched.append(given[2].size) or find(*given)
    )

    def searches() -> int:
        searched.clear()
        shadow = Shadow(
            case(prompts=[6, 6], n=1, new_tokens=[400, 400], num_pages=120, page_size=4)
        )
        assert shadow.run().preemptions == 1
        return sum(size > 100 for size in searched)

    always = count()
    assert searches() == 2  # refused when it was preempted, and admitted
    monkeypatch.setattr(
        PagePool, "changes", property(lambda _: next(always), lambda *_: None), raising=False
    )
    assert searches() > 100


def test_who_waits_goes_on_once_what_it_shares_is_computed() -> None:
    """Its prompt's pages are remembered while their owner still runs; other prompts wait until it
    has ended."""
    together = {}
    for alike in (True, False):
        sizes = {
            "prompts": [24, 24],
            "n": 1,
            "new_tokens": [9, 9],
            "num_pages": 11,
            "max_batch_tokens": 10,
        }
        shadow = Shadow(case(**sizes, alike=alike))
        running, enter = list[int](), shadow.scheduler._enter

        def watch(sequence: Sequence, enter=enter, running=running, shadow=shadow) -> None:  # type: ignore[no-untyped-def]
            enter(sequence)
            running.append(len(shadow.scheduler.running))

        shadow.scheduler._enter = watch  # type: ignore[method-assign]
        shadow.run()
        together[alike] = max(running)
    assert together == {True: 2, False: 1}


def test_one_sequence_that_just_fits_runs_alone() -> None:
    # 6 + 15 - 1 tokens are 5 pages of 4
    stats = Shadow(case(prompts=[6, 6], n=2, new_tokens=[15] * 4, num_pages=5)).run()
    assert stats.peak_pages == 5


def test_a_prompt_that_nobody_computes_is_given_up_before_a_sequence() -> None:
    stats = Shadow(
        case(prompts=[12, 12, 12], n=3, new_tokens=[8] * 9, num_pages=8, max_sequences=2)
    ).run()
    assert stats.peak_pages <= 8


def test_samples_that_find_no_row_wait_for_one() -> None:
    shadow = Shadow(case(prompts=[9], n=50, new_tokens=[3] * 50, max_sequences=4))
    stats = shadow.run()
    # two pages of the prompt are shared by all; those that waited compute its ninth token again,
    # and their first
    assert stats.shared_pages == 49 * 2
    assert stats.prefill_tokens == 9 + 46 * 2


def test_with_pages_for_all_nobody_waits() -> None:
    sizes = {"num_pages": 20 * (2 + 2), "max_batch_tokens": 160, "max_sequences": 40}
    stats = Shadow(case(prompts=[8] * 20, n=2, new_tokens=[5] * 40, **sizes)).run()
    assert (stats.steps, stats.peak_pages, stats.preemptions) == (5, 80, 0)


def step(shadow: Shadow) -> None:
    """All sample token 0, and go on."""
    plan = shadow.scheduler.plan()
    tokens = np.zeros(plan.sampled.size, np.int64)
    shadow.scheduler.record.write(plan.sampled, tokens, np.zeros(tokens.size, np.float32))
    shadow.scheduler.commit(plan, tokens, tokens > 0)


@pytest.mark.parametrize(
    "sizes", [{}, {"max_batch_tokens": 6}, {"max_sequences": 2}, {"num_pages": 14}]
)
def test_cancelling_gives_everything_back_in_any_state(sizes: dict[str, int]) -> None:
    for steps in range(7):
        shadow = Shadow(case(**sizes))
        for _ in range(steps):
            step(shadow)
        assert (shadow.pool.num_used > 0) == (steps > 0)
        for request in list(shadow.scheduler.requests):
            shadow.scheduler.cancel(request)
            integrity(shadow.scheduler)
        shadow.pool.integrity([])
        assert shadow.pool.num_free == shadow.pool.num_pages
        assert shadow.scheduler.finished
        assert not shadow.scheduler.waiting


def test_integrity_sees_a_page_that_is_shared_and_written() -> None:
    shadow = Shadow(case(prompts=[5], n=2, new_tokens=[4, 4]))
    step(shadow)
    integrity(shadow.scheduler)
    first, second = shadow.scheduler.running[0], shadow.scheduler.running[1]
    shadow.pool.release(second.pages[-1:])
    second.pages[-1] = first.pages[-1]
    shadow.pool.share(first.pages[-1:])
    shadow.scheduler.rows.table[1, 1] = first.pages[-1]
    with pytest.raises(AssertionError, match="is shared and written"):
        integrity(shadow.scheduler)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.integers(1, 24), min_size=1, max_size=6))
    count = len(prompts) * n
    new_tokens = draw(st.lists(st.integers(1, 16), min_size=count, max_size=count))
    page_size = draw(st.sampled_from([1, 2, 4, 7, 16]))
    longest = max(
        pages_needed(prompts[i // n], max(new_tokens[i // n * n : i // n * n + n]), page_size)
        for i in range(count)
    )
    return Case(
        prompts=prompts,
        n=n,
        new_tokens=new_tokens,
        page_size=page_size,
        num_pages=longest + draw(st.integers(0, 30)),
        max_batch_tokens=draw(st.sampled_from([1, 2, 3, 7, 16, 1000])),
        max_sequences=draw(st.integers(1, 20)),
        prefix_cache=draw(st.booleans()),
        alike=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_token_sees_its_own_sequence_whatever_the_sizes(any_case: Case) -> None:
    """And who was refused is refused again until the pages change, whenever one asks."""
    shadow = Shadow(any_case)
    admissible = shadow.scheduler._admissible

    def asked_anew() -> list[int] | None:
        found, shadow.scheduler._refused = admissible(), None
        assert found == admissible()
        return found

    shadow.scheduler._admissible = asked_anew  # type: ignore[method-assign]
    assert shadow.run().peak_pages <= any_case.num_pages

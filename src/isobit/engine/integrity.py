"""Proves that a scheduler's books are right: what tests ask after every step. Left out: the counts of
pages (`PagePool.integrity`)."""

from isobit.engine.scheduler import Scheduler
from isobit.engine.sequences import Sequence


def integrity(scheduler: Scheduler) -> None:
    """Prove that no page is leaked or shared wrongly, and that every sequence is in one queue.
    Raises AssertionError."""
    scheduler.pages.integrity([sequence.pages for sequence in scheduler.running.values()])
    members = [sequence for running in scheduler.requests.values() for sequence in running.members]
    begun = {sequence.slot: sequence for sequence in members if sequence.slot >= 0}
    assert scheduler.at == begun, "a slot is not that of an open sequence"
    assert scheduler.record.num_free + len(begun) == scheduler.record.num_slots, "a slot is lost"
    prefilling = {sequence.number for sequence in scheduler.prefilling}
    slots = scheduler.rows.slot[: scheduler.rows.count].tolist()
    decoding = [scheduler.at[slot].number for slot in slots]
    waiting = [number for number, _ in scheduler.waiting]
    assert len(set(decoding)) == len(decoding), "a sequence has two rows"
    assert len(set(waiting)) == len(waiting), "a sequence waits twice"
    assert prefilling.isdisjoint(decoding), "a sequence is prefilled and decodes"
    assert prefilling | set(decoding) == set(scheduler.running), "a running sequence has no place"
    assert not set(waiting) & set(scheduler.running), "a sequence runs and waits"
    may_need = sum(
        sequence.owner.most_pages - len(sequence.pages) for sequence in scheduler.running.values()
    )
    assert scheduler.may_need == may_need, (
        f"running sequences may need {may_need} pages, not {scheduler.may_need}"
    )
    for sequence in scheduler.prefilling:
        _check_private(scheduler, sequence, sequence.computed)
    for row, slot in enumerate(slots):
        sequence = scheduler.at[slot]
        held = len(sequence.pages)
        assert scheduler.rows.table[row, :held].tolist() == sequence.pages, (
            "a row's page table is not its sequence's"
        )
        assert scheduler.rows.num_slots[row] == held * scheduler.page_size, (
            "a row's slots are not its pages'"
        )
        assert scheduler.rows.position[row] == scheduler.length(sequence) - 1, (
            "a row's position is not its sequence's"
        )
        _check_private(scheduler, sequence, int(scheduler.rows.position[row]))


def _check_private(scheduler: Scheduler, sequence: Sequence, next_position: int) -> None:
    for page in sequence.pages[next_position // scheduler.page_size :]:
        assert scheduler.pages.references[page] == 1, (
            f"page {page} of sequence {sequence.number} is shared and written"
        )

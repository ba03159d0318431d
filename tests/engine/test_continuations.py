"""What is drafted: the token that followed the longest context, or that the sampler's own random
numbers would choose of those that did; and how much of what was said is kept."""

import numpy as np
import pytest
import torch

from isobit.engine import speculation
from isobit.engine.continuations import NUM_KINDS, Continuations, exponential
from isobit.engine.record import Record
from isobit.engine.sequences import RunningRequest, Sequence
from isobit.engine.speculation import Speculation
from isobit.engine.types import Request, Sampling
from isobit.kernels.sampling.definition import exponentials

KEY = (2**40 + 17, 2**32 - 1, 3)


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def any_kind(kind: int) -> bool:
    return True


def drafted(index: Continuations, *tail: int, most: int = 4, greedy: bool = True) -> list[int]:
    guesses = index.guesses(text(*tail), KEY, greedy, 9, any_kind)
    return [guess.token for guess, _ in zip(guesses, range(most))]


def test_one_exponential_is_that_of_the_definition() -> None:
    for position in (0, 5, 2**20):
        found = [exponential(KEY, position, token) for token in range(41)]
        wanted = exponentials(torch.tensor([[*KEY, position]]), 41)[0]
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-14)
    assert exponential(KEY, 6, 0) != exponential(KEY, 5, 0)


def test_the_longest_context_speaks() -> None:
    index = Continuations()
    index.add(text(1, 2, 3, 4, 5, 9, 8, 2, 3, 4, 5, 6, 7), 0)
    assert drafted(index, 1, 2, 3, 4, 5, most=2) == [9, 8], "four tokens are ambiguous, and 9 first"
    assert drafted(index, 4, 5, 9, 8, 2, 3, 4, 5, most=2) == [6, 7], "eight are not"
    assert drafted(index, 50, 60) == []
    assert drafted(index, 6) == [], "one token says nothing"


def test_several_continuations_are_drawn_from_with_the_samplers_numbers() -> None:
    """Counts of 3 and 1: drawn for many positions, they win in their shares, and each draw is the
    winner of the exponential race; the control is another key."""
    index = Continuations()
    for last in (5, 5, 5, 6):
        index.add(text(1, 2, last), 2)
    chosen, control = list[int](), list[int]()
    for position in range(400):
        guess = next(index.guesses(text(1, 2), KEY, False, position, any_kind))
        assert guess.kind < NUM_KINDS
        other = next(index.guesses(text(1, 2), (1, 2, 3), False, position, any_kind))
        chosen.append(guess.token)
        control.append(other.token)
        race = {5: 3 / exponential(KEY, position, 5), 6: 1 / exponential(KEY, position, 6)}
        assert guess.token == max(race, key=lambda token: race[token])
    assert 0.68 < chosen.count(5) / 400 < 0.82
    assert chosen != control
    assert drafted(index, 1, 2) == [5], "greedy: the most frequent"


def sequence_of(prompt: list[int], record: Record, extends: object = None) -> Sequence:
    request = Request(prompt, Sampling(), 0, 0, extends)  # type: ignore[arg-type]
    ids = np.array(prompt, np.int64)
    running = RunningRequest(request, "", 0, 50, 9, None, ids, np.arange(ids.size))
    sequence = Sequence(0, running, record.take(50, True, False))
    return sequence


def say(record: Record, sequence: Sequence, *tokens: int) -> None:
    for token in tokens:
        slots = np.array([sequence.slot])
        record.write(slots, np.array([token]), np.zeros(1, np.float32))
        record.generated[sequence.slot] += 1


def over(given: Speculation, record: Record, sequence: Sequence) -> None:
    given.finish(sequence, record)
    record.give_back(sequence.slot)


def test_siblings_earlier_epochs_and_the_prompt_itself_are_drafted() -> None:
    given, record = Speculation(3), Record()
    prompt = [10, 11, 12, 13, 14]
    first = sequence_of(prompt, record)
    say(record, first, 20, 10, 11)
    assert given.draft(first, record, 9, 1) == [12, 13, 14], "the prompt's own text"
    assert given.draft(first, record, 2, 1) == [12, 13], "as much as there is room for"
    say(record, first, 21, 22, 23, 24)
    other = sequence_of(prompt, record)
    say(record, other, 20, 10)
    assert given.draft(first, record, 9, 1) == []
    assert given.draft(other, record, 9, 1) == [11, 21, 22], "a sibling that is under way"
    over(given, record, first)
    assert given.draft(other, record, 9, 1) == [11, 21, 22], "one that is done"
    over(given, record, other)
    later = sequence_of(prompt, record)
    assert given.draft(later, record, 9, 1)[:2] == [20, 10], "an earlier epoch"
    stranger = sequence_of([10, 11, 12, 13, 15], record)
    say(record, stranger, 20, 10)
    assert given.draft(stranger, record, 9, 1) == []


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used prompts are forgotten, texts and indexes, and counts stay right."""
    most = 60 + 5 * speculation._OF_A_PROMPT
    monkeypatch.setattr(speculation, "KEPT_TOKENS", most)
    monkeypatch.setattr(speculation, "INDEXED_TOKENS", 40)
    given, record = Speculation(3), Record()
    for number in range(12):
        sequence = sequence_of([1, 2, number], record)
        say(record, sequence, *range(10, 18))
        given.draft(sequence, record, 9, 1)
        over(given, record, sequence)
        texts = given._texts.values()
        assert given._kept == sum(each.size for each in texts) <= most
        indexed = [each.index.size for each in texts if each.index is not None]
        assert given._indexed == sum(indexed) <= 40 + 20
    assert not given._followed
    assert 1 < len(given._texts) < 12
    for _ in range(100):
        sequence = sequence_of([1, 2, 11], record)
        say(record, sequence, 10)
        over(given, record, sequence)
    assert len(given._texts) == 1 or max(len(t.said) for t in given._texts.values()) <= 32


def test_a_draft_has_to_pay_by_itself() -> None:
    """A kind of guess that was never right is not drafted any more, in a full batch first; nor is
    anything looked for where a step has many rows. A given number is drafted in any case."""
    auto, fixed, record = Speculation("auto"), Speculation(2), Record()
    prompt = [1, 2, 3, 1, 2]
    sequence = sequence_of(prompt, record)
    assert auto.draft(sequence, record, 9, 1) == [3], (
        "one that is right half of the time pays alone"
    )
    assert auto.draft(sequence, record, 9, 16) == []
    for _ in range(40):  # always wrong
        say(record, sequence, 7, 1, 2)
        auto.draft(sequence, record, 9, 1)
        if int(record.generated[sequence.slot]) > 45:
            over(auto, record, sequence)
            sequence = sequence_of(prompt, record)
    assert fixed.draft(sequence, record, 9, 300) != []
    assert fixed.looks(300)
    assert auto.looks(13)
    assert not auto.looks(14)

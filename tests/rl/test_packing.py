"""Packing without padding, micro-batches by a token budget, and optimizer batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.rl import Sample
from isobit.rl.learner.packing import pack
from isobit.rl.learner.schedule import micro_batches, minibatches


def sample(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Sample:
    return Sample(0, 0, prompt, completion, (-1.0,) * len(completion), "", False, 0)


def test_rows_targets_and_sequences_by_hand() -> None:
    packed = pack(
        [
            sample((1, 2, 3), (4, 5)),
            sample((6,), (7,)),
            sample((8, 9), ()),
            sample((10,), (11, 12, 13)),
        ]
    )
    assert packed.tokens.tolist() == [1, 2, 3, 4, 6, 8, 9, 10, 11, 12]
    assert packed.layout.row_start.tolist() == [0, 4, 5, 7, 10]
    assert packed.layout.positions.tolist() == [0, 1, 2, 3, 0, 0, 1, 0, 1, 2]
    assert packed.rows.tolist() == [2, 3, 4, 7, 8, 9]
    assert packed.targets.tolist() == [4, 5, 7, 11, 12, 13]
    assert packed.sequence.tolist() == [0, 0, 1, 3, 3, 3]
    assert packed.num_targets == 6


def test_the_row_before_a_target_in_its_sequence_predicts_it() -> None:
    samples = [
        sample(tuple(range(10 * i, 10 * i + 1 + i % 4)), tuple(range(5, 5 + i % 3)))
        for i in range(12)
    ]
    packed = pack(samples)
    for row, target, index in zip(
        packed.rows.tolist(), packed.targets.tolist(), packed.sequence.tolist()
    ):
        whole = (*samples[index].prompt_ids, *samples[index].completion_ids)
        position = int(packed.layout.positions[row])
        assert whole[position] == packed.tokens[row]
        assert whole[position + 1] == target


def test_only_empty_completions() -> None:
    packed = pack([sample((1, 2), ()), sample((3,), ())])
    assert packed.tokens.tolist() == [1, 2, 3]
    assert packed.num_targets == 0
    assert packed.rows.dtype == packed.targets.dtype == torch.int64


def test_a_prompt_is_needed() -> None:
    with pytest.raises(AssertionError):
        pack([sample((), (1,))])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20), st.integers(1, 30))
def test_micro_batches_keep_order_and_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    samples = [sample((1,) * prompt, (2,) * completion) for prompt, completion in sizes]
    parts = list(micro_batches(samples, budget))
    assert [i for part in parts for i in part] == list(range(len(samples)))
    totals = [sum(sum(sizes[i]) for i in part) for part in parts]
    assert all(total <= budget or len(part) == 1 for total, part in zip(totals, parts))
    # none could have taken the next sample in
    assert all(total + sum(sizes[part.stop]) > budget for total, part in zip(totals, parts[:-1]))


def test_one_optimizer_batch_keeps_the_order() -> None:
    assert minibatches(5, 1, seed=1, step=2, epoch=3) == [[0, 1, 2, 3, 4]]


def test_several_optimizer_batches_are_a_shuffled_partition() -> None:
    parts = minibatches(50, 4, seed=1, step=2, epoch=0)
    assert [len(part) for part in parts] == [13, 13, 12, 12]
    assert sorted(i for part in parts for i in part) == list(range(50))
    assert parts == minibatches(50, 4, seed=1, step=2, epoch=0)
    others = [
        minibatches(50, 4, seed=s, step=t, epoch=e) for s, t, e in ((2, 2, 0), (1, 3, 0), (1, 2, 1))
    ]
    assert all(other != parts for other in others)


def test_the_shuffle_is_the_same_on_every_machine() -> None:
    """Philox is specified: a run resumed elsewhere goes on with the same split."""
    assert minibatches(6, 2, seed=0, step=0, epoch=0) == [[0, 3, 5], [1, 2, 4]]


def test_more_updates_than_samples_and_none() -> None:
    assert sorted(map(len, minibatches(2, 5, 0, 0, 0))) == [1, 1]
    assert minibatches(0, 3, 0, 0, 0) == []

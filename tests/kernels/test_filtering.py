"""The support under top-k, top-p and min-p, as the learner has it beside the sampler's."""

import pytest
import torch
from torch import Tensor

from isobit.kernels.sampling import filtering
from isobit.kernels.sampling.filtering import (
    WORKING_BYTES,
    Filtering,
    Limits,
    filter_around,
    filter_logits,
    of_rows,
)
from isobit.training.plan.live_bytes import LiveBytes

CASES: list[Filtering] = [
    (7, 1.0, 0.0),
    (0, 0.8, 0.0),
    (0, 1.0, 0.05),
    (12, 0.9, 0.02),
    (1, 1.0, 0.0),
    (999, 1.0, 0.0),
]


def _logits(ties: bool) -> Tensor:
    logits = torch.randn(40, 53, generator=torch.Generator().manual_seed(3)) * 3
    return (logits * 2).round() / 2 if ties else logits


def _support(logits: Tensor, case: Filtering, temperature: float, most_k: int = 0) -> Tensor:
    """As the sampler asks for it: a row of settings each, and a power of two above top-k."""
    top_k, top_p, min_p = (
        torch.full((len(logits),), float(value), dtype=torch.float64) for value in case
    )
    most_k = most_k or (1 << (case[0] - 1).bit_length() if case[0] else 0)
    limits = Limits(top_k, top_p, min_p, most_k, case[1] < 1)
    return filter_logits(logits, of_rows(temperature, logits), limits)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_learners_support_is_the_samplers(
    case: Filtering, ties: bool, temperature: float
) -> None:
    """For tokens that were drawn from it. The control is another case."""
    logits = _logits(ties)
    wanted = _support(logits, case, temperature)
    tokens = wanted.argmax(-1)
    assert torch.equal(filter_around(logits.clone(), tokens, temperature, case), wanted)
    assert torch.equal(_support(logits, case, temperature, most_k=1024), wanted)
    other = filter_around(logits.clone(), tokens, temperature, (3, 0.5, 0.0))
    assert not torch.equal(other, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_the_same_in_every_batch(case: Filtering, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _logits(True)
    tokens = logits.argmax(-1)
    whole = filter_around(logits.clone(), tokens, 0.7, case)
    alone = [
        filter_around(logits[i : i + 1].clone(), tokens[i : i + 1], 0.7, case)
        for i in range(len(logits))
    ]
    assert torch.equal(torch.cat(alone), whole)
    monkeypatch.setattr(filtering, "LOGITS_AT_ONCE", 3 * 53)
    assert torch.equal(filter_around(logits.clone(), tokens, 0.7, case), whole)
    monkeypatch.setattr(filtering, "LOGITS_AT_ONCE", 5)  # less than a row
    assert torch.equal(filter_around(logits.clone(), tokens, 0.7, case), whole)


def test_a_token_outside_is_added_and_nothing_else() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0], [0.0, 3.0, 2.0, -1.0]])
    found = filter_around(logits, torch.tensor([3, 1]), 1.0, (2, 1.0, 0.0))
    assert torch.isfinite(found).tolist() == [[False, True, True, True], [False, True, True, False]]
    assert found[0, 3] == -1


def test_what_a_row_takes_while_it_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows, no more than the plan of a run counts for so many elements; nor half of
    that."""
    monkeypatch.setattr(filtering, "LOGITS_AT_ONCE", 2**14)
    for rows in (64, 256):
        logits = torch.randn(rows, 1024)
        with LiveBytes() as meter:
            filter_around(logits, logits.argmax(-1), 0.7, (20, 0.9, 0.05))
            taken = meter.take() - 32 * rows  # what there is of each row all the time
        assert WORKING_BYTES / 2 < taken / 2**14 < WORKING_BYTES

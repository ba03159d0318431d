"""Routing by scores: what it is equal to, ties, groups, and bits that do not depend on the batch."""

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Scoring, by_score, by_score_backward


def _random(rows: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, experts, generator=generator)
    return 2 * logits, 0.5 * torch.randn(experts, generator=generator)


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    """The control: another bias chooses others."""
    logits, bias = _random(37, 24)
    for scoring in (Scoring(1, 1, 1.3), Scoring(4, 2, 2.5)):
        whole = by_score(logits, bias, 3, True, scoring)
        for row in range(37):
            for alone, together in zip(
                by_score(logits[row : row + 1], bias, 3, True, scoring), whole
            ):
                assert torch.equal(alone[0], together[row])
        assert not torch.equal(by_score(logits, -bias, 3, True, scoring)[1], whole[1])


def test_groups_and_the_bias() -> None:
    """The bias has a say in the choice and none in the gates; a group counts as its two best."""
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.0, 0.0, 0.0]])
    scores = torch.sigmoid(logits.double()).float()
    _, chosen, gates = by_score(logits, torch.zeros(6), 2, False, Scoring(3, 1, 2.0))
    assert chosen.tolist() == [[2, 3]]  # 0.73 + 0.73 are more than 0.95 + 0.0
    assert torch.equal(gates, 2.0 * scores[:, 2:4])
    _, chosen, gates = by_score(
        logits, torch.tensor([0, 0, 0, 0, 1.0, 0]), 2, False, Scoring(3, 1, 2.0)
    )
    assert chosen.tolist() == [[4, 5]]
    assert torch.equal(gates, 2.0 * scores[:, 4:])
    assert by_score(torch.zeros(1, 6), torch.zeros(6), 3, True, Scoring(1, 1, 1.0))[1].tolist() == [
        [0, 1, 2]
    ]  # ties


@pytest.mark.parametrize("normalize", [False, True])
def test_the_gradient_is_that_of_autograd(normalize: bool) -> None:
    logits, bias = _random(9, 12, 3)
    scoring = Scoring(3, 2, 1.7)
    scores, chosen, gates = by_score(logits, bias, 4, normalize, scoring)
    dscores, dgates = torch.randn_like(scores), torch.randn_like(gates)
    leaf = logits.double().requires_grad_()
    s = torch.sigmoid(leaf)
    picked = s.gather(1, chosen)
    picked = picked / picked.sum(1, keepdim=True) if normalize else picked
    ((s * dscores).sum() + (1.7 * picked * dgates).sum()).backward()
    found = by_score_backward(dscores, dgates, scores, chosen, normalize, scoring)
    assert leaf.grad is not None
    torch.testing.assert_close(found.double(), leaf.grad, rtol=0, atol=1e-6)


def test_experts_that_are_given_have_their_own_gates() -> None:
    logits, bias = _random(5, 8)
    scores, chosen, _ = by_score(logits, bias, 2, False, Scoring(1, 1, 1.0))
    given = chosen.flip(1)
    found = by_score(logits, bias, 2, False, Scoring(1, 1, 1.0), given)
    assert torch.equal(found[2], scores.gather(1, given))
    assert torch.equal(found[1], chosen)


@pytest.mark.parametrize(
    ("scoring", "says"),
    [
        (Scoring(3, 1, 1.0), "8 experts do not stand in 3 groups"),
        (Scoring(8, 4, 1.0), "of two or more each"),
        (Scoring(4, 1, 1.0), "3 experts per token, of 1 of 4 groups of 2"),
        (Scoring(2, 3, 1.0), "of 3 of 2 groups"),
    ],
)
def test_groups_that_cannot_be_are_refused(scoring: Scoring, says: str) -> None:
    with pytest.raises(IsobitError, match=says):
        scoring.check(8, 3)

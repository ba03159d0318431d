"""Copies of rows and the sums of what they give."""

import torch

from isobit.kernels import Copies, get_ops

REFERENCE = get_ops("reference")


def test_one_row_with_many_copies_costs_no_other_anything() -> None:
    """A token that all sequences begin with has a copy in each. The sums are those of each row's
    copies in turn; the control is another order of one row's."""
    index = torch.tensor([0, 1, 0, 3, 1, 3, 3, *[0] * 98])
    copies = Copies.of(index, 5)
    assert [tuple(each.place.shape) for each in copies.several] == [(1, 2), (1, 4), (1, 128)]
    x = torch.randn(len(index), 7, generator=torch.Generator().manual_seed(0))
    found = copies.added(x, REFERENCE)
    for row in range(5):
        total = torch.zeros(7)
        for value in x[index == row]:
            total = total + value
        assert torch.equal(found[row], total)
    turned = copies.added(torch.cat([x[:7], x[7:].flip(0)]), REFERENCE)
    assert not torch.equal(turned[0], found[0])
    assert torch.equal(turned[1:], found[1:])

"""Stochastic rounding on a GPU has the reference's bits, all of them."""

import torch

from isobit.kernels import get_ops
from isobit.kernels.optim.triton import round_stochastically

from ..helpers import same
from ..test_stochastic import numbers
from .helpers import DEVICE

REFERENCE = get_ops("reference", "exact")


def test_the_bits_are_the_references() -> None:
    x = numbers(5003)
    x[:4] = torch.tensor([float("inf"), -float("inf"), torch.finfo(torch.float32).max, 0.0])
    for seed, step, first in ((-5, 3, 8), (2**63 - 1, 2**31, 8 * (2**32 - 900))):
        found = round_stochastically(x.to(DEVICE), seed, step, first).cpu()
        assert same(found, REFERENCE.round_stochastically(x, seed, step, first))
        assert not same(found, REFERENCE.round_stochastically(x, seed, step + 1, first)), (
            "the control"
        )

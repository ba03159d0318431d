"""Memory that is allocated but not yet written, and a card that is not there."""

from collections.abc import Iterator

import pytest
import torch

from .helpers import HAS_GPU
from .hopper import Card


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What operators allocate is NaN until a kernel writes it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper() -> Iterator[Card]:
    """Products of 16 and 8 bits are those of Hopper's matrix instruction; a test that computes none
    fails."""
    if HAS_GPU:
        pytest.skip("the GPU has an instruction of its own")
    with Card().computes() as card:
        yield card
    assert card.asked, "no product was computed by the emulated instruction"

"""Memory that is allocated but not yet written, a card that is not there, and a compiler for what
is launched."""

from collections.abc import Iterator

import pytest
import torch

from .helpers import HAS_GPU
from .hopper import Card
from .launches import compiled, noted


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


@pytest.fixture(scope="session", autouse=True)
def _launches_compile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """In a full run every launch that was made since the first of these tests compiles for sm_90:
    at the end, once for each worker."""
    if HAS_GPU or not request.config.getoption("full"):
        yield
        return
    with noted() as found:
        yield
    count, failures = compiled(list(found.values()), tmp_path_factory.mktemp("launches"))
    assert failures == [], f"of {count} launches {len(failures)} do not compile for sm_90"

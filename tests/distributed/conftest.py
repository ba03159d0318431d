"""Ranks that are threads of one process share its cores."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads() -> None:
    """One for each rank, as processes of a test have."""
    torch.set_num_threads(1)

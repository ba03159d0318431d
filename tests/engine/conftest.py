"""Engines whose pages are proven to be in order after every test."""

from collections.abc import Callable, Iterator

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.model import Model


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(model: Model, **settings: int) -> Engine:
        engines.append(Engine(model, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.integrity()
        assert engine.pages.num_free == engine.pages.num_pages


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    """One, here: these tensors are so small that a second thread costs more than it brings."""
    torch.set_num_threads(1)

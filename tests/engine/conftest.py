"""Engines whose pages are proven to be in order after every test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isobit.engine import Engine
from isobit.model import Model

from .helpers import STORIES


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


@pytest.fixture
def stories() -> Path:
    if not STORIES.is_dir():
        pytest.skip(f"needs the stories260K checkpoint in {STORIES}")
    return STORIES

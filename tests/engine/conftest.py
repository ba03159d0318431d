"""Engines whose pages are proven to be in order after every test."""

from collections.abc import Callable, Iterator

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.kernels.native.recording import Recording
from isobit.model import Model

from .helpers import EagerGraph


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
def make_captured(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """Engines whose decode steps go through the buffers and the padding of graphs."""

    def make(model: Model, **settings: int) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("isobit.engine.engine.graph_kind", lambda model, wanted: EagerGraph)
            engine = make_engine(model, **settings)
        assert engine.captures
        return engine

    monkeypatch.setattr("isobit.engine.graphs.SMALLEST_CONTEXT", 16)  # so that there are several
    return make


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Of every step that was made again, why it was computed anew; and several contexts."""
    found: list[str | None] = []
    run = Recording.run

    def counted(self: Recording) -> None:
        found.append(self.refused)
        run(self)

    monkeypatch.setattr(Recording, "run", counted)
    monkeypatch.setattr("isobit.engine.graphs.SMALLEST_CONTEXT", 16)
    return found


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    """One, here: these tensors are so small that a second thread costs more than it brings."""
    torch.set_num_threads(1)

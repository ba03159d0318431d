"""A model with two adapters, and a server over them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.serve.requests import Limits
from tests.models import require, trained_adapters

from .helpers import ADAPTERS, KEY, OTHER_KEY, Running, base_model, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and two adapters after an update, as their folders."""
    require("native")
    where = tmp_path_factory.mktemp("serve")
    base_model(where / "base")
    trained_adapters(where, ADAPTERS)
    return where


@pytest.fixture(scope="session")
def adapters(folder: Path) -> dict[str, Path]:
    """By name."""
    return {name: folder / name for name in ADAPTERS}


@pytest.fixture(scope="module")
def server(folder: Path, adapters: dict[str, Path]) -> Iterator[Running]:
    """A server with both."""
    with serving(folder / "base", adapters) as running:
        yield running


@pytest.fixture(scope="module")
def running(folder: Path, adapters: dict[str, Path]) -> Iterator[Running]:
    """Such a server with a key that Tinker's client takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.serve.helpers.TOKENS", (KEY,))
        patch.setenv("TINKER_TELEMETRY", "0")
        with serving(folder / "base", adapters) as server:
            server.token = KEY
            yield server


@pytest.fixture(scope="module")
def trainer(
    folder: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Such a server that trains."""
    state = tmp_path_factory.mktemp("trained") / "state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.serve.helpers.TOKENS", (KEY, OTHER_KEY))
        patch.setenv("TINKER_TELEMETRY", "0")
        limits = Limits(runs=64)
        with serving(folder / "base", adapters, state=state, limits=limits) as server:
            server.token = KEY
            yield server

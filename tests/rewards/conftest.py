"""Reward functions in a file, and the cage that untrusted programs run in."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from isobit.errors import IsobitError
from isobit.tasks.rewards.sandbox.launch import check_cage
from isobit.tasks.workers import dispatch


@pytest.fixture(scope="session")
def cage() -> None:
    """Skips the test where this machine gives no cage."""
    try:
        check_cage("namespaces", False)
    except IsobitError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the `FUNCTIONS` of the test's module."""
    path = tmp_path_factory.mktemp("rewards") / "my.py"
    path.write_text(request.module.FUNCTIONS)
    return str(path)


SECONDS = 10.0
"""What passes where a function hangs."""
HANG = """
def hang(seconds=60):
    with open(os.path.join(os.path.dirname(__file__), "hangs"), "a") as file:
        file.write("x")
    time.sleep(seconds)
"""
"""The end of a file of functions that imports os and time."""


@pytest.fixture
def only_hanging_takes_time(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For deadlines no time passes, but ten seconds whenever one of the functions hangs: a machine
    of any load keeps them."""
    poll, hangs = dispatch._poll, Path(file).with_name("hangs")
    hangs.write_text("")

    def now() -> float:
        return SECONDS * hangs.stat().st_size

    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(
        dispatch, "_poll", lambda interests, seconds: poll(interests, min(seconds, 0.01))
    )

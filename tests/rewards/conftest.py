"""Reward functions in a file, and the cage that untrusted programs run in."""

import pytest

from isobit.errors import IsobitError
from isobit.tasks.rewards.sandbox.launch import check_cage


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

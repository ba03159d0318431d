"""Reward functions in a file."""

import pytest


@pytest.fixture(scope="module")
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the `FUNCTIONS` of the test's module."""
    path = tmp_path_factory.mktemp("rewards") / "my.py"
    path.write_text(request.module.FUNCTIONS)
    return str(path)

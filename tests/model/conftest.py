"""The real checkpoint, where it is there."""

from pathlib import Path

import pytest

from .helpers import STORIES


@pytest.fixture
def stories() -> Path:
    if not STORIES.is_dir():
        pytest.skip(f"needs the stories260K checkpoint in {STORIES}")
    return STORIES

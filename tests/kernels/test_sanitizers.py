"""The operators under sanitizers; `sanitizers.py` says what is watched, and plants the faults that are the control."""

from pathlib import Path

import pytest

from isobit.kernels.native import available

from .sanitizers import SANITIZERS, run


@pytest.mark.slow
@pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_planted_faults_and_no_others(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path) == []

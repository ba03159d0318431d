"""What a kill leaves: `python -m tests.serve.kills --times 30` does it more often."""

from pathlib import Path
from typing import Any

import pytest

tinker: Any = pytest.importorskip("tinker")

from . import kills  # noqa: E402


def test_a_client_ends_with_the_same_adapter_whenever_its_server_is_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples too, as bytes; the control inside trains by other data."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    lines = list(kills.rounds(folder / "base", tmp_path, times=2, seed=3))
    assert sum(int(line.split()[0]) for line in lines) >= 2
    assert all("all as without kills" in line for line in lines)

"""What a kill leaves: `python -m tests.serve.kills --times 30` does it more often."""

from pathlib import Path
from typing import Any

import pytest

tinker: Any = pytest.importorskip("tinker")

from . import kills  # noqa: E402


@pytest.mark.slow
def test_a_client_ends_with_the_same_adapter_whenever_its_server_is_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples too, as bytes; the control inside trains by other data."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    found = list(kills.rounds(folder / "base", tmp_path, times=2, seed=3))
    claims = {claim.what: claim.value for claim in kills.result(found).claims}
    assert claims["kills"] >= 2
    assert claims["rounds that end otherwise than without kills"] == 0
    assert claims["results compared"] >= 10

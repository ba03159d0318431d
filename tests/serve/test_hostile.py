"""A few hundred hostile requests (`hostile.py`)."""

import random
from pathlib import Path

import httpx
import pytest

from .helpers import serving
from .hostile import HONEST, LIMITS, check, run


def test_hostile_requests_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with serving(folder / "base", limits=LIMITS, state=tmp_path / "state") as server:
        found = run(server, 400, 1)
    assert {200, 400, 404} <= found.keys()
    assert found[200] < 300


def test_negative_control_a_fault_of_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered in OpenAI's words all the same, and says nothing of itself."""

    def broken(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("isobit.serve.openai.sampling_of", broken)
    with serving(folder / "base", limits=LIMITS) as server, httpx.Client(timeout=60) as client:
        response = server.post(*HONEST)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the server failed; its log says why"
        rng = random.Random(1)
        with pytest.raises(AssertionError, match="500"):
            _ = [check(server, rng, client) for _ in range(50)]

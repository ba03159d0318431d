"""Some seconds of `python -m tests.serve.soak`, and what it calls wrong."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("tinker")
pytest.importorskip("zstandard")

from . import soak as soaks
from .kills import Server
from .soak import Soak, figures


@pytest.mark.slow
def test_honest_answers_beside_hostile_tenants(tmp_path: Path) -> None:
    """Each is the one alone, and the run trains the same adapter; every kind was there."""
    found = soaks.run(tmp_path, 8.0, list(soaks.KINDS))
    assert found["num_wrong"] == 0, found["wrong"]
    assert found["honest"]["answers"] >= 1
    assert found["server"]["alive"]
    assert found["server"]["log_lines"] <= 2
    counts = found["counts"]
    for kind in ("texts", "zstd", "trains", "floods", "no token", "half open"):
        assert any(name.startswith(kind) for name in counts), kind
    json.dumps(found)


@pytest.mark.parametrize(
    ("alive", "lines", "descriptors", "wrong"),
    [
        (True, [], [100], []),
        (False, [], [100], ["the server ended by itself"]),
        (True, ["ERROR:isobit"], [100], ["errors in the log"]),
        (True, [], [100, 9000], ["9,000 descriptors"]),
    ],
)
def test_what_it_calls_wrong(
    tmp_path: Path, alive: bool, lines: list[str], descriptors: list[int], wrong: Sequence[str]
) -> None:
    soak = Soak(Server(tmp_path, tmp_path, port=1), (), 0.0)
    soak.seconds, soak.memory, soak.descriptors = [0.1, 0.3, 0.2], [1 << 20], descriptors
    found = figures(soak, [0.05], alive, 0, lines)
    assert found["num_wrong"] == len(wrong)
    assert all(told.startswith(start) for told, start in zip(found["wrong"], wrong))
    assert found["honest"]["slowest_s"] == 0.3
    assert found["honest"]["median_s"] == 0.2

"""Some seconds of `python -m tests.serve.load`."""

from pathlib import Path

import pytest

pytest.importorskip("tinker")

from . import load


@pytest.mark.slow
def test_each_answer_under_load_is_the_one_alone(
    folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Of honest clients among others; all pages are free afterwards, and descriptors."""
    found = load.run(folder / "base", adapters, tmp_path, seconds=6, clients=40, tenants=4)
    assert found.counts["answers"] >= 20
    assert found.counts["runs trained"] >= 1
    assert found.counts["hostile"] >= 5
    assert sum(count for kind, count in found.counts.items() if kind.startswith("gone")) >= 5
    assert found.counts["connections at which nothing was asked"] >= 100
    figures = load.result(found, 40, 4, 0.1)
    assert {claim.what: claim.value for claim in figures.claims}["errors in the log"] == 0
    assert figures.rows[0].rate is not None
    assert figures.rows[0].rate > 1


@pytest.mark.slow
def test_a_wrong_answer_is_noticed(
    folder: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what is compared with is the answer to another request."""
    asked = load.honest()
    wrong = [(path, {**given, "seed": 999}) for path, given in asked[:2]]
    calls = iter([wrong + asked[2:]])  # the first call says what is asked alone
    monkeypatch.setattr(load, "honest", lambda: next(calls, asked))
    with pytest.raises(AssertionError):
        load.run(folder / "base", adapters, tmp_path, seconds=1, clients=4, tenants=2)

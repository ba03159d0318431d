"""A few power cuts and failing writes of `python -m tests.faults`, which does all; and the
control."""

from pathlib import Path

import pytest

from .__main__ import cuts, failures
from .crash import after_a_cut, kinds_of_loss
from .runs import Place

pytestmark = pytest.mark.slow
SEED = 20261122


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Place:
    return Place(tmp_path_factory.mktemp("faults"), base_model)


def test_a_power_cut_loses_nothing(place: Place) -> None:
    for name, injected, lost in cuts(place, 2, SEED):
        assert injected == 2
        assert not lost, name


def test_negative_control_without_a_flush_a_power_cut_loses_the_run(place: Place) -> None:
    """The same changes on a disk that was never told to flush: names without bytes."""
    unflushed = [change for change in place.changes if change.kind != "S"]
    _, names_only = kinds_of_loss(SEED)[1]
    assert place.cut(after_a_cut(unflushed, names_only)) is not None


def test_a_write_that_fails_ends_in_one_line_and_loses_nothing(place: Place) -> None:
    for kind, injected, lost in failures(place, 1, SEED):
        assert injected == 1
        assert not lost, kind

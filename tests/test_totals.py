"""Totals may only fall; a change that raises one changes totals.json and says why."""

from tests.totals import circles, raised, table, totals


def test_totals_only_fall() -> None:
    counts = totals()
    assert not raised(counts, table())
    assert counts.keys() == table().keys()


def test_a_rise_a_new_room_and_a_circle_are_noticed() -> None:
    """The control."""
    assert raised({"lines": 2, "lines of new": 1}, {"lines": 1}) == {
        "lines": "2, at most 1",
        "lines of new": "1, at most None",
    }
    assert not raised({"lines": 1}, {"lines": 1})
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")}) == 3
    assert circles({("a", "b"), ("b", "c"), ("d", "a")}) == 0

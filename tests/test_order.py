"""The order in which xdist's workers get the tests."""

from tests.order import longest_first

QUICK = [f"{name}{i}" for name in "abcd" for i in range(10)]
LONG = ["X0", "x1", "Y0", "Y1", "z0", "Z1"]
"""A file is a letter, in capitals where the test is slow."""


def ordered(items: list[str], workers: int) -> list[str]:
    return longest_first(items, workers, lambda item: item[0].lower(), str.isupper)


def test_every_worker_begins_with_long_files() -> None:
    """As they are collected, one of two workers has them all, at its end: that is the control."""
    items = [*QUICK, *LONG]
    half = len(items) // 2
    assert not any(item in LONG for item in items[:half])
    assert items[-1] in LONG
    found = ordered(items, 2)
    assert sorted(found) == sorted(items)
    assert found[:4] == ["X0", "x1", "z0", "Z1"]
    assert found[half : half + 2] == ["Y0", "Y1"]
    assert not any(item in LONG for item in (found[half - 1], found[-1]))


def test_one_worker_or_only_long_files() -> None:
    assert ordered([*QUICK, *LONG], 1) == [*LONG, *QUICK]
    assert sorted(ordered(LONG, 3)) == sorted(LONG)
    assert ordered([], 2) == []

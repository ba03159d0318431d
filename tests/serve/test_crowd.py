"""What those may cost who have shown no token: who has one always gets in, and the log stays
short."""

import logging
from dataclasses import dataclass, field

import pytest

from isobit.serve.crowd import CountedLines, Crowd, Pace


@dataclass(eq=False)
class Line:
    """A connection."""

    crowd: Crowd
    idle: bool = True
    cuts: list["Line"] = field(default_factory=list)

    def cut(self) -> None:
        self.cuts.append(self)


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Open:
    """Connections of a crowd of three."""

    def __init__(self) -> None:
        self.crowd, self.cuts = Crowd(3, refused=2), list[Line]()

    def join(self, tenant: str | None = None, idle: bool = True) -> tuple[Line, bool]:
        line = Line(self.crowd, idle, self.cuts)
        joined = self.crowd.join(line)
        if joined and tenant is not None:
            self.crowd.shows(line, tenant)
        return line, joined


def test_the_oldest_without_a_token_goes_first() -> None:
    """However many come, each that has a token joins; the control has shown one, and stays."""
    lines = Open()
    first, second, known = (lines.join(tenant)[0] for tenant in (None, None, "a"))
    assert lines.join("b")[1]
    assert lines.cuts == [first]
    assert lines.join("b")[1]
    assert lines.cuts == [first, second]
    lines.crowd.leave(known)
    for _ in range(5):
        assert lines.join()[1]
    assert lines.cuts[2:] != []
    assert known not in lines.cuts
    assert lines.join("a")[1]


def test_where_all_have_a_token_one_of_the_largest_tenant_goes() -> None:
    """If it is idle; the tenant itself is told to come again."""
    lines = Open()
    busy, idle, other = (
        lines.join(tenant, rest)[0] for tenant, rest in (("a", False), ("a", True), ("b", True))
    )
    assert lines.join("b")[1]
    assert lines.cuts == [idle]
    assert lines.join("a")[1]  # now b has most
    assert lines.cuts == [idle, other]
    alone = Open()
    for _ in range(3):
        assert alone.join("a")[1]
    assert not alone.join("a")[1]
    assert alone.cuts == []
    assert busy not in lines.cuts


def test_who_is_refused_is_told_so_as_long_as_there_is_room() -> None:
    lines = Open()
    for _ in range(3):
        lines.join("a", idle=False)
    refused = [lines.join()[0] for _ in range(3)]
    assert lines.cuts == refused[:1]
    lines.crowd.shows(refused[1], "a")  # it has not joined, and does not by its token
    lines.crowd.leave(refused[1])
    assert not lines.join()[1]
    assert lines.cuts == refused[:1]


def test_answers_without_a_token_come_at_a_pace() -> None:
    clock = Clock()
    pace = Pace(rate=10, burst=3, longest=0.35, clock=clock)
    clock.now += 10
    waits = [pace.wait() for _ in range(8)]
    assert waits[:3] == [0.0, 0.0, 0.0]
    assert waits[3:6] == pytest.approx([0.1, 0.2, 0.3])
    assert waits[6:] == [None, None]
    clock.now += 0.2
    assert pace.wait() == pytest.approx(0.2)
    clock.now += 100
    assert [pace.wait() for _ in range(3)] == [0.0, 0.0, 0.0]


def test_lines_that_strangers_cause_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """One a minute, which tells how many there were; nothing is lost."""
    clock = Clock()
    lines = CountedLines(clock)
    with caplog.at_level(logging.WARNING):
        for number in range(2000):
            lines.add("a" if number % 2 else "b")
        assert [record.getMessage() for record in caplog.records] == [
            "requests that are refused: 1 of b"
        ]
        clock.now += 60
        lines.add("a")
    assert caplog.records[1].getMessage() == "requests that are refused: 1,001 of a, 999 of b"
    assert len(caplog.records) == 2

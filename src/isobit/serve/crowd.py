"""What those may cost who have shown no token: connections, answers, lines of the log.

Where there is no room for one more connection, one that has shown no token goes, the oldest first;
where all have, an idle one of the tenant that has most. So nobody without a token keeps anybody out
who has one, and no tenant another. Left out: how long a connection may do nothing (`connections.py`).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

Clock = Callable[[], float]
_LOG = logging.getLogger("isobit.serve")
_SECONDS_OF_A_LINE = 60.0


class Member(Protocol):
    """An open connection."""

    @property
    def idle(self) -> bool:
        """Whether it answers no request."""

    def cut(self) -> None:
        """End it at once."""


class Pace:
    """Answers that are given `rate` times a second, after the first `burst`; more wait, at most
    `longest` seconds."""

    def __init__(
        self, rate: float, burst: int, longest: float, clock: Clock = time.monotonic
    ) -> None:
        self._seconds, self._burst, self._longest, self._clock = 1 / rate, burst, longest, clock
        self._next = clock()

    def wait(self) -> float | None:
        """Seconds until the next answer; None: too many wait, and it is not given."""
        now = self._clock()
        begins = max(self._next, now - self._burst * self._seconds) + self._seconds
        if begins - now > self._longest:
            return None
        self._next = begins
        return max(begins - now, 0.0)


class CountedLines:
    """Lines of the log that strangers can cause: counted, and told once a minute."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._counts, self._next = clock, Counter[str](), clock()

    def add(self, what: str) -> None:
        """One more of its kind."""
        self._counts[what] += 1
        if self._clock() >= self._next:
            self._next = self._clock() + _SECONDS_OF_A_LINE
            counts = ", ".join(f"{count:,} of {kind}" for kind, count in self._counts.items())
            _LOG.warning("requests that are refused: %s", counts)
            self._counts.clear()


class Crowd:
    """All open connections of a server, of which there may be `most`."""

    def __init__(self, most: int, refused: int = 64, clock: Clock = time.monotonic) -> None:
        """`refused`: of those that are too many, so many more are open until they are told so."""
        self.most, self._most_refused = most, refused
        self.lines = CountedLines(clock)
        self.refusals = Pace(rate=20, burst=100, longest=5, clock=clock)
        """Of answers that a token is missing."""
        self.open_to_all = Pace(rate=200, burst=200, longest=5, clock=clock)
        """Of answers that take no token."""
        self._strangers = dict[Member, None]()  # the oldest first, as the others
        self._known = dict[Member, str]()
        self._refused = dict[Member, None]()

    def join(self, member: Member) -> bool:
        """Whether there is room for one more, perhaps because another one went."""
        if len(self._strangers) + len(self._known) >= self.most:
            leaves = next(iter(self._strangers), None) or self._idle()
            if leaves is None:
                self._refused[member] = None
                if len(self._refused) > self._most_refused:
                    self._end(next(iter(self._refused)))
                return False
            self._end(leaves)
        self._strangers[member] = None
        return True

    def shows(self, member: Member, tenant: str) -> None:
        """A connection has shown the token of a tenant."""
        if member in self._strangers:
            del self._strangers[member]
            self._known[member] = tenant

    def leave(self, member: Member) -> None:
        """A connection has ended."""
        self._strangers.pop(member, None)
        self._known.pop(member, None)
        self._refused.pop(member, None)

    def _idle(self) -> Member | None:
        """The oldest idle connection of the tenant that has most, where there are several."""
        counts = Counter(self._known.values())
        most = max(counts.values(), default=0)
        members = (one for one, tenant in self._known.items() if counts[tenant] == most)
        return next((one for one in members if one.idle), None) if len(counts) > 1 else None

    def _end(self, member: Member) -> None:
        self.leave(member)
        member.cut()

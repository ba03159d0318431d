"""Bounds on what clients without a token may cost: connections, answers, lines of the log.

Where one connection more does not fit, the oldest one that has shown no token is ended;
where all have shown one, the oldest idle connection of the tenant that has most connections. So a
client without a token does not keep out a client with one, and no tenant keeps out another. Left
out: how long a connection may do nothing (`connections.py`).
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
    """An open connection of a crowd."""

    @property
    def idle(self) -> bool:
        """Whether the connection is answering no request."""

    def cut(self) -> None:
        """End the connection at once."""


class Pace:
    """A bound on a kind of answer: after the first `burst` answers, `rate` of them a second.
    Answers beyond that wait, at most `longest` seconds each."""

    def __init__(
        self, rate: float, burst: int, longest: float, clock: Clock = time.monotonic
    ) -> None:
        self._seconds, self._burst, self._longest, self._clock = 1 / rate, burst, longest, clock
        self._next = clock()

    def wait(self) -> float | None:
        """Return the seconds until the next answer may be given; None: too many answers wait, and
        this one is not to be given."""
        now = self._clock()
        begins = max(self._next, now - self._burst * self._seconds) + self._seconds
        if begins - now > self._longest:
            return None
        self._next = begins
        return max(begins - now, 0.0)


class CountedLines:
    """Lines of the log that clients without a token can cause: counted, and logged together, at
    most once a minute."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._counts, self._next = clock, Counter[str](), clock()

    def add(self, what: str) -> None:
        """Count one more line of the kind `what`, and log all counts if it is time."""
        self._counts[what] += 1
        if self._clock() >= self._next:
            self._next = self._clock() + _SECONDS_OF_A_LINE
            counts = ", ".join(f"{count:,} of {kind}" for kind, count in self._counts.items())
            _LOG.warning("requests that are refused: %s", counts)
            self._counts.clear()


class Crowd:
    """The open connections of a server, at most `most` of them."""

    def __init__(self, most: int, refused: int = 64, clock: Clock = time.monotonic) -> None:
        """`refused`: how many refused connections, beyond `most`, may be open until each has its
        refusal."""
        self.most, self._most_refused = most, refused
        self.lines = CountedLines(clock)
        self.refusals = Pace(rate=20, burst=100, longest=5, clock=clock)
        """The pace of answers that say that a token is missing."""
        self.open_to_all = Pace(rate=200, burst=200, longest=5, clock=clock)
        """The pace of answers that need no token."""
        self._strangers = dict[Member, None]()  # the oldest first, as in the next two
        self._known = dict[Member, str]()
        self._refused = dict[Member, None]()

    def join(self, member: Member) -> bool:
        """Add a connection, for which another one may be ended; tell whether there is room for it.
        One without room counts as refused, and may be open until it has its refusal."""
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
        """Note that a connection has shown the token of a tenant."""
        if member in self._strangers:
            del self._strangers[member]
            self._known[member] = tenant

    def leave(self, member: Member) -> None:
        """Forget a connection, which has ended."""
        self._strangers.pop(member, None)
        self._known.pop(member, None)
        self._refused.pop(member, None)

    def _idle(self) -> Member | None:
        """Return the oldest idle connection of the tenant that has most connections; None: there is
        no such connection, or only one tenant has connections."""
        counts = Counter(self._known.values())
        most = max(counts.values(), default=0)
        members = (m for m, tenant in self._known.items() if counts[tenant] == most)
        return next((m for m in members if m.idle), None) if len(counts) > 1 else None

    def _end(self, member: Member) -> None:
        self.leave(member)
        member.cut()

"""Lines of requests to training runs, done one after the other in the order of their numbers, in
whatever order they arrive: a client that sends several at once sends the first of them last.

A number that does not come holds its line for `GAP_SECONDS`. Then the requests that wait fail, and
the line goes on after them: a step without the gradients that belong to it would be a wrong result.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from isobit.serve.requests import BadRequest

GAP_SECONDS = 120.0
_MOST_SKIPPED = 1024  # numbers that a line knows to have been skipped


class Line:
    """The line of one run: the request of number `next` is done now, or has not arrived. `skipped`:
    earlier numbers that did not come in time."""

    def __init__(self, first: int, skipped: Iterable[int] = ()) -> None:
        self.next = first
        self._skipped = deque(skipped, _MOST_SKIPPED)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._busy = False
        self._ended: BadRequest | None = None
        self._watch: asyncio.TimerHandle | None = None

    def was_skipped(self, number: int) -> bool:
        """Tell whether the line went on without the request of a number."""
        return number in self._skipped

    def end(self, error: BadRequest) -> None:
        """End the line: requests that wait, and those that come later, fail with `error`."""
        self._ended = error
        self._fail_waiting(error)

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Wait until all requests of smaller numbers are done, and hold the turn while the context
        is open: no other request has a turn until this one has ended, in whatever way. Raises
        BadRequest for a number whose turn has passed or that waits already, and for one that waits
        when an earlier number does not come in time; and the error of `end`."""
        if self._ended is not None:
            raise self._ended
        if number < self.next or number in self._waiting:
            raise BadRequest(f"request {number} of this run came twice, or too late")
        waits = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._advance()
        await waits
        try:
            yield
        finally:
            self._busy, self.next = False, number + 1
            self._advance()

    def _advance(self) -> None:
        """Give the turn to the request of number `next`, if it is there; if only later ones are,
        wait for it at most `GAP_SECONDS`."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._busy or not self._waiting:
            return
        if (waits := self._waiting.pop(self.next, None)) is not None:
            self._busy = True
            waits.set_result(None)
        else:
            self._watch = asyncio.get_running_loop().call_later(GAP_SECONDS, self._give_up)

    def _give_up(self) -> None:
        missing, self.next = self.next, max(self._waiting) + 1
        behind = range(max(missing, self.next - 2 * _MOST_SKIPPED), self.next)
        self._skipped.extend(number for number in behind if number not in self._waiting)
        self._fail_waiting(
            BadRequest(
                f"request {missing} of this run did not come within {GAP_SECONDS:g} seconds; this "
                "one, which belongs after it, was not done"
            )
        )

    def _fail_waiting(self, error: BadRequest) -> None:
        for waits in self._waiting.values():
            waits.set_exception(error)
        self._waiting.clear()
        self._advance()

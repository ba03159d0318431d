"""Where an environment's code runs: `async` functions on the worker's event loop, all others in a
thread that belongs to the one environment.

So calls of different episodes overlap, whether they are `async` or not, while those of one episode
come in order and in one thread: a connection that its environment opened stays usable (SQLite's may
not change threads), and code that runs its own event loop finds no other in its way. A thread
cannot be stopped: one that is late is left behind with its environment. Left out: objects that a
module keeps for all its environments; they must bear threads.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


class Late(Exception):
    """Raised for a call that has not come back in time."""


@dataclass(frozen=True)
class Outcome:
    """The result of a call, or the exception that it raised."""

    result: Any = None
    error: BaseException | None = None


class Home:
    """The thread of one environment, started when it is first needed. `lost`: a call in it has not
    come back, so that it takes no more."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self.lost = False

    async def run(self, call: Callable[[], Any], until: float) -> Outcome:
        """Make a call, in the environment's thread or, for an `async` function, on the loop; await
        its result if it is awaitable, and return the outcome. Raises Late at the time `until` of
        the loop's clock."""
        loop = asyncio.get_running_loop()
        if self.lost:
            raise Late("an earlier call has not come back")
        if not is_async(call):
            self._thread = self._thread or ThreadPoolExecutor(1, "environment")
            future = loop.run_in_executor(self._thread, _contained, call)
            await asyncio.wait({future}, timeout=max(0.0, until - loop.time()))
            if not future.done():
                self.lost = True
                raise Late("it has not come back")
            outcome = future.result()
            if outcome.error is not None or not inspect.isawaitable(outcome.result):
                return outcome
            waiting = outcome.result
        else:
            waiting = call()
        task = loop.create_task(_awaited(waiting))
        await asyncio.wait({task}, timeout=max(0.0, until - loop.time()))
        if not task.done():
            task.cancel()
            raise Late("it has not come back")
        return task.result()

    def close(self) -> None:
        """Release the thread, which ends once it is idle."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def is_async(call: Callable[..., Any]) -> bool:
    """Return whether a call makes a coroutine, and so belongs on the event loop."""
    return inspect.iscoroutinefunction(call)


def _contained(call: Callable[[], Any]) -> Outcome:
    """Make a call and return its outcome, whatever it raises, SystemExit too: neither the thread
    nor the loop ends by it."""
    try:
        return Outcome(call())
    except BaseException as error:
        return Outcome(error=error)


async def _awaited(waiting: Awaitable[Any]) -> Outcome:
    try:
        return Outcome(await waiting)
    except BaseException as error:
        return Outcome(error=error)

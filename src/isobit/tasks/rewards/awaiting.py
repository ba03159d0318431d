"""One event loop for a process's whole life, on which `async` reward functions run.

A semaphore, a lock, a queue or a connection that a module keeps belongs to the loop on which it was
first used, so all calls share one loop, as they do under TRL. What a function leaves running there
goes on in the next call: the reader of a kept connection, a queue's consumer. Where a call raises,
though, its tasks that run the same coroutines as the one that raised are cancelled (the siblings in
a `gather`), so that the call can be repeated without them. Left out: a deadline, which the worker's
parent keeps.
"""

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from types import CodeType
from typing import Any


class Loop:
    """An event loop that runs while something is awaited; it is opened where it is first needed."""

    def __init__(self) -> None:
        self._opened: asyncio.AbstractEventLoop | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._opened is None or self._opened.is_closed():  # a function may close it
            self._opened = asyncio.new_event_loop()
        return self._opened

    def make_current(self) -> None:
        """Let code of this thread, such as a module's that is imported, get this loop by
        `asyncio.get_event_loop`."""
        asyncio.set_event_loop(self._loop)

    def wait_for(self, result: Awaitable[Any]) -> Any:
        """Run an awaitable to its end and return its result; in another thread where this thread's
        event loop is running, as in a notebook."""
        with self._one_at_a_time:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return self._run(result)
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self._run, result).result()

    def _run(self, result: Awaitable[Any]) -> Any:
        earlier = asyncio.all_tasks(self._loop)
        call = self._loop.create_task(_awaited(result))
        try:
            return self._loop.run_until_complete(call)
        except BaseException as error:
            raised = _codes(error)
            left = asyncio.all_tasks(self._loop) - earlier
            self._end([task for task in left if task is call or _code(task) in raised])
            raise

    def _end(self, tasks: "list[asyncio.Task[Any]]") -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        for task in tasks:
            if not task.cancelled():
                task.exception()  # looked at, so that nothing is said of it later


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _codes(error: BaseException) -> set[CodeType]:
    """Return the code objects of all frames that an exception passed through."""
    codes: set[CodeType] = set()
    trace = error.__traceback__
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return codes


def _code(task: "asyncio.Task[Any]") -> CodeType | None:
    return getattr(task.get_coro(), "cr_code", None)


LOOP = Loop()
"""This process's."""
